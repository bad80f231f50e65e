"""Folders that appear at their name complete or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from llmctl.errors import OutputError
from llmctl.runtime.checkpoint.output_file import OutputFile, free_bytes, is_at, output_error, sync_folder

# What a model's folder is made of. A folder that holds anything else is never replaced: --force must not cost more than a model.
_OF_A_MODEL = (
    "*.json",
    "*.safetensors",
    "*.model",
    "*.jinja",
    "merges.txt",
    "vocab.txt",
    "additional_chat_templates",
    "README.md",
    "LICENSE*",
    "NOTICE*",
    ".gitattributes",
)


class OutputFolder:
    """A folder filled under a temporary name beside its place, and renamed when it is complete.

    Use it as a context manager: the folder appears at `path` when the block ends, and not at all when the block ends by an
    exception. The temporary name is fixed (`.NAME.partial`) and locked: what a killed run left is used again instead of
    piling up, and two runs cannot write the same folder.

    work: where the files are to be put meanwhile.
    Errors: OutputError naming the folder and the cause.
    """

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        """replace: take the place of a folder that is there; see `check_folder`."""
        self.path = path
        self._target = Path(os.path.realpath(path))
        check_folder(path, replace=replace)
        self.work = self._target.with_name(f".{self._target.name}.partial")
        try:
            self._lock: int | None = _make_locked(self.work)
        except BlockingIOError as error:
            raise OutputError(f"{path}: another process is writing this folder") from error
        except OSError as error:
            raise output_error(path, error) from error
        try:
            if _finish_replacing(self._target):
                check_folder(path, replace=replace)
        except BaseException:
            self.abort()
            raise

    def require(self, count: int) -> None:
        """OutputError if the disk has not `count` bytes free."""
        free = free_bytes(self.work)
        if count > free:
            raise OutputError(f"{self.path}: needs {count} bytes, {free} are free on this disk")

    def write_file(self, name: str, data: bytes) -> None:
        """Write a small file. name: relative; folders in it are made."""
        place = self.work / name
        place.parent.mkdir(parents=True, exist_ok=True)
        file = OutputFile(place)
        try:
            file.write(data)
            file.commit()
        except BaseException:
            file.abort()
            raise

    def commit(self) -> None:
        """Put the folder at its name."""
        lock = self._lock
        if lock is None:
            raise ValueError(f"{self.path}: already closed")
        try:
            sync_folder(self.work)
            _put_in_place(self.work, self._target)
            sync_folder(self._target.parent)
        except OSError as error:
            self.abort()
            raise output_error(self.path, error) from error
        self._lock = None
        os.close(lock)

    def abort(self) -> None:
        """Remove what was written. Nothing happens after `commit` or a second time."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        shutil.rmtree(self.work, ignore_errors=True)
        os.close(lock)

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        if exc_type is None:
            self.commit()
        else:
            self.abort()


def check_folder(path: Path, *, replace: bool) -> None:
    """OutputError if a model's folder cannot be put there: something else is, or a folder that may not be replaced.

    replace: a folder may be, provided it holds nothing but the files of a model. An empty one may always.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise OutputError(f"{path}: the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK):
        raise OutputError(f"{path}: the folder {target.parent} cannot be written to")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise OutputError(f"{path}: is a file; give the name of a folder")
    names = sorted(path.name for path in target.iterdir())
    if names and not replace:
        raise OutputError(f"{path}: exists already and is not empty; --force replaces it, -o names another folder")
    strange = [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in _OF_A_MODEL)]
    if strange:
        raise OutputError(f"{path}: holds {strange[0]}, which is no part of a model: this folder is not replaced")


def refuse_inside(input_paths: Iterable[Path], output: Path) -> None:
    """OutputError if an input lies in the folder to be written, or is it."""
    target = Path(os.path.realpath(output))
    for path in input_paths:
        real = Path(os.path.realpath(path))
        if target == real or target in real.parents:
            raise OutputError(f"{output}: the input {path} lies in the folder to be written; give it another name")


def _make_locked(folder: Path) -> int:
    """The folder, made anew or emptied, and a descriptor that locks it."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, folder):  # else its last writer renamed or removed it before we had the lock
                _empty(folder)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            Path(entry.path).unlink()


def _put_in_place(work: Path, target: Path) -> None:
    """Rename; a folder that was there is moved aside first and removed last, and put back if the rename fails."""
    if not target.is_dir() or not any(target.iterdir()):
        work.rename(target)  # the system lets an empty folder be replaced
        return
    aside = _aside(target)
    target.rename(aside)
    try:
        work.rename(target)
    except BaseException:
        aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _aside(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def _finish_replacing(target: Path) -> bool:
    """A run that was killed between the two renames has left the old folder aside: put it back, and say so. One killed after
    them has left what is replaced: remove it."""
    aside = _aside(target)
    if not os.path.lexists(target) and aside.is_dir():
        aside.rename(target)
        return True
    shutil.rmtree(aside, ignore_errors=True)
    return False

"""Files that appear at their name complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from llmctl.errors import OutputError

_PIECE = 64 << 20  # bytes per write call, so that an interrupt is noticed soon


def refuse_same_file(input_paths: Iterable[Path], output: Path) -> None:
    """OutputError if `output` is one of the inputs, under whatever name (links included). Call before opening anything."""
    for path in input_paths:
        with contextlib.suppress(OSError):  # one that cannot be looked at fails with its reason when it is opened
            if Path(path).samefile(output):
                raise OutputError(f"{output}: the output is the same file as the input {path}; give it another name")


class OutputFile:
    """A file written under a temporary name in the target's folder, and renamed when it is complete.

    The temporary name is fixed (`.NAME.partial`) and locked: what a killed run left is used again instead of piling up,
    and two runs cannot write the same target. Use `commit` for success, `abort` for anything else.
    Errors: OutputError naming the file and the cause (folder missing or read-only, disk full).

    temporary: that name. resume: what is under it is gone on with; `kept` is what it was, and `suspend` leaves it for the next
    run.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        # Through a link the real file is replaced, so that the link stays one.
        self._target = Path(os.path.realpath(path))
        self.temporary = self._target.with_name(f".{self._target.name}.partial")
        _check_target(path, self._target)
        self._descriptor: int | None = _open_locked(self.temporary, path)
        self._replaces = os.path.lexists(self._target)
        self.kept, self.position = b"", 0
        if resume:
            self.kept = self.temporary.read_bytes()
            self.cut(len(self.kept))
        else:
            os.ftruncate(self._descriptor, 0)

    def cut(self, length: int) -> None:
        """Keep the first `length` bytes; what is written next comes after them."""
        os.ftruncate(self._open_descriptor(), length)
        self.position = os.lseek(self._open_descriptor(), length, os.SEEK_SET)

    def require(self, count: int) -> None:
        """OutputError if the disk has not `count` bytes free: said before the work, not after hours of it."""
        free = free_bytes(self._target.parent)
        if count > free:
            raise OutputError(f"{self.path}: needs {count} bytes, {free} are free on this disk")

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes (anything contiguous)."""
        view = memoryview(data).cast("B")
        while len(view):
            try:
                written = os.write(self._open_descriptor(), view[:_PIECE])
            except OSError as error:
                raise output_error(self.path, error) from error
            self.position += written
            view = view[written:]

    def commit(self) -> None:
        """Put the file at its name, safely on the disk."""
        descriptor = self._open_descriptor()
        if not self._replaces and os.path.lexists(self._target):  # nobody was asked whether it may go
            self.abort()
            raise OutputError(f"{self.path}: a file of this name has appeared while it was written; it is kept")
        try:
            os.fsync(descriptor)
            self.temporary.replace(self._target)
            self._descriptor = None
            os.close(descriptor)
            sync_folder(self._target.parent)
        except OSError as error:
            self.abort()
            raise output_error(self.path, error) from error

    def suspend(self) -> None:
        """Leave what was written under the temporary name. Nothing happens after `commit` or a second time."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def abort(self) -> None:
        """Remove what was written. Nothing happens after `commit` or a second time."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(OSError):  # removed first: while it is locked nobody else can have taken it over
            self.temporary.unlink()
        with contextlib.suppress(OSError):
            os.close(descriptor)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self.path}: already closed")
        return self._descriptor


def _check_target(path: Path, target: Path) -> None:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise output_error(path, error) from error
    if not stat.S_ISREG(mode):
        raise OutputError(f"{path}: the output must be a file, this is a {'folder' if stat.S_ISDIR(mode) else 'device'}")


def _open_locked(temporary: Path, path: Path) -> int:
    """A descriptor of the temporary file, locked."""
    while True:
        descriptor = None
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, temporary):  # else its last writer renamed or removed it before we had the lock
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if descriptor is not None:
                os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise OutputError(f"{path}: another process is writing this file") from error
            raise output_error(path, error) from error


def is_at(descriptor: int, path: Path) -> bool:
    """Whether what is open is what has the name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def free_bytes(folder: Path) -> int:
    """What may still be written to the disk the folder is on."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def sync_folder(folder: Path) -> None:
    """Make the rename itself last. Some file systems cannot; the content is safe by then."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def output_error(path: Path, error: OSError) -> OutputError:
    """What went wrong with writing `path`, in words."""
    if error.errno == errno.ENOSPC:
        return OutputError(f"{path}: no space left on this disk")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return OutputError(f"{path}: the folder {path.parent} cannot be written to ({error.strerror})")
    if error.errno == errno.ENOENT:
        return OutputError(f"{path}: the folder {path.parent} does not exist")
    return OutputError(f"{path}: cannot be written: {error.strerror or error}")

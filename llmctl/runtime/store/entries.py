"""What lies in the store: one folder a model, with its manifest, landed by a single rename.

models/NAME/manifest.json     source, sha256, size, license, date
models/NAME/FILE.gguf         unless the manifest points into the Hugging Face cache, which keeps what is its
models/.partial/NAME/         a pull under way; whatever is found there under the lock was left by a killed one
models/.locks/NAME.lock
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

from llmctl.errors import OutputError
from llmctl.runtime import paths

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


class Bar(Protocol):
    """A progress bar under way, in bytes from the start."""

    def update_to(self, done: float, total: float | None = None) -> None: ...


ProgressFactory = Callable[[str, "float | None"], AbstractContextManager[Bar]]
"""Opens a bar from a description and a total in bytes (None: unknown)."""


@dataclass(frozen=True)
class StoredModel:
    """A model of the store. `path` is what to open, `sha256` of that file (None for a folder of several), `size` in
    bytes, `pulled_at` in ISO 8601, UTC."""

    name: str
    source: str
    path: Path
    sha256: str | None
    size: int
    license: str | None
    pulled_at: str


@dataclass(frozen=True)
class Fetched:
    """What a source brought: a file inside the folder it was given, or an absolute path elsewhere."""

    path: Path
    source: str
    sha256: str | None
    size: int
    license: str | None


def store_folder() -> Path:
    return paths.home() / "models"


def folder_key(name: str) -> str | None:
    """Folder name of a model name; None where the name cannot be one (a path, an empty word)."""
    key = name.replace("/", "--").replace(":", "--")
    return key if _KEY.fullmatch(key) else None


def list_models() -> list[StoredModel]:
    """Models of the store that are whole, by name."""
    folder = store_folder()
    if not folder.is_dir():
        return []
    entries = (_read_entry(child) for child in folder.iterdir() if not child.name.startswith("."))
    return sorted((entry for entry in entries if entry), key=lambda entry: entry.name)


def find_model(name: str) -> StoredModel | None:
    """The model of this name, if the store has it whole."""
    key = folder_key(name)
    entry = _read_entry(store_folder() / key) if key else None
    return entry if entry and entry.name == name else None


def has_remains(name: str) -> bool:
    """Whether the store holds anything under this name, even a model that is not whole any more."""
    key = folder_key(name)
    return key is not None and (store_folder() / key).exists()


def remove_model(name: str) -> None:
    """Remove a model's folder from the store; nothing outside it. Errors: OutputError."""
    key = folder_key(name)
    assert key is not None, name
    with lock(name), naming_the_store():
        folder = store_folder() / key
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)


@contextlib.contextmanager
def naming_the_store() -> Iterator[None]:
    """Turn what the file system refuses (disk full, read-only …) into an OutputError that names the store."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "free some space or set LLMCTL_HOME" if error.errno == errno.ENOSPC else "set LLMCTL_HOME to move it"
        raise OutputError(f"the model store {store_folder()} cannot be written: {reason} ({advice})") from error


@contextlib.contextmanager
def lock(name: str, progress: ProgressFactory | None = None) -> Iterator[None]:
    """Hold the model's lock, waiting for another process that pulls or removes it."""
    import filelock

    folder = store_folder() / ".locks"
    with naming_the_store():
        folder.mkdir(parents=True, exist_ok=True)
        held = filelock.FileLock(folder / f"{folder_key(name)}.lock")
        try:
            held.acquire(timeout=0)
        except filelock.Timeout:
            with (progress or no_progress)(f"waiting for another process that handles {name}", None):
                held.acquire()
    try:
        yield
    finally:
        held.release()


def remove_abandoned() -> None:
    """Remove what killed pulls of any model left behind; one still under way holds its lock and is not touched."""
    import filelock

    for folder in (store_folder() / ".partial").glob("*"):
        held = filelock.FileLock(store_folder() / ".locks" / f"{folder.name}.lock")
        with contextlib.suppress(filelock.Timeout), held.acquire(timeout=0):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def no_progress(description: str, total: float | None) -> Iterator[Bar]:
    yield _NoBar()


class _NoBar:
    def update_to(self, done: float, total: float | None = None) -> None:
        pass


@contextlib.contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """An empty folder inside the store for a pull under way, gone afterwards; the model's lock must be held."""
    folder = store_folder() / ".partial" / str(folder_key(name))
    with naming_the_store():
        shutil.rmtree(folder, ignore_errors=True)  # left by a pull that was killed
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def land(name: str, folder: Path, fetched: Fetched) -> StoredModel:
    """Add the manifest to a fetched folder and move it to the model's place by one rename."""
    inside = fetched.path.is_relative_to(folder)
    manifest = {
        "version": MANIFEST_VERSION,
        "name": name,
        **asdict(fetched),
        "path": str(fetched.path.relative_to(folder) if inside else fetched.path),
        "pulled_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    with naming_the_store():
        _write_durably(folder / MANIFEST, json.dumps(manifest, indent=2).encode())
        target = store_folder() / str(folder_key(name))
        if target.exists():
            target.rename(folder.parent / "replaced")
        folder.rename(target)
        _sync_folder(target.parent)
    entry = _read_entry(target)
    assert entry is not None, target
    return entry


def _read_entry(folder: Path) -> StoredModel | None:
    """The entry in a folder; None where the manifest is unreadable or the file it names is not whole."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        fields: dict[str, Any] = {key: manifest[key] for key in StoredModel.__dataclass_fields__}
        path = folder / fields.pop("path")
        if not (path.is_dir() or path.stat().st_size == fields["size"]):
            return None
        return StoredModel(path=path, **fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut, where the platform can (Windows cannot open folders)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""Opening the files of a checkpoint: mapped, read-only, with the reason in words when it cannot be done."""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, ModelNotFoundError

MAX_JSON_BYTES = 100_000_000  # the largest shard indexes in use are some 20 MB


def exists(path: Path) -> bool:
    """Whether there is something at `path`. ModelNotFoundError, with the reason, if that cannot be found out."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        raise not_readable(path, error) from error
    return True


def is_folder(path: Path) -> bool:
    """Whether `path` is a folder. Errors as `exists`."""
    return exists(path) and path.is_dir()


def regular_size(path: Path) -> int:
    """Bytes of a regular file. ModelNotFoundError if there is none, FormatError if it is a folder, a device, a pipe."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise not_readable(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise FormatError(f"{path}: expected a model file, found a folder")
    if not stat.S_ISREG(status.st_mode):
        raise FormatError(f"{path}: expected a model file, found a device or pipe")
    return status.st_size


def read_start(path: Path, count: int) -> bytes:
    """At most `count` bytes from the beginning of a regular file."""
    regular_size(path)
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise not_readable(path, error) from error


def map_file(path: Path) -> np.ndarray:
    """The whole file as a read-only uint8 array over a memory map; the map lives as long as any view of the array."""
    regular_size(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise FormatError(f"{path}: the file is empty (0 bytes)")
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise not_readable(path, error) from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object. FormatError naming the file and place of the fault."""
    size = regular_size(path)
    if size > MAX_JSON_BYTES:
        raise FormatError(f"{path}: a JSON file of {size} bytes is above the limit of {MAX_JSON_BYTES}")
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise not_readable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def not_readable(path: Path, error: Exception) -> ModelNotFoundError:
    """The error for a path that cannot be opened, with the system's reason."""
    if isinstance(error, FileNotFoundError):
        return ModelNotFoundError(f"{path}: no such file or folder")
    return ModelNotFoundError(f"{path}: cannot be opened: {getattr(error, 'strerror', None) or error}")

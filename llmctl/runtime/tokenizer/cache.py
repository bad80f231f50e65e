"""Prepared tokenizers on disk: a header of facts and the flat buffers of the vocabulary.

An entry is named after what it was made from, so it is never looked up for anything else. One that is damaged, of
another version or unreadable counts as absent; a folder that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from llmctl import __version__
from llmctl.runtime.paths import cache_dir
from llmctl.runtime.tokenizer.facts import Facts
from llmctl.runtime.tokenizer.vocabulary import Buffer

_VERSION = 1  # of the layout of an entry
_MAGIC = b"llmctl-tokenizer"
_HEAD = struct.Struct("<16sIIQ")  # magic, version, CRC-32 of all that follows, bytes of JSON
_MAX_ENTRIES = 32


def key(parts: Iterable[bytes | memoryview]) -> str:
    """The name of the entry made from these parts (each told from the next)."""
    digest = hashlib.sha256()
    for part in [_code(), *parts]:
        digest.update(struct.pack("<Q", memoryview(part).nbytes))
        digest.update(part)
    return digest.hexdigest()[:40]


@functools.cache
def _code() -> bytes:
    """The state of this package: what other code prepared is not served, whether or not a version was raised."""
    with os.scandir(Path(__file__).parent) as entries:
        files = sorted((entry.name, entry.stat()) for entry in entries if entry.name.endswith(".py"))
    return repr([_VERSION, __version__, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)]).encode()


def load(name: str) -> tuple[Facts, dict[str, Buffer]] | None:
    """The entry, or None."""
    try:
        data = _path(name).read_bytes()
        magic, version, checksum, json_size = _HEAD.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or zlib.crc32(memoryview(data)[_HEAD.size :]) != checksum:
            return None
        body = memoryview(data)[_HEAD.size :]
        plain = json.loads(bytes(body[:json_size]))
        sections, position = {}, json_size
        for section, size in plain["sections"].items():
            sections[section] = body[position : position + size]
            position += size
        return Facts.from_json(plain["facts"]), sections
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def save(name: str, facts: Facts, sections: Mapping[str, Buffer]) -> None:
    """Write the entry, whole or not at all; silently not, if the folder refuses."""
    sizes = {section: memoryview(data).nbytes for section, data in sections.items()}
    head = json.dumps({"facts": facts.to_json(), "sections": sizes}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    body = b"".join([head, *sections.values()])
    with contextlib.suppress(OSError):
        _write(_path(name), _HEAD.pack(_MAGIC, _VERSION, zlib.crc32(body), len(head)) + body)
        _prune(_path(name).parent)


def _path(name: str) -> Path:
    return cache_dir() / "tokenizers" / f"{name}.bin"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def _prune(folder: Path) -> None:
    """Forget the oldest entries beyond the limit."""
    entries = sorted(folder.glob("*.bin"), key=lambda entry: entry.stat().st_mtime, reverse=True)
    for old in entries[_MAX_ENTRIES:]:
        old.unlink(missing_ok=True)

"""Manifests: what a model's files and tensors hashed to when they were known to be good, as JSON beside them.

The hash of a file says that something changed; those of its tensors say what. A file that is as it was has its tensors so too,
so they are hashed only where the file's own hash differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.quant.findings import Finding
from llmctl.quant.workers import Workers
from llmctl.runtime.checkpoint.checkpoint import Checkpoint, TensorEntry
from llmctl.runtime.checkpoint.files import not_readable, read_json_object
from llmctl.runtime.checkpoint.output_file import OutputFile, refuse_same_file
from llmctl.runtime.checkpoint.text import quoted

CHECK = "manifest"
SUFFIX = ".manifest.json"
_VERSION = 1
_SLICE_BYTES = 1 << 20
# What lies beside the weights of a folder and decides what the model is.
_BESIDE = (".json", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True)
class Manifest:
    """files: name → {bytes, sha256}; tensors: stored name → {file, type, shape, bytes, sha256}."""

    path: Path
    files: dict[str, dict[str, Any]]
    tensors: dict[str, dict[str, Any]]


def default_path(checkpoint: Checkpoint) -> Path:
    """Where a model's manifest lies, whichever of its files or folders is named: beside the first file of weights."""
    first = checkpoint.files[0]
    return first.with_name(first.name + SUFFIX)


def manifest_files(checkpoint: Checkpoint) -> list[Path]:
    """The files a manifest covers: the weights, and in a folder the configuration and tokenizer beside them."""
    if checkpoint.kind == "gguf":
        return list(checkpoint.files)
    beside = sorted(file for file in checkpoint.folder.iterdir() if file.suffix in _BESIDE and file.is_file())
    return [*checkpoint.files, *(file for file in beside if not file.name.endswith(SUFFIX) and not file.name.startswith("."))]


def hashed_bytes(checkpoint: Checkpoint, *, tensors: bool) -> int:
    """Bytes that `make_manifest`, or without tensors `check_manifest`, reads and reports."""
    return sum(file.stat().st_size for file in manifest_files(checkpoint)) + (checkpoint.total_bytes if tensors else 0)


def make_manifest(checkpoint: Checkpoint, workers: Workers) -> dict[str, Any]:
    """The document: sha256 of every file and of the stored bytes of every tensor."""
    files = manifest_files(checkpoint)
    tasks: list[Path | TensorEntry] = [*files, *checkpoint.entries()]
    digests = list(workers.in_order(lambda task: _digest(checkpoint, task, workers), tasks))
    entries = zip(checkpoint.entries(), digests[len(files) :], strict=True)
    return {
        "version": _VERSION,
        "kind": "llmctl manifest",
        "algorithm": "sha256",
        "files": {file.name: digest for file, digest in zip(files, digests, strict=False)},
        "tensors": {entry.name: {**_description(entry), **digest} for entry, digest in entries},
    }


def write_manifest(document: dict[str, Any], path: Path, checkpoint: Checkpoint) -> None:
    """The document as a file, whole or not at all. OutputError if it would replace a file of the model."""
    refuse_same_file(manifest_files(checkpoint), path)
    output = OutputFile(path)
    try:
        output.write(json.dumps(document, indent=1, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
        output.commit()
    except BaseException:
        output.abort()
        raise


def read_manifest(path: Path) -> Manifest:
    """FormatError for a file that is no manifest, or one of a later version."""
    document = read_json_object(path)
    if document.get("kind") != "llmctl manifest" or document.get("algorithm") != "sha256":
        raise FormatError(f"{path}: not a manifest that llmctl verify wrote")
    if document.get("version") != _VERSION:
        raise FormatError(f"{path}: manifest version {quoted(document.get('version'))} is not read, only {_VERSION}")
    return Manifest(path, _table(path, document, "files"), _table(path, document, "tensors"))


def _table(path: Path, document: dict[str, Any], key: str) -> dict[str, dict[str, Any]]:
    table = document.get(key)
    entries = table.values() if isinstance(table, dict) else [None]
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str) or type(entry.get("bytes")) is not int:
            raise FormatError(f"{path}: {key!r} must be an object of entries with bytes and sha256")
    return table


def check_manifest(checkpoint: Checkpoint, manifest: Manifest, workers: Workers) -> Iterator[Finding]:
    """What is not as the manifest says: files that are missing, new or changed, and the tensors in which they changed."""
    files = {file.name: file for file in manifest_files(checkpoint)}
    stated = _renamed(manifest, files)
    yield from (_error(f"file {quoted(name)} is missing") for name in stated if name not in files)
    new = [name for name in files if name not in stated]
    yield from (Finding("warning", CHECK, f"file {quoted(name)} is not in the manifest") for name in new)
    common = [name for name in files if name in stated]
    digests = workers.in_order(lambda name: _digest(checkpoint, files[name], workers), common)
    for name, digest in zip(common, digests, strict=True):
        if digest != {key: stated[name][key] for key in digest}:
            yield from _changed_file(checkpoint, manifest, files[name], digest, stated[name], workers)


def _renamed(manifest: Manifest, files: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """The files as the manifest states them; a model in one file may have been renamed since."""
    if len(manifest.files) == len(files) == 1:
        return dict(zip(files, manifest.files.values(), strict=True))
    return manifest.files


def _changed_file(
    checkpoint: Checkpoint, manifest: Manifest, file: Path, found: dict[str, Any], stated: dict[str, Any], workers: Workers
) -> Iterator[Finding]:
    sizes = f": {found['bytes']} bytes where there were {stated['bytes']}" if found["bytes"] != stated["bytes"] else ""
    entries = [entry for entry in checkpoint.entries() if entry.file == file]
    changed = list(_changed_tensors(checkpoint, manifest, entries, workers))
    where = "" if changed or not entries else "; none of its tensors did, so it is the header"
    yield _error(f"file {quoted(file.name)} has changed{sizes}{where}")
    yield from changed


def _changed_tensors(
    checkpoint: Checkpoint, manifest: Manifest, entries: list[TensorEntry], workers: Workers
) -> Iterator[Finding]:
    for entry in entries:
        stated = manifest.tensors.get(entry.name)
        if stated is None:
            yield Finding("error", CHECK, "is not in the manifest", entry.name)
            continue
        found = {**_description(entry), **_digest(checkpoint, entry, workers)}
        if differing := [key for key in found if found[key] != stated.get(key)]:
            what = "its bytes have changed" if differing == ["sha256"] else f"other {', '.join(differing)} than in the manifest"
            yield Finding("error", CHECK, what, entry.name)
    if len({entry.file for entry in checkpoint.entries()}) == 1:
        gone = [name for name in manifest.tensors if name not in checkpoint]
        yield from (Finding("error", CHECK, "is in the manifest, but not in the file", name) for name in gone)


def _error(message: str) -> Finding:
    return Finding("error", CHECK, message)


def _description(entry: TensorEntry) -> dict[str, Any]:
    return {"type": entry.format.name, "shape": list(entry.shape)}


def _digest(checkpoint: Checkpoint, what: Path | TensorEntry, workers: Workers) -> dict[str, Any]:
    """bytes and sha256 of a file or of a tensor as it is stored."""
    parts = _file_parts(what) if isinstance(what, Path) else _tensor_parts(checkpoint, what)
    digest, count = hashlib.sha256(), 0
    for part in parts:
        digest.update(part)
        count += len(part)
        workers.advance(len(part))
    return {"bytes": count, "sha256": digest.hexdigest()}


def _file_parts(path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_SLICE_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        raise not_readable(path, error) from error


def _tensor_parts(checkpoint: Checkpoint, entry: TensorEntry) -> Iterator[np.ndarray]:
    tensor = checkpoint.read(entry.name)
    stored = tensor.blocks if isinstance(tensor, QuantTensor) else tensor
    flat = stored.reshape(-1).view(np.uint8)
    for start in range(0, len(flat), _SLICE_BYTES):
        part = flat[start : start + _SLICE_BYTES]
        yield part
        release_mapped(part)

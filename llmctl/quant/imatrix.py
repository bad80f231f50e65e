"""Importance matrices: files of llama.cpp that say how large the activations are which each column of a matrix is multiplied by.

There are two forms: GGUF (`NAME.in_sum2` and `NAME.counts` for every matrix), and the older one, usually named .dat.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.gguf_writer import Typed, ValueType
from llmctl.runtime.checkpoint.string_array import StringArray
from llmctl.runtime.checkpoint.text import quoted

SUMS, COUNTS = ".in_sum2", ".counts"
_MAGIC = b"GGUF"
_MAX_TEXT_BYTES = 127  # llama.cpp's limit for the values of metadata that it adds
_INT = struct.Struct("<i")


@dataclass(frozen=True)
class ImportanceMatrix:
    """weights: by name of the matrix, float32 (matrices, K) or flat, mean squares of the activations.

    path: of the file, as the user named it. dataset: what it was measured on. chunks: of how much text. Neither needs be known.
    """

    path: Path
    weights: dict[str, np.ndarray]
    dataset: str | None = None
    chunks: int = 0

    def columns(self, name: str, shape: tuple[int, ...]) -> np.ndarray | None:
        """For a GGUF tensor of this torch-order shape: float32 (K,), (E, K) for a stack, or None if the file does not name it."""
        found = self.weights.get(name)
        if found is None:
            return None
        stack = found.reshape(-1, shape[-1])
        return stack if len(shape) > 2 else stack[0]

    def check(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """FormatError if this is of another model: it names a tensor the model has not, or one of another size.

        tensors: GGUF names and torch-order shapes of the model.
        """
        shapes = dict(tensors)
        for name, found in self.weights.items():
            if name not in shapes:
                raise FormatError(f"{self.path}: has values for {quoted(name)}, which the model has not: it is of another model")
            shape = shapes[name]
            wanted = prod(shape[:-2]) * shape[-1]
            if found.size != wanted:
                raise FormatError(
                    f"{self.path}: has {found.size} values for {quoted(name)}, which needs {wanted}: it is of another model"
                )

    def metadata(self) -> dict[str, Typed]:
        """The keys that say in a GGUF file what its weights were rounded with."""
        keys = {"file": Typed(_short(str(self.path)), ValueType.STRING)}
        if self.dataset is not None:
            keys["dataset"] = Typed(_short(self.dataset), ValueType.STRING)
        keys["entries_count"] = Typed(len(self.weights), ValueType.U32)
        if self.chunks > 0:
            keys["chunks_count"] = Typed(self.chunks, ValueType.U32)
        return {f"quantize.imatrix.{key}": value for key, value in keys.items()}


def _short(text: str) -> str:
    return text.encode("utf-8", "replace")[:_MAX_TEXT_BYTES].decode("utf-8", "ignore")


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Read either form. FormatError for anything else, and for values that are no weights (negative, NaN, infinite)."""
    try:
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
        found = _read_gguf(path) if head == _MAGIC else _read_legacy(path)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: there is no such file") from error
    except OSError as error:
        raise LlmctlError(f"{path}: cannot be read: {error.strerror}") from error
    for name, weights in found.weights.items():
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise FormatError(f"{path}: the values for {quoted(name)} must be finite and not negative")
    return found


def _read_gguf(path: Path) -> ImportanceMatrix:
    checkpoint = GgufCheckpoint(path)
    stored = {entry.name: entry for entry in checkpoint.entries()}
    names = [name.removesuffix(SUMS) for name in stored if name.endswith(SUMS)]
    if not names:
        raise FormatError(f"{path}: is no importance matrix: no tensor is called NAME{SUMS}")
    weights = {}
    for name in names:
        parts = [name + SUMS, name + COUNTS]
        if any(part not in stored or stored[part].format.name != "F32" for part in parts):
            raise FormatError(f"{path}: needs {parts[0]} and {parts[1]} in F32")
        sums, counts = (np.array(checkpoint.read(part), np.float32) for part in parts)
        weights[name] = _means(path, name, sums, counts.reshape(-1))
    return ImportanceMatrix(path, weights, *_origin(checkpoint.metadata))


def _means(path: Path, name: str, sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(matrices, K); 1 for a matrix that nothing was multiplied by, as an expert that was never chosen."""
    if not np.isfinite(counts).all() or sums.size % max(1, counts.size):
        raise FormatError(f"{path}: {name}{SUMS} has {sums.size} values for {counts.size} counts")
    counts = np.floor(counts + np.float32(0.5))[:, None]
    stack = sums.reshape(len(counts), -1)
    return np.where(counts > 0, stack / np.where(counts > 0, counts, np.float32(1)), np.float32(1))


def _origin(metadata: Mapping[str, Any]) -> tuple[str | None, int]:
    datasets, chunks = metadata.get("imatrix.datasets"), metadata.get("imatrix.chunk_count", 0)
    dataset = datasets[0] if isinstance(datasets, (list, StringArray)) and len(datasets) else None
    return dataset if isinstance(dataset, str) else None, chunks if isinstance(chunks, int) else 0


class _Bytes:
    """The older form, read field by field: numbers are int32 and float32."""

    def __init__(self, path: Path) -> None:
        self._path, self._data, self._position = path, path.read_bytes(), 0

    def take(self, count: int, what: str) -> bytes:
        if count < 0 or count > len(self._data) - self._position:
            raise FormatError(f"{self._path}: is no importance matrix: it ends, or makes no sense, at {what}")
        self._position += count
        return self._data[self._position - count : self._position]

    def number(self, what: str) -> int:
        return _INT.unpack(self.take(_INT.size, what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number(f"the length of {what}"), what).decode("utf-8", "replace")

    def floats(self, count: int, what: str) -> np.ndarray:
        return np.frombuffer(self.take(4 * count, what), "<f4").astype(np.float32)

    @property
    def at_end(self) -> bool:
        return self._position == len(self._data)


def _read_legacy(path: Path) -> ImportanceMatrix:
    data = _Bytes(path)
    weights = {}
    count = data.number("the number of entries")
    if count < 1:
        raise FormatError(f"{path}: is no importance matrix: it has {count} entries")
    for index in range(count):
        name = data.text(f"the name of entry {index + 1}")
        calls = data.number(f"the calls of {quoted(name)}")
        sums = data.floats(data.number(f"the size of {quoted(name)}"), f"the values of {quoted(name)}")
        weights[name] = sums / np.float32(calls) if calls > 0 else sums
    if data.at_end:
        return ImportanceMatrix(path, weights)
    chunks = data.number("the number of chunks")
    return ImportanceMatrix(path, weights, None if data.at_end else data.text("the name of the data"), chunks)

"""Writing safetensors: declare every tensor, then stream their data into one file or several with an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.checkpoint.dtypes import PLAIN_DTYPES, SAFETENSORS_FORMATS
from llmctl.runtime.checkpoint.huggingface import INDEX_NAME
from llmctl.runtime.checkpoint.output_file import OutputFile
from llmctl.runtime.checkpoint.shards import deal_out, shard_name
from llmctl.runtime.checkpoint.text import quoted

_STEM, _SUFFIX = "model", ".safetensors"
_METADATA = {"format": "pt"}  # transformers refuses a file that does not name the framework its tensors are laid out for
_ALIGNMENT = 8  # of the data, so that numbers of any width lie on their boundary


@dataclass(frozen=True)
class _Declared:
    name: str
    format: Format
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * PLAIN_DTYPES[self.format.name].itemsize


class SafetensorsWriter:
    """Writes model.safetensors, or model-00001-of-0000N.safetensors and their index, into a folder that exists.

    Use it as a context manager. Within: `declare` all tensors, then `write` each in that order; memory needed is what is
    handed over at once. Every file appears when it is complete; what the folder as a whole promises is its owner's matter.

    max_shard_bytes: most bytes of tensors in a file (a larger tensor has a file of its own); None writes one file.
    Errors: FormatError for what was not declared so, UnsupportedError for a type safetensors lacks, OutputError for the disk.
    """

    def __init__(self, folder: Path, *, max_shard_bytes: int | None = None) -> None:
        self.folder = folder
        self._limit = max_shard_bytes
        self._declared: dict[str, _Declared] = {}
        self._shards: list[list[_Declared]] | None = None  # None while declaring
        self._file: OutputFile | None = None
        self._place = (0, 0)  # shard and tensor in it whose turn it is

    def declare(self, name: str, form: Format, shape: tuple[int, ...]) -> None:
        """Announce a tensor of plain numbers, in torch order."""
        what = f"{self.folder}: tensor {quoted(name)}"
        if self._shards is not None:
            raise FormatError(f"{what} is declared after the first tensor was written")
        if name in self._declared:
            raise FormatError(f"{what} is declared twice")
        if form.name not in SAFETENSORS_FORMATS:
            raise UnsupportedError(f"{what}: safetensors has no type {form.name}")
        self._declared[name] = _Declared(name, form, tuple(shape))

    @property
    def total_bytes(self) -> int:
        """Bytes of all declared tensors."""
        return sum(tensor.nbytes for tensor in self._declared.values())

    def write(self, name: str, parts: Iterable[np.ndarray]) -> None:
        """Write the next declared tensor. parts: arrays of its type that in a row make up its elements."""
        tensor = self._turn(name)
        if self._file is None:
            self._file = self._open_shard()
        count = 0
        for part in parts:
            if part.dtype != PLAIN_DTYPES[tensor.format.name]:
                raise FormatError(f"{self.folder}: tensor {quoted(name)} was declared {tensor.format.name}, got {part.dtype}")
            self._file.write(memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))
            count += part.size
        if count != prod(tensor.shape):
            raise FormatError(f"{self.folder}: tensor {quoted(name)} has {count} elements, declared was {tensor.shape}")
        self._advance()

    def close(self) -> None:
        """Complete the files. FormatError if a declared tensor was not written."""
        if self._shards is None:
            self._shards = self._deal()
        if self._place[0] < len(self._shards) and self._shards[self._place[0]]:
            missing = self._shards[self._place[0]][self._place[1]].name
            raise FormatError(f"{self.folder}: declared tensors were never written, the first is {quoted(missing)}")
        if not self._declared:  # a header alone
            self._open_shard().commit()
        elif len(self._shards) > 1:
            self._write_index()

    def abort(self) -> None:
        """Give up: the file that was being written is removed."""
        if self._file is not None:
            self._file.abort()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        try:
            if exc_type is None:
                self.close()
        finally:
            self.abort()

    def _deal(self) -> list[list[_Declared]]:
        tensors = list(self._declared.values())
        return [[tensors[i] for i in shard] for shard in deal_out([tensor.nbytes for tensor in tensors], self._limit)]

    def _turn(self, name: str) -> _Declared:
        if self._shards is None:
            self._shards = self._deal()
        if name not in self._declared:
            raise FormatError(f"{self.folder}: tensor {quoted(name)} was never declared")
        shard, index = self._place
        expected = self._shards[shard][index] if shard < len(self._shards) else None
        if expected is None or expected.name != name:
            turn = f"it is the turn of {quoted(expected.name)}" if expected else "all tensors are written"
            raise FormatError(f"{self.folder}: tensor {quoted(name)} is out of order: {turn}")
        return expected

    def _advance(self) -> None:
        assert self._shards is not None
        assert self._file is not None
        shard, index = self._place
        self._place = (shard, index + 1)
        if index + 1 == len(self._shards[shard]):
            self._file.commit()
            self._file, self._place = None, (shard + 1, 0)

    def _open_shard(self) -> OutputFile:
        assert self._shards is not None
        shard = self._shards[self._place[0]]
        header = _header(shard)
        file = OutputFile(self.folder / self._shard_name(self._place[0]))
        try:
            file.require(len(header) + sum(tensor.nbytes for tensor in shard))
            file.write(header)
        except BaseException:
            file.abort()
            raise
        return file

    def _shard_name(self, index: int) -> str:
        assert self._shards is not None
        return shard_name(_STEM, index, len(self._shards), _SUFFIX)

    def _write_index(self) -> None:
        assert self._shards is not None
        places = {tensor.name: self._shard_name(i) for i, shard in enumerate(self._shards) for tensor in shard}
        document = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(places.items()))}
        file = OutputFile(self.folder / INDEX_NAME)
        try:
            file.write(json.dumps(document, indent=2).encode() + b"\n")
            file.commit()
        except BaseException:
            file.abort()
            raise


def _header(tensors: list[_Declared]) -> bytes:
    """u64 length and the JSON that names every tensor, padded with blanks so that the data is aligned."""
    entries: dict[str, object] = {"__metadata__": _METADATA}
    position = 0
    for tensor in tensors:
        end = position + tensor.nbytes
        entries[tensor.name] = {"dtype": tensor.format.name, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text

"""Writing a GGUF model in several files: each a GGUF file of its own, numbered, the first with all the metadata.

Keys as llama.cpp's reader expects them: split.no and split.count (u16), split.tensors.count (i32, of the whole set).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType, tensor_bytes
from llmctl.runtime.checkpoint.shards import deal_out, shard_name
from llmctl.runtime.checkpoint.text import quoted

_NUMBERED = re.compile(r"-\d{5}-of-\d{5}$")
_MAX_SHARDS = 65535  # split.count is a u16


def shard_paths(output: Path, sizes: Sequence[int], limit: int | None) -> list[Path]:
    """The files that tensors of these sizes come to lie in. output: the name of the whole; limit: see `deal_out`."""
    count = len(deal_out(sizes, limit))
    if count > _MAX_SHARDS:
        raise FormatError(f"{output}: {count} files, GGUF can be split into {_MAX_SHARDS} at most; allow larger ones")
    stem = _NUMBERED.sub("", output.stem) if count > 1 else output.stem
    return [output.with_name(shard_name(stem, index, count, output.suffix)) for index in range(count)]


class SplitGgufWriter:
    """Writes what a GgufWriter does, and in the same way, into as many files as it takes; into one without a limit.

    The first file, which stands for the set, appears last; when the block ends by an exception none appears.
    paths: the files, once the first tensor was written or the writer is closed.
    Errors as GgufWriter.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], limit: int | None) -> None:
        """limit: most bytes of tensors in a file; a larger tensor has a file of its own. None: one file at `path`."""
        self.path, self.paths = path, [path]
        self._metadata, self._limit = dict(metadata), limit
        self._declared: dict[str, tuple[Format, tuple[int, ...]]] = {}
        self._writers: list[GgufWriter] = []
        self._shard_of: dict[str, GgufWriter] = {}
        if limit is None:  # opened at once: what is wrong with the place is said before the work
            self._writers = [GgufWriter(path, self._metadata)]

    def declare(self, name: str, form: Format, shape: tuple[int, ...]) -> None:
        """As GgufWriter."""
        if self._limit is None:
            self._writers[0].declare(name, form, shape)
        elif self._writers:
            raise FormatError(f"{self.path}: tensor {quoted(name)} is declared after the first tensor was written")
        elif name in self._declared:
            raise FormatError(f"{self.path}: tensor {quoted(name)} is declared twice")
        else:
            tensor_bytes(self.path, name, form, shape)
            self._declared[name] = (form, tuple(shape))

    def write(self, name: str, tensor: np.ndarray | QuantTensor) -> None:
        """As GgufWriter."""
        if not self._writers:
            self._open()
        if self._limit is not None and name not in self._shard_of:
            raise FormatError(f"{self.path}: tensor {quoted(name)} was never declared")
        self._shard_of.get(name, self._writers[0]).write(name, tensor)

    def close(self) -> None:
        """Complete the files and put them at their names, the first of them last."""
        if not self._writers:
            self._open()
        placed: list[Path] = []
        if self._writers[1:]:  # parts of an older set of as many files must never be taken for one with ours
            Path(os.path.realpath(self.paths[0])).unlink(missing_ok=True)
        try:
            for writer in reversed(self._writers):
                writer.close()
                placed.append(writer.path)
        except BaseException:
            self.abort()
            for path in placed:  # without the first they are no model
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    def abort(self) -> None:
        """Give up: nothing is left."""
        for writer in self._writers:
            writer.abort()

    def __enter__(self) -> SplitGgufWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    def _open(self) -> None:
        """The writers of all files, each with its tensors declared."""
        names = list(self._declared)
        sizes = [tensor_bytes(self.path, name, *self._declared[name]) for name in names]
        self.paths = shard_paths(self.path, sizes, self._limit)
        shards = deal_out(sizes, self._limit)
        try:
            for index, shard in enumerate(shards):
                self._writers.append(self._writer(index, len(shards)))
                for place in shard:
                    name = names[place]
                    self._writers[-1].declare(name, *self._declared[name])
                    self._shard_of[name] = self._writers[-1]
            self._writers[0].require(sum(sizes))
        except BaseException:
            self.abort()
            raise

    def _writer(self, index: int, count: int) -> GgufWriter:
        if count == 1:
            return GgufWriter(self.paths[0], self._metadata)
        numbers = {
            "split.no": Typed(index, ValueType.U16),
            "split.count": Typed(count, ValueType.U16),
            "split.tensors.count": Typed(len(self._declared), ValueType.I32),
        }
        if index == 0:
            return GgufWriter(self.paths[0], {**self._metadata, **numbers})
        return GgufWriter(self.paths[index], numbers, alignment=self._writers[0].alignment)

"""What a checkpoint is, whatever its layout: named, mapped tensors."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.checkpoint.dtypes import tensor_from_bytes
from llmctl.runtime.checkpoint.text import quoted


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is stored.

    shape: torch order, (out_features, in_features) for a weight.
    nbytes: stored bytes, without padding.
    file, offset: the file and the byte in it where the data begins.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int

    @property
    def num_elements(self) -> int:
        """Logical elements (1 for a scalar)."""
        return prod(self.shape)


@dataclass(frozen=True)
class WeightSize:
    """One weight, however many tensors it is stored as. form: how, for people (F16, Q4_0, INT4). nbytes: of all of them."""

    form: str
    num_elements: int
    nbytes: int


class Checkpoint:
    """Named tensors of one or several files of a kind, memory-mapped and read-only.

    Names are those stored in the file. Everything a file says about its tensors was checked when it was opened; reading
    one touches nothing but its own pages.

    metadata: what the file says about itself (its types depend on the kind).
    """

    kind: ClassVar[Literal["gguf", "safetensors"]]
    metadata: Mapping[str, Any]

    def __init__(self, path: Path, maps: Mapping[Path, np.ndarray], entries: Iterable[TensorEntry]) -> None:
        self.path = path
        self.files: list[Path] = list(maps)
        self._maps = dict(maps)
        self._entries = {entry.name: entry for entry in entries}

    def names(self) -> list[str]:
        """Tensor names as stored, in the order of the files."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def entries(self) -> list[TensorEntry]:
        """All tensors, in the order of `names`."""
        return list(self._entries.values())

    def entry(self, name: str) -> TensorEntry:
        """Where the tensor is stored; FormatError, with names that resemble it, if there is none of this name."""
        if found := self._entries.get(name):
            return found
        near = difflib.get_close_matches(name, self._entries, n=3)
        hint = f"; similar names: {', '.join(map(quoted, near))}" if near else ""
        raise FormatError(f"{self.path}: there is no tensor {quoted(name)} among its {len(self._entries)}{hint}")

    def read(self, name: str) -> np.ndarray | QuantTensor:
        """The tensor over the mapped file: not copied, read-only. Plain formats are arrays (bfloat16 by ml_dtypes)."""
        entry = self.entry(name)
        return tensor_from_bytes(self._raw(entry), entry.format, entry.shape)

    def release(self, name: str) -> None:
        """Let the tensor's pages leave this process's memory: it has been copied, or will not be read soon. It can be read
        again at any time, and arrays read before stay valid: the system fetches the pages anew."""
        self.release_entry(self.entry(name))

    def release_entry(self, entry: TensorEntry) -> None:
        """The same for a part of a tensor, described as one of its own."""
        release_mapped(self._raw(entry))

    def release_all(self) -> None:
        """As `release`, for everything: what the system mapped beside the tensors that were read leaves with them."""
        for data in self._maps.values():
            release_mapped(data)

    def _raw(self, entry: TensorEntry) -> np.ndarray:
        if entry.file not in self._maps:
            raise ValueError(f"{self.path}: the checkpoint is closed")
        return self._maps[entry.file][entry.offset : entry.offset + entry.nbytes]

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all tensors."""
        return sum(entry.nbytes for entry in self._entries.values())

    def weight_sizes(self) -> list[WeightSize]:
        """The weights, in the order of the files."""
        return [WeightSize(entry.format.name, entry.num_elements, entry.nbytes) for entry in self._entries.values()]

    @property
    def total_elements(self) -> int:
        """Logical elements of all weights: of packed codes as many as there are, not the words they fill."""
        return sum(weight.num_elements for weight in self.weight_sizes())

    def close(self) -> None:
        """Let go of the maps. Tensors read before stay valid: each keeps its file mapped until it is dropped."""
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at `path`, its layout told by content, not by extension.

    path: a GGUF file (of a split set, any shard), a Hugging Face folder, a safetensors file, or a shard index.
    Errors: ModelNotFoundError (no such path), FormatError (broken or hostile file), UnsupportedError (a pickle, an old
    or big-endian GGUF, a tensor type that is not read). Each names the file.
    """
    from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
    from llmctl.runtime.checkpoint.identify import identify
    from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint

    path = Path(path)
    return GgufCheckpoint(path) if identify(path) == "gguf" else SafetensorsCheckpoint(path)

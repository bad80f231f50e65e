"""Experts as files keep them, all of a layer in one tensor, seen as one matrix each: `mlp.experts.7.gate_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.checkpoint import TensorEntry
from llmctl.runtime.checkpoint.names import EXPERT, take_expert, take_rows
from llmctl.runtime.checkpoint.text import quoted

# How transformers 5 calls the experts of a layer when it saves them as it holds them.
_FUSED = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?$")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrix or bias in a tensor (experts, rows, …). half: of the rows, the first (0) or second (1); None: all."""

    expert: int
    half: int | None = None

    def of(self, tensor: np.ndarray | QuantTensor) -> np.ndarray | QuantTensor:
        """A view of the part."""
        whole = take_expert(tensor, self.expert)
        return whole if self.half is None else take_rows(whole, self._rows(whole.shape[0]))

    def entry(self, entry: TensorEntry) -> TensorEntry:
        """Where the part is stored."""
        nbytes, shape = entry.nbytes // entry.shape[0], entry.shape[1:]
        offset = entry.offset + self.expert * nbytes
        if self.half is not None:
            rows = self._rows(shape[0])
            shape, nbytes = (shape[0] // 2, *shape[1:]), nbytes // 2
            offset += self.half * nbytes if rows.start else 0
        return replace(entry, shape=shape, nbytes=nbytes, offset=offset)

    def _rows(self, count: int) -> slice:
        return slice(count // 2, None) if self.half else slice(count // 2)


def gguf_parts(name: str, entry: TensorEntry, experts: int) -> Iterator[tuple[str, ExpertPart]]:
    """The experts' names and parts of a GGUF tensor. name: the Hugging Face name, the number still open."""
    _check(entry, experts)
    for expert in range(experts):
        yield name.replace(EXPERT, str(expert)), ExpertPart(expert)


def folder_parts(name: str, entry: TensorEntry, experts: int) -> list[tuple[str, ExpertPart]]:
    """The same of a folder's tensor, by its canonical name; none if it is not one of several experts."""
    found = _FUSED.match(name)
    if found is None:
        return []
    _check(entry, experts)
    sides = _HALVES.get(found[2])
    if sides is not None and (len(entry.shape) < 2 or entry.shape[1] % 2):
        raise FormatError(f"tensor {quoted(entry.name)} has shape {entry.shape}, expected an even number of rows an expert")
    return [
        (f"{found[1]}.{expert}.{side}.weight", ExpertPart(expert, half if sides else None))
        for expert in range(experts)
        for half, side in enumerate(sides or (found[2],))
    ]


def _check(entry: TensorEntry, experts: int) -> None:
    if not entry.shape or entry.shape[0] != experts:
        raise FormatError(f"tensor {quoted(entry.name)} has shape {entry.shape}, expected {experts} experts")

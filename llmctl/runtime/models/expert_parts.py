"""Experts as files keep them, all of a layer in one tensor, seen as one matrix each: `mlp.experts.7.gate_proj`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.runtime.checkpoint.checkpoint import TensorEntry
from llmctl.runtime.checkpoint.names import EXPERT, take_expert, take_rows
from llmctl.runtime.checkpoint.packed_parts import PackedModule
from llmctl.runtime.checkpoint.text import quoted

# How transformers 5 calls the experts of a layer when it saves them as it holds them.
_FUSED = re.compile(
    r"^(model\.layers\.\d+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight|\.bias|(_bias))?$"
)
_ONE = re.compile(r"^(model\.layers\.\d+\.mlp\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.(weight|bias)$")
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class ExpertPart:
    """One expert's matrix or bias in a tensor (experts, rows, …). half: of the rows, the first (0) or second (1); None: all.
    in_turn: a half is every second element of the last axis instead."""

    expert: int
    half: int | None = None
    in_turn: bool = False

    def of(self, tensor: np.ndarray | QuantTensor) -> np.ndarray | QuantTensor:
        """A view of the part."""
        whole = take_expert(tensor, self.expert)
        if self.half is None:
            return whole
        return whole[..., self.half :: 2] if self.in_turn else take_rows(whole, self._rows(whole.shape[0]))

    def entry(self, entry: TensorEntry) -> TensorEntry:
        """Where the part is stored; of a half whose elements come in turn, where both are."""
        nbytes, shape = entry.nbytes // entry.shape[0], entry.shape[1:]
        offset = entry.offset + self.expert * nbytes
        if self.half is not None and self.in_turn:
            shape = (*shape[:-1], shape[-1] // 2)
        elif self.half is not None:
            rows = self._rows(shape[0])
            shape, nbytes = (shape[0] // 2, *shape[1:]), nbytes // 2
            offset += self.half * nbytes if rows.start else 0
        return replace(entry, shape=shape, nbytes=nbytes, offset=offset)

    def module(self, stack: PackedModule) -> PackedModule:
        """The part of a packed stack (experts, rows, columns), as a module of its own."""
        assert stack.matrix is not None, stack.name
        rows = slice(None) if self.half is None else slice(self.half, None, 2) if self.in_turn else self._rows(stack.shape[1])
        return stack.matrix(self.expert, rows)

    def _rows(self, count: int) -> slice:
        return slice(count // 2, None) if self.half else slice(count // 2)


def gguf_parts(name: str, entry: TensorEntry, experts: int) -> Iterator[tuple[str, ExpertPart]]:
    """The experts' names and parts of a GGUF tensor. name: the Hugging Face name, the number still open."""
    _check(entry.name, entry.shape, experts)
    for expert in range(experts):
        yield name.replace(EXPERT, str(expert)), ExpertPart(expert)


def folder_parts(
    name: str, shape: tuple[int, ...], experts: int, *, in_turn: bool, packed: bool = False
) -> list[tuple[str, ExpertPart]]:
    """The same of a folder's tensor, by its canonical name and shape; none if it is not one of several experts. in_turn: gate and
    up are, of rows that stand in columns unless they are `packed`."""
    found = _FUSED.match(name)
    if found is None:
        return []
    _check(name, shape, experts)
    sides, kind = _HALVES.get(found[2]), "bias" if name.endswith("bias") else "weight"
    if sides is not None and (len(shape) < 2 or shape[-1 if in_turn and not packed else 1] % 2):
        raise FormatError(f"tensor {quoted(name)} has shape {shape}, expected an even number of rows an expert")
    return [
        (f"{found[1]}.{expert}.{side}.{kind}", ExpertPart(expert, half if sides else None, in_turn))
        for expert in range(experts)
        for half, side in enumerate(sides or (found[2],))
    ]


def joined_name(name: str) -> str:
    """What a folder calls the tensor that holds this expert's matrix or bias and those of all others of its layer; of any other
    tensor its own name."""
    found = _ONE.match(name)
    if found is None:
        return name
    side = "gate_up_proj" if found[2] in _HALVES["gate_up_proj"] else found[2]
    return f"{found[1]}.{side}{'_bias' if found[3] == 'bias' else ''}"


def join_in_turn(sides: Sequence[np.ndarray]) -> np.ndarray:
    """One expert's part of such a tensor: matrices (out, in) as columns in turn (in, sides · out), or biases in turn."""
    both = np.stack([side.T for side in sides], axis=-1)
    return both.reshape(*both.shape[:-2], -1)


def _check(name: str, shape: tuple[int, ...], experts: int) -> None:
    if not shape or shape[0] != experts:
        raise FormatError(f"tensor {quoted(name)} has shape {shape}, expected {experts} experts")

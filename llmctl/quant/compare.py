"""Two models tensor by tensor, whatever types and containers they are in: how far one is from the other.

Both are seen in Hugging Face's names and layout where their containers differ, so a GGUF file is compared with the folder it
was made from. Weights are unfolded slice by slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log10, sqrt
from pathlib import Path

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.quant.workers import Progress, Workers
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.checkpoint import Checkpoint
from llmctl.runtime.checkpoint.packed import find_packed
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.registry import chosen_family
from llmctl.runtime.models.weights import ModelWeights

_SLICE_ELEMENTS = 1 << 18  # as float32, what three of it are stays in the cache
_HEADS = {"lm_head.weight": "model.embed_tokens.weight", "output.weight": "token_embd.weight"}

Tensor = np.ndarray | QuantTensor | PackedIntTensor


@dataclass(frozen=True)
class Difference:
    """One tensor, here against there (the reference).

    max_error: max |a − b|. squared_error: Σ (a − b)². squared_reference: Σ b². identical: equal values everywhere. nonfinite:
    elements where only one is a finite number, or both are none but not the same; they are in none of the sums.
    """

    name: str
    type: str
    reference_type: str
    shape: tuple[int, ...]
    max_error: float
    squared_error: float
    squared_reference: float
    identical: bool
    nonfinite: int

    @property
    def relative_rms(self) -> float | None:
        """√(Σ (a − b)² / Σ b²); None where the reference is all zeros and the other is not."""
        if not self.squared_error:
            return 0.0
        return sqrt(self.squared_error / self.squared_reference) if self.squared_reference else None

    @property
    def sqnr_db(self) -> float | None:
        """Signal to quantization noise, 10·log₁₀(Σ b² / Σ (a − b)²) dB; None without noise or without signal."""
        if not self.squared_error or not self.squared_reference:
            return None
        return 10 * log10(self.squared_reference / self.squared_error)


@dataclass
class Comparison:
    """differences: of the tensors both have. only_here, only_there: of those one lacks. misshapen: name → the two shapes."""

    path: Path
    reference: Path
    differences: list[Difference] = field(default_factory=list)
    only_here: list[str] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)

    @property
    def same_tensors(self) -> bool:
        """Whether both have the same tensors of the same shapes."""
        return not (self.only_here or self.only_there or self.misshapen)

    @property
    def total(self) -> Difference:
        """All tensors taken as one."""
        parts = self.differences
        return Difference(
            "all",
            "",
            "",
            (sum(int(np.prod(part.shape)) for part in parts),),
            max((part.max_error for part in parts), default=0.0),
            sum(part.squared_error for part in parts),
            sum(part.squared_reference for part in parts),
            all(part.identical for part in parts),
            sum(part.nonfinite for part in parts),
        )


@dataclass(frozen=True)
class _Side:
    """One of the two: its names in order, and how a tensor of a name is read and what it is stored as."""

    names: dict[str, None]
    read: Callable[[str], Tensor]
    type: Callable[[str], str]

    def has(self, name: str) -> str | None:
        """The name the tensor has here: a model whose head is its embedding stores it once."""
        return name if name in self.names else _HEADS.get(name) if _HEADS.get(name) in self.names else None


def compare(
    path: Path, reference: Path, *, threads: int = 1, progress: Progress | None = None, family: str | None = None
) -> Comparison:
    """The model at `path` against the one at `reference`.

    threads, progress: as `Workers`. family: both are taken for one of, None for what they say they are.
    Errors: those of `open_checkpoint`; UnsupportedError for an architecture whose names are not known, where GGUF is compared
    with safetensors.
    """
    with open_checkpoint(path) as here, open_checkpoint(reference) as there:
        left, right = _sides(here, there, chosen_family(family))
        result = Comparison(path, reference)
        pairs = _pairs(left, right, result)
        workers = Workers(threads, progress, here.total_bytes + there.total_bytes)
        for found in workers.in_order(lambda pair: _difference(left, right, pair, workers), pairs):
            if isinstance(found, Difference):
                result.differences.append(found)
            else:
                result.misshapen[found[0]] = found[1:]
    return result


def _sides(here: Checkpoint, there: Checkpoint, family: Family | None) -> tuple[_Side, _Side]:
    """Stored names where they are the same in both, else those of the models. Packed codes are words, no numbers to subtract."""
    alike = here.kind == there.kind and set(here.names()) == set(there.names())
    if alike and family is None and not _is_packed(here):
        return _stored_side(here), _stored_side(there)
    try:
        return _model_side(here, family), _model_side(there, family)
    except (UnsupportedError, FormatError):
        if here.kind != there.kind or family is not None:
            raise
        return _stored_side(here), _stored_side(there)


def _is_packed(checkpoint: Checkpoint) -> bool:
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        return False
    try:
        return bool(find_packed(checkpoint).modules)
    except (UnsupportedError, FormatError):
        return False


def _stored_side(checkpoint: Checkpoint) -> _Side:
    return _Side(dict.fromkeys(checkpoint.names()), checkpoint.read, lambda name: checkpoint.entry(name).format.name)


def _model_side(checkpoint: Checkpoint, family: Family | None) -> _Side:
    weights = ModelWeights(checkpoint, family)
    return _Side(dict.fromkeys(weights.names()), weights.read, lambda name: weights.stored(name).form)


def _pairs(left: _Side, right: _Side, result: Comparison) -> list[tuple[str, str, str]]:
    """(name, name here, name there) of what both have; what one lacks goes to the result."""
    pairs = []
    for name in dict.fromkeys([*left.names, *right.names]):
        here, there = left.has(name), right.has(name)
        if here and there:
            pairs.append((name, here, there))
        else:
            (result.only_here if here else result.only_there).append(name)
    return pairs


def _difference(
    left: _Side, right: _Side, pair: tuple[str, str, str], workers: Workers
) -> Difference | tuple[str, tuple[int, ...], tuple[int, ...]]:
    name, here, there = pair
    tensor, reference = left.read(here), right.read(there)
    if tuple(tensor.shape) != tuple(reference.shape):
        return name, tuple(tensor.shape), tuple(reference.shape)
    sums = _Sums()
    rows = (_rows(tensor), _rows(reference))
    step = max(1, _SLICE_ELEMENTS // max(1, rows[0].shape[1]))
    for start in range(0, rows[0].shape[0], step):
        parts = [_part(side, start, start + step) for side in rows]
        sums.add(*parts)
        for part in parts:
            _release(part)
        workers.advance(sum(part.nbytes for part in parts))
    return Difference(
        name, left.type(here), right.type(there), tuple(tensor.shape), sums.max_error, sums.squared_error, sums.squared_reference,
        sums.identical, sums.nonfinite,
    )  # fmt: skip


class _Sums:
    """What Difference states, over the slices so far."""

    def __init__(self) -> None:
        self.max_error = self.squared_error = self.squared_reference = 0.0
        self.identical, self.nonfinite = True, 0

    def add(self, part: Tensor, reference: Tensor) -> None:
        """One more slice of both, of the same shape."""
        b = _values(reference)
        if _same_bytes(part, reference):
            self.squared_reference += _squared(b if np.isfinite(b).all() else np.where(np.isfinite(b), b, 0))
            return
        a = _values(part)
        with np.errstate(invalid="ignore", over="ignore"):
            error = a - b
        if not np.isfinite(error).all():
            lost = ~(np.isfinite(a) & np.isfinite(b))
            self.nonfinite += int(np.count_nonzero(lost & (a != b) & ~(np.isnan(a) & np.isnan(b))))
            error, b = np.where(lost, 0, error), np.where(lost, 0, b)
        self.max_error = max(self.max_error, float(np.abs(error).max(initial=0)))
        self.squared_error += _squared(error)
        self.squared_reference += _squared(b)
        self.identical = self.identical and not self.max_error and not self.nonfinite


def _squared(values: np.ndarray) -> float:
    """Σ v². Not by BLAS, whose own threads would fight with ours."""
    with np.errstate(over="ignore", under="ignore"):
        small = float(np.square(values).sum())
    if np.isfinite(small) and small > 1e-30:
        return small
    return float(np.square(values, dtype=np.float64).sum())  # squares beyond float32, or below it


def _values(tensor: Tensor) -> np.ndarray:
    """As float32; of types that hold no weights by themselves (codes, bools, float8 without its scale) the bare numbers."""
    if isinstance(tensor, np.ndarray) and tensor.dtype.kind not in "f":
        return tensor.astype(np.float32)
    return dequantize(tensor)


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left.reshape(-1).view(np.uint8), right.reshape(-1).view(np.uint8))
    if isinstance(left, QuantTensor) and isinstance(right, QuantTensor):
        return left.format == right.format and np.array_equal(left.blocks, right.blocks)
    return False


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with two axes; a number or vector is one row."""
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = int(np.prod(tensor.shape[:-1]))
    if isinstance(tensor, QuantTensor):
        return QuantTensor(tensor.format, (rows, columns), tensor.blocks.reshape(rows, -1))
    if isinstance(tensor, PackedIntTensor):
        zeros = None if tensor.zero_points is None else tensor.zero_points.reshape(rows, -1)
        codes, scales = tensor.codes.reshape(rows, -1), tensor.scales.reshape(rows, -1)
        return replace(tensor, shape=(rows, columns), codes=codes, scales=scales, zero_points=zeros)
    return tensor.reshape(rows, columns)


def _part(tensor: Tensor, start: int, stop: int) -> Tensor:
    """Some rows of a tensor with two axes."""
    if isinstance(tensor, QuantTensor):
        blocks = tensor.blocks[start:stop]
        return QuantTensor(tensor.format, (len(blocks), tensor.shape[1]), blocks)
    if isinstance(tensor, PackedIntTensor):
        codes, scales = tensor.codes[start:stop], tensor.scales[start:stop]
        zeros = None if tensor.zero_points is None else tensor.zero_points[start:stop]
        return replace(tensor, shape=(len(codes), tensor.shape[1]), codes=codes, scales=scales, zero_points=zeros)
    return tensor[start:stop]


def _release(part: Tensor) -> None:
    if not isinstance(part, PackedIntTensor):
        release_mapped(part.blocks if isinstance(part, QuantTensor) else part)

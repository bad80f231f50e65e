"""A stored weight on the device, in the layout that the kernels over weights read."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
import torch

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.conversion import Conversion, conversion_for
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import plain_format
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.triton_lib.forms import FORMS, Form, integer_form
from llmctl.kernels.triton_lib.layouts import (
    Planes,
    pack_blocks,
    pack_codes,
    restored,
    transposed_numbers,
    unpack_blocks,
    unpack_codes,
)

_PART_ELEMENTS = 1 << 25
"""Columns times rows that are rearranged at a time: it takes some bytes for each."""
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class TritonWeight:
    """A matrix (N, K), or several (heads or experts, N, K).

    format: what it is stored as, "I4" and "I8" of packed integers. form: how kernels see it, None for plain numbers. planes: of
    one matrix [rows, N padded], of several a dimension more; of plain numbers `low` alone is theirs, of the weight's shape.
    order: int64 [K], the column of x that stored column j belongs to (of several with orders of their own [matrices, K]), or
    None. activations: "int8" or "float", what few rows of x are taken as. dtype: the compute dtype.
    """

    format: str
    shape: tuple[int, ...]
    form: Form | None
    planes: Planes
    activations: str
    dtype: torch.dtype
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """On the device."""
        parts = (self.planes.low, self.planes.high, self.planes.scales, self.planes.extra, self.order)
        return sum(part.nbytes for part in {id(part): part for part in parts if part is not None}.values())

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.planes.low.device

    @property
    def num_matrices(self) -> int:
        """Heads or experts, 1 of a matrix."""
        return prod(self.shape[:-2])

    def matrix(self, index: int) -> TritonWeight:
        """One of several."""
        parts = (self.planes.low, self.planes.high, self.planes.scales, self.planes.extra)
        planes = Planes(*(None if part is None else part[index] for part in parts))
        order = self.order if self.order is None or self.order.ndim == 1 else self.order[index]
        return replace(self, shape=self.shape[1:], planes=planes, order=order)

    def inverse(self) -> np.ndarray | QuantTensor | PackedIntTensor:
        """What was prepared; of formats that were converted, what they became."""
        matrices = [self] if len(self.shape) == 2 else [self.matrix(index) for index in range(self.shape[0])]
        if self.form is None:
            return _to_numpy(self.planes.low)
        if self.format in FORMS:
            rows = [unpack_blocks(self.format, matrix.planes, self.shape[-2]).cpu().numpy() for matrix in matrices]
            return QuantTensor(FORMATS[self.format], self.shape, np.stack(rows).reshape(*self.shape[:-1], -1))
        return _restored_integers(self, matrices)


def prepare_weight(
    weight: np.ndarray | QuantTensor | PackedIntTensor, device: str, dtype: torch.dtype, activations: str = "int8"
) -> TritonWeight:
    """dtype: the compute dtype, which plain numbers wider than 16 bits become. activations: "int8" or "float". Formats without a
    form of their own are converted."""
    if isinstance(weight, PackedIntTensor):
        return _prepare_integers(weight, device, dtype, activations)
    if isinstance(weight, QuantTensor):
        return _prepare_blocks(weight, device, dtype, activations)
    return _prepare_plain(weight, device, dtype, activations)


def stack_weights(matrices: list[TritonWeight]) -> TritonWeight:
    """Matrices (N, K) of one shape and form as one weight (matrices, N, K)."""
    first, orders = matrices[0], [each.order for each in matrices]
    assert len({(each.format, each.form, each.order is None) for each in matrices}) == 1
    order = None if orders[0] is None else torch.stack(orders)
    planes = _each([each.planes for each in matrices], torch.stack)
    if first.form is None:
        planes = _plain_planes(planes.low)
    return replace(first, shape=(len(matrices), *first.shape), planes=planes, order=order)


def plain_weight(numbers: torch.Tensor, activations: str) -> TritonWeight:
    """A weight of plain numbers (…, N, K), in their dtype."""
    name = next(name for name, own in _PLAIN_TYPES.items() if own == numbers.dtype)
    return TritonWeight(name, tuple(numbers.shape), None, _plain_planes(numbers), activations, numbers.dtype)


def _prepare_blocks(weight: QuantTensor, device: str, dtype: torch.dtype, activations: str) -> TritonWeight:
    name, columns = weight.format.name, weight.shape[-1]
    blocks = weight.blocks.reshape(-1, *weight.blocks.shape[-2:])
    if name not in FORMS:
        conversion = conversion_for(weight.format, columns)
        if conversion is None:
            return _prepare_values(weight, device, dtype, activations)
        _report(conversion)
        name, blocks = conversion.target.name, np.stack([conversion.convert(matrix) for matrix in blocks])
    matrices = [_pack_matrix(name, matrix, columns, device) for matrix in blocks]
    return TritonWeight(name, weight.shape, FORMS[name], _together(matrices, weight.shape), activations, dtype)


def _pack_matrix(name: str, blocks: np.ndarray, columns: int, device: str) -> Planes:
    step = max(1, _PART_ELEMENTS // (16 * columns)) * 16
    parts = [pack_blocks(name, _upload(blocks[row : row + step], device)) for row in range(0, len(blocks), step)]
    return parts[0] if len(parts) == 1 else _each(parts, lambda same: torch.cat(same, dim=1))


def _together(matrices: list[Planes], shape: tuple[int, ...]) -> Planes:
    return matrices[0] if len(shape) == 2 else _each(matrices, torch.stack)


def _each(parts: list[Planes], join: object) -> Planes:
    """Planes joined field by field."""
    fields = [[getattr(part, name) for part in parts] for name in ("low", "high", "scales", "extra")]
    return Planes(*(None if same[0] is None else join(same) for same in fields))


def _prepare_values(weight: QuantTensor, device: str, dtype: torch.dtype, activations: str) -> TritonWeight:
    """Formats that no form holds: float16, or bfloat16 where scales are powers of two and codes of two bits, which it holds."""
    name = "BF16" if weight.format.name == "MXFP4" else "F16"
    _report_values(weight.format.name, name)
    low = torch.from_numpy(dequantize(weight)).to(_PLAIN_TYPES[name]).to(device)
    return TritonWeight(name, weight.shape, None, _plain_planes(low), activations, dtype)


def _prepare_plain(weight: np.ndarray, device: str, dtype: torch.dtype, activations: str) -> TritonWeight:
    name = plain_format(weight.dtype).name
    if name in ("F16", "BF16"):
        low = _upload(np.ascontiguousarray(weight).view(np.int16), device)
        low = low.view(_PLAIN_TYPES[name])
    else:
        low = _upload(dequantize(weight), device).to(dtype)
        name = next(name for name, own in _PLAIN_TYPES.items() if own == dtype)
    return TritonWeight(name, weight.shape, None, _plain_planes(low), activations, dtype)


def _plain_planes(low: torch.Tensor) -> Planes:
    return Planes(low, None, low, None)


def _prepare_integers(weight: PackedIntTensor, device: str, dtype: torch.dtype, activations: str) -> TritonWeight:
    form = integer_form(weight.bits, weight.columns_per_group, weight.zero_points is not None)
    codes, scales = _matrices(weight.codes), _matrices(weight.scales)
    zeros = [None] * len(codes) if weight.zero_points is None else _matrices(weight.zero_points)
    matrices = [
        _pack_integers(form, *(None if part is None else _upload(part, device) for part in parts))
        for parts in zip(codes, scales, zeros, strict=True)
    ]
    order = None if weight.column_order is None else _upload(weight.column_order, device).long()
    planes = _together(matrices, weight.shape)
    return TritonWeight(f"I{weight.bits}", weight.shape, form, planes, activations, dtype, order)


def _matrices(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1, *array.shape[-2:])


def _pack_integers(form: Form, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Planes:
    middle = 1 << (form.bits - 1)
    if form.bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    extra = None
    if zeros is not None:  # in the units of codes that stand in the upper bits
        extra = transposed_numbers(((zeros.int() - middle) << form.shift).to(torch.int8))
    return Planes(*pack_codes(codes ^ middle, form), transposed_numbers(scales), extra)


def _restored_integers(weight: TritonWeight, matrices: list[TritonWeight]) -> PackedIntTensor:
    form, rows = weight.form, weight.shape[-2]
    middle = 1 << (form.bits - 1)
    codes = torch.stack([unpack_codes(m.planes.low, None, form, rows) ^ middle for m in matrices])
    if form.bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = torch.stack([restored(m.planes.scales, rows).view(torch.float32) for m in matrices])
    zeros = None
    if form.has_zeros:
        signed = torch.stack([restored(m.planes.extra, rows).view(torch.int8) for m in matrices])
        zeros = ((signed.int() >> form.shift) + middle).to(torch.uint8)
    arrays = (None if part is None else part.cpu().numpy().reshape(*weight.shape[:-1], -1) for part in (codes, scales, zeros))
    order = None if weight.order is None else weight.order.int().cpu().numpy()
    return PackedIntTensor(form.bits, form.group * 32, weight.shape, *arrays, column_order=order)


def _upload(array: np.ndarray, device: str) -> torch.Tensor:
    """Mapped files cannot be written to, which torch would warn of."""
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _to_numpy(numbers: torch.Tensor) -> np.ndarray:
    if numbers.dtype != torch.bfloat16:
        return numbers.cpu().numpy()
    import ml_dtypes

    return numbers.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@cache
def _report(conversion: Conversion) -> None:
    """Once for each pair of formats."""
    ratio = conversion.target.bits_per_weight / conversion.source.bits_per_weight
    source, target = conversion.source.name, conversion.target.name
    _log.warning("%s has no Triton kernel: converted to %s in memory, %.1fx the bytes", source, target, ratio)


@cache
def _report_values(source: str, target: str) -> None:
    ratio = FORMATS[target].bits_per_weight / FORMATS[source].bits_per_weight
    _log.warning("%s has no Triton kernel: it is %s in memory, %.1fx the bytes", source, target, ratio)

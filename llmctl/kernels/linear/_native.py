"""A stored weight prepared for the native linear kernels."""

from __future__ import annotations

import numpy as np

from llmctl.errors import OutOfMemoryError, UnsupportedError
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import plain_format
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.native._native import PackedWeight, ThreadPool

NATIVE_FORMATS = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
}
"""Formats that keep their bits in a layout of their own."""


def pack_weight(weight: np.ndarray | QuantTensor | PackedIntTensor, pool: ThreadPool | None = None) -> PackedWeight:
    """The weight (out_features, in_features), or the experts (experts, out, in) of one layer, in the native layout.

    pool: threads that share the work. Raises OutOfMemoryError, and UnsupportedError for numbers that have no layout.
    """
    if isinstance(weight, PackedIntTensor):
        return _pack_integers(weight, pool)
    if isinstance(weight, QuantTensor):
        name, stored = weight.format.name, weight.blocks
    else:
        name = plain_format(weight.dtype).name
        stored = np.ascontiguousarray(weight).view(np.uint8)
    if name not in NATIVE_FORMATS:
        raise UnsupportedError(f"{name} has no native layout")
    packed = _empty(name, weight.shape)
    for index, matrix in enumerate(_matrices(stored)):
        packed.store(matrix, matrix=index, pool=pool)
    return packed


def _pack_integers(weight: PackedIntTensor, pool: ThreadPool | None) -> PackedWeight:
    packed = _empty(f"I{weight.bits}", weight.shape, weight.columns_per_group)
    codes, scales = _matrices(weight.codes), _matrices(weight.scales)
    zeros = [None] * len(codes) if weight.zero_points is None else _matrices(weight.zero_points)
    for index in range(len(codes)):
        packed.store_groups(codes[index], scales[index], zeros[index], matrix=index, pool=pool)
    return packed


def _matrices(array: np.ndarray) -> np.ndarray:
    """(rows, bytes) or (experts, rows, bytes) → (experts, rows, bytes)."""
    return array.reshape(-1, *array.shape[-2:])


def _empty(layout: str, shape: tuple[int, ...], group_size: int = 0) -> PackedWeight:
    assert len(shape) in (2, 3), shape
    matrices, rows, columns = (1, *shape)[-3:]
    try:
        return PackedWeight(layout, rows, columns, group_size, matrices)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"no memory for a weight of {matrices * rows} x {columns} numbers in {layout}: close other programs, "
            "or take a smaller model or a smaller quantization of this one"
        ) from error

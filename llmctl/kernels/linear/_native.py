"""A stored weight prepared for the native linear kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from llmctl.errors import OutOfMemoryError
from llmctl.kernels.formats.conversion import Conversion, conversion_for
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import plain_format, widen
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native._native import PackedWeight, ThreadPool

NATIVE_FORMATS = {
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
}
"""Formats that keep their bits in a layout of their own. The others are converted when they are packed."""
_CHUNK_ELEMENTS = 1 << 18
_PART_BYTES = 16 << 20
_TILE_ROWS = 16

_log = logging.getLogger(__name__)


def pack_weight(weight: np.ndarray | QuantTensor | PackedIntTensor, pool: ThreadPool | None = None) -> PackedWeight:
    """The weight (out_features, in_features), or the experts (experts, out, in) of one layer, in the native layout.

    pool: threads that share the work. Of a format without a layout never more than a few rows are unfolded at a time. Raises
    OutOfMemoryError.
    """
    if isinstance(weight, PackedIntTensor):
        return _pack_integers(weight, pool)
    if isinstance(weight, QuantTensor):
        if weight.format.name in NATIVE_FORMATS:
            return _pack_stored(weight.format.name, weight.shape, weight.blocks, pool)
        conversion = conversion_for(weight.format, weight.shape[-1])
        assert conversion, weight.format
        _report(conversion)
        return _pack_converted(conversion.target.name, weight.shape, weight.blocks, conversion.convert, pool)
    name = plain_format(weight.dtype).name
    if name not in NATIVE_FORMATS:
        return _pack_converted("F32", weight.shape, weight, lambda rows: widen(rows).view(np.uint8), pool)
    if weight.flags.c_contiguous:
        return _pack_stored(name, weight.shape, weight.view(np.uint8), pool)
    return _pack_converted(name, weight.shape, weight, lambda rows: np.ascontiguousarray(rows).view(np.uint8), pool)


def _pack_stored(layout: str, shape: tuple[int, ...], stored: np.ndarray, pool: ThreadPool | None) -> PackedWeight:
    """Part by part, so that the pages of a mapped file leave memory as those of the packed weight come."""
    packed, matrices = _empty(layout, shape), _matrices(stored)
    step = max(1, _PART_BYTES // (stored.shape[-1] * _TILE_ROWS)) * _TILE_ROWS
    for index, matrix in enumerate(matrices):
        for row in range(0, len(matrix), step):
            part = matrix[row : row + step]
            packed.store(part, row, index, pool=pool)
            release_mapped(part)
    return packed


def _pack_integers(weight: PackedIntTensor, pool: ThreadPool | None) -> PackedWeight:
    packed = _empty(f"I{weight.bits}", weight.shape, weight.columns_per_group)
    codes, scales = _matrices(weight.codes), _matrices(weight.scales)
    zeros = [None] * len(codes) if weight.zero_points is None else _matrices(weight.zero_points)
    for index in range(len(codes)):
        packed.store_groups(codes[index], scales[index], zeros[index], matrix=index, pool=pool)
    return packed


def _pack_converted(
    layout: str,
    shape: tuple[int, ...],
    stored: np.ndarray,
    convert: Callable[[np.ndarray], np.ndarray],
    pool: ThreadPool | None,
) -> PackedWeight:
    """Chunks of whole tiles converted and stored, as many at a time as the pool has threads (numpy lets them run)."""
    packed, matrices = _empty(layout, shape), _matrices(stored)
    step = max(1, _CHUNK_ELEMENTS // (shape[-1] * _TILE_ROWS)) * _TILE_ROWS
    chunks = [(index, row) for index in range(len(matrices)) for row in range(0, shape[-2], step)]

    def store(chunk: tuple[int, int]) -> None:
        index, row = chunk
        packed.store(convert(matrices[index, row : row + step]), row, index)

    with ThreadPoolExecutor(pool.size if pool else 1) as threads:
        for _ in threads.map(store, chunks):
            pass
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
        bits = int(layout[1]) if group_size else FORMATS[layout].bits_per_weight
        raise OutOfMemoryError(
            f"no memory for a weight of {matrices * rows} x {columns} numbers in {layout} "
            f"({matrices * rows * columns * bits / 8e9:.1f} GB): close other programs, or take a smaller model or "
            "a smaller quantization of this one"
        ) from error


@cache
def _report(conversion: Conversion) -> None:
    """Once for each pair of formats."""
    source, target = conversion.source, conversion.target
    ratio = target.bits_per_weight / source.bits_per_weight
    _log.warning("%s has no native kernel: converted to %s in memory, %.1fx the bytes", source.name, target.name, ratio)

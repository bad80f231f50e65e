"""Weights in small floats with scales beside them: float8 (E4M3, E5M2) and MXFP4.

No kernel reads float8: its values are worked out when it is read, in the narrowest type that holds every one of them exactly
(bfloat16 where scales are powers of two or nearly, else float32). MXFP4 only changes its order of nibbles.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint.packed_parts import FLOATS, PackedModule, Parts

FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
SCALES = ("weight_scale", "weight_scale_inv")
"""Both multiply the stored numbers; the second is DeepSeek's name for it."""
DEFAULT_BLOCK = (128, 128)
_CHUNK_ELEMENTS = 1 << 20


def float8_module(parts: Parts, block: tuple[int, int] | None) -> PackedModule:
    """The module of these parts, its shapes checked. block: rows and columns that share a scale, None where nothing says so:
    then one scale, one a row, or one for every DEFAULT_BLOCK is told by the shape."""
    shape = parts.shape("weight", 2)
    scale = next(suffix for suffix in SCALES if parts.has(suffix))
    stored = parts.checkpoint.entry(parts.name(scale)).shape
    size = _block_size(stored, shape, block)
    expected = (-(-shape[0] // size[0]), -(-shape[1] // size[1]))
    if prod(stored) != prod(expected) or len(stored) > 2:
        parts.check(scale, (*FLOATS, "F8_E8M0"), expected, f"{shape[0]} x {shape[1]} weights in blocks of {size[0]} x {size[1]}")
    parts.check(scale, (*FLOATS, "F8_E8M0"), stored, "scales")
    return PackedModule(
        name=parts.name("weight"),
        parts=parts.names("weight", *SCALES),
        shape=shape,
        form=parts.dtype("weight"),
        native_bytes=4 * prod(shape),
        read=lambda: _float8_values(parts, scale, shape, size, expected),
    )


def _block_size(stored: tuple[int, ...], shape: tuple[int, int], block: tuple[int, int] | None) -> tuple[int, int]:
    if prod(stored) == 1:
        return shape
    if stored in ((shape[0],), (shape[0], 1)):
        return 1, shape[1]
    return block or DEFAULT_BLOCK


def _float8_values(
    parts: Parts, scale: str, shape: tuple[int, int], size: tuple[int, int], grid: tuple[int, int]
) -> np.ndarray:
    """bfloat16 (rows, columns) if that is exact, else float32."""
    weight, scales = parts.read("weight"), parts.read(scale).astype(np.float32).reshape(grid)
    if not np.isfinite(scales).all():
        raise FormatError(f"{parts.where(scale)} holds a scale that is not finite: the file is damaged")
    values = np.empty(shape, np.float32)
    step = max(1, _CHUNK_ELEMENTS // shape[1])
    for start in range(0, shape[0], step):
        rows = np.arange(start, min(start + step, shape[0]))
        factors = np.repeat(scales[rows // size[0]], size[1], axis=1)[:, : shape[1]]
        np.multiply(weight[rows].astype(np.float32), factors, out=values[rows[0] : rows[-1] + 1])
    if not np.isfinite(values).all():
        row, column = np.unravel_index(int(np.isfinite(values).argmin()), shape)
        raise FormatError(f"{parts.where('weight')} holds no finite number in row {row}, column {column}: the file is damaged")
    narrow = values.astype(ml_dtypes.bfloat16)
    return narrow if np.array_equal(narrow.astype(np.float32), values) else values


def mxfp4_module(parts: Parts, name: str, blocks: str, scales: str) -> PackedModule:
    """A weight of 4-bit floats, two a byte with the earlier one low, and an exponent for every 32.

    blocks, scales: suffixes. The first is uint8 (…, columns / 32, 16) as in gpt-oss, or (…, columns / 2).
    """
    grid = parts.checkpoint.entry(parts.name(scales)).shape if parts.has(scales) else ()
    stored = parts.checkpoint.entry(parts.name(blocks)).shape
    if not grid or not all(grid):
        raise FormatError(f"{parts.where(scales)} has shape {grid}, expected an exponent for every 32 weights of {stored}")
    expected = (*grid, 16) if len(stored) > len(grid) else (*grid[:-1], 16 * grid[-1])
    parts.check(scales, ("U8", "F8_E8M0"), grid, "exponents")
    parts.check(blocks, ("U8",), expected, f"4-bit floats with exponents {grid}")
    matrix = (lambda index, rows: _module(parts, name, (blocks, scales), (index, rows))) if len(grid) == 3 else None
    return replace(_module(parts, name, (blocks, scales), ()), matrix=matrix)


def _module(parts: Parts, name: str, suffixes: tuple[str, str], place: tuple[int, slice] | tuple[()]) -> PackedModule:
    """What lies at `place` of the tensors; () is everything."""
    grid = np.broadcast_to(np.uint8(0), parts.checkpoint.entry(parts.name(suffixes[1])).shape)[place].shape
    form, shape = FORMATS["MXFP4"], (*grid[:-1], 32 * grid[-1])
    nbytes = prod(grid) * form.bytes_per_block
    return PackedModule(name, parts.names(*suffixes), shape, form.name, nbytes, lambda: _mxfp4(parts, suffixes, place), nbytes)


def _mxfp4(parts: Parts, suffixes: tuple[str, str], place: tuple[int, slice] | tuple[()]) -> QuantTensor:
    blocks, scales = suffixes
    exponents = parts.read(scales).view(np.uint8)[place]
    if (exponents == 255).any():
        raise FormatError(f"{parts.where(scales)} holds an exponent of 255, which is no number: the file is damaged")
    pairs = parts.read(blocks)[place].reshape(*exponents.shape, 16)
    first, second = pairs[..., :8], pairs[..., 8:]  # elements 0 to 15 and 16 to 31
    made = np.empty((*exponents.shape, 17), np.uint8)
    made[..., 0] = exponents
    made[..., 1::2] = first & 15 | second << 4
    made[..., 2::2] = first >> 4 | second & 240
    shape = (*exponents.shape[:-1], 32 * exponents.shape[-1])
    return QuantTensor(FORMATS["MXFP4"], shape, made.reshape(*shape[:-1], -1))

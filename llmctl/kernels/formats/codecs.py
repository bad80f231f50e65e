"""Stored formats to float32 and back. numpy only, no torch.

`dequantize` knows every format of spec.FORMATS and equals gguf-py's `gguf.quants.dequantize` bit for bit; `quantize`
equals llama.cpp's reference quantization where it has an encoder. Work goes in chunks, so temporaries stay in cache
whatever the size of the tensor. The grids of the IQ formats are taken from the installed `gguf` package on first use.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats import iquants, kquants, kquants_encode, legacy, smallfloat
from llmctl.kernels.formats.importance import Importance, spread
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.packed_int import PackedIntTensor, dequantize_packed_int
from llmctl.kernels.formats.plain import CAST_LIMITS, PLAIN_DTYPES, cast, finite_f32, widen
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format

# (records of n blocks, float32 (n, elements)) -> None: fills the second.
DECODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {
    **legacy.DECODERS,
    **kquants.DECODERS,
    **iquants.DECODERS,
    **smallfloat.DECODERS,
}
# (float32 (elements, n), importance or None, records of n blocks) -> None: fills the last.
ENCODERS: dict[str, Callable[[np.ndarray, Importance | None, np.ndarray], None]] = {
    **legacy.ENCODERS,
    **kquants_encode.ENCODERS,
    **iquants.ENCODERS,
    **smallfloat.ENCODERS,
}

# 256 KiB of float32: fits the second-level cache with its temporaries, and hides numpy's cost per call.
_CHUNK_ELEMENTS = 1 << 16


def can_quantize(format: Format) -> bool:
    """Whether `quantize` can produce this format."""
    return format.name in ENCODERS or format.name in CAST_LIMITS


def dequantize(tensor: QuantTensor | PackedIntTensor | np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """A stored tensor as float32 of its logical shape.

    tensor: a QuantTensor, a PackedIntTensor, or an array of plain numbers (F32, F16, BF16, F64, I8 to I64). A float32 array
    comes back itself, not copied, and is read-only if it is mapped from a file; everything else is a new array.
    out: C-contiguous float32 array of the tensor's shape to fill and return instead.
    Raises UnsupportedError for an array of another dtype, FormatError for a float64 value beyond float32.
    """
    if isinstance(tensor, QuantTensor):
        return dequantize_blocks(tensor.format, tensor.blocks, out=out)
    if out is not None:
        _check_out(out, tensor.shape)
    if isinstance(tensor, PackedIntTensor):
        return dequantize_packed_int(tensor, out)
    return widen(tensor, out)


def dequantize_blocks(format: Format, blocks: np.ndarray, *, out: np.ndarray | None = None) -> np.ndarray:
    """Stored bytes as float32: uint8 (..., n * bytes_per_block) -> (..., n * elements_per_block).

    out: C-contiguous float32 array of the result's shape to fill and return instead of a new one.
    Raises FormatError if the last axis is not a whole number of blocks.
    """
    shape = (*blocks.shape[:-1], _blocks_per_row(format, blocks) * format.elements_per_block)
    if out is None:
        out = np.empty(shape, np.float32)
    _check_out(out, shape)
    blocks = np.ascontiguousarray(blocks)
    if format.is_plain:
        return widen(blocks.view(PLAIN_DTYPES[format.name]), out)
    _decode(format, blocks, out)
    return out


def _blocks_per_row(format: Format, blocks: np.ndarray) -> int:
    if blocks.dtype != np.uint8 or blocks.ndim == 0:
        raise FormatError(f"{format.name} blocks must be an array of bytes, got {blocks.dtype} {blocks.shape}")
    count, rest = divmod(blocks.shape[-1], format.bytes_per_block)
    if rest:
        raise FormatError(
            f"{format.name} rows must be a multiple of {format.bytes_per_block} bytes long, got {blocks.shape[-1]}"
        )
    return count


def _check_out(out: np.ndarray, shape: tuple[int, ...]) -> None:
    assert out.dtype == np.float32, out.dtype
    assert out.shape == shape, (out.shape, shape)
    assert out.flags.c_contiguous


def _decode(format: Format, blocks: np.ndarray, out: np.ndarray) -> None:
    decode = DECODERS[format.name]
    records = blocks.reshape(-1).view(LAYOUTS[format.name])
    elements = out.reshape(-1, format.elements_per_block)
    step = _CHUNK_ELEMENTS // format.elements_per_block
    # A damaged file may hold infinite or NaN scales: they come out as such, without a warning for each.
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, len(records), step):
            decode(records[start : start + step], elements[start : start + step])


def quantize(array: np.ndarray, format: Format, importance: np.ndarray | None = None) -> QuantTensor | np.ndarray:
    """Round an array (..., K) of plain numbers to a format; blocks run along the last axis.

    Returns a QuantTensor for block formats (those in ENCODERS), an array for F32, F16 and BF16 (see `plain.cast`). The array
    may be strided or transposed; other plain numbers than float32 are widened to it first.
    importance: float32 (K,), weights of the squared errors in each column, finite and not negative. Q8_0 and MXFP4 do
    without, and so do plain formats.
    Raises UnsupportedError if the format has no encoder or the dtype no format; FormatError if K is not a multiple of
    the block, or a value is NaN, infinite or too large for the format (the caller adds the tensor's name).
    """
    if not can_quantize(format):
        known = ", ".join([*CAST_LIMITS, *ENCODERS])
        raise UnsupportedError(f"there is no encoder for {format.name}; tensors can be written as {known}")
    if format.is_plain:
        return cast(array, format)
    if array.ndim == 0:
        raise FormatError(f"{format.name} needs rows of elements, got a single number")
    assert importance is None or importance.shape == array.shape[-1:], (importance.shape, array.shape)
    blocks = np.empty((*array.shape[:-1], format.row_bytes(array.shape[-1])), np.uint8)
    if array.size:
        _encode(format, array, importance, blocks)
    return QuantTensor(format, array.shape, blocks)


def _encode(format: Format, array: np.ndarray, importance: np.ndarray | None, blocks: np.ndarray) -> None:
    encode = ENCODERS[format.name]
    rows = array.reshape(-1, array.shape[-1])
    records = blocks.reshape(-1).view(LAYOUTS[format.name]).reshape(len(rows), -1)
    step = max(1, _CHUNK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), step):
        values = finite_f32(np.ascontiguousarray(rows[start : start + step]), first_row=start)
        # Groups of zeros are divided by, too: what comes of it is not chosen. What overflows is refused with the scale.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore", under="ignore"):
            weights = spread(importance, values, format.elements_per_block) if importance is not None else None
            encode(_columns(values, format), weights, records[start : start + step].reshape(-1))


def _columns(values: np.ndarray, format: Format) -> np.ndarray:
    """float32 (rows, K) -> (elements, blocks)."""
    return np.ascontiguousarray(values.reshape(-1, format.elements_per_block).T)

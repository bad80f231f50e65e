"""Plain numbers: which numpy dtype each plain format is, and casts between them that refuse what does not fit."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.spec import FORMATS, Format

PLAIN_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("<i1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_FORMAT_NAMES = {dtype: name for name, dtype in PLAIN_DTYPES.items()}

# Formats `cast` can produce, with the largest value each holds.
CAST_LIMITS = {name: float(ml_dtypes.finfo(PLAIN_DTYPES[name]).max) for name in ("F32", "F16", "BF16")}


def plain_format(dtype: np.dtype) -> Format:
    """The format of plain numbers of this dtype; UnsupportedError for any other (float8 needs scales, for one)."""
    if name := _FORMAT_NAMES.get(np.dtype(dtype)):
        return FORMATS[name]
    raise UnsupportedError(f"numbers of type {dtype} have no plain format; known: {', '.join(PLAIN_DTYPES)}")


def widen(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Plain numbers as float32: the array itself if it is float32 already (and no `out` is given), else a new one.

    Exact from F16, BF16, I8 and I16, NaN and infinities included; rounded to nearest from I32, I64 and F64.
    FormatError for a finite F64 value beyond float32.
    """
    plain_format(array.dtype)
    if out is None and array.dtype == np.float32:
        return array
    if out is None:
        out = np.empty(array.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # invalid: signalling NaN, which a damaged file may hold
        out[...] = array
    if array.dtype == np.float64:
        _refuse_lost(array, np.isinf(out) & np.isfinite(array), "F32")
    return out


def shifted(values: np.ndarray, offset: float) -> np.ndarray:
    """float32 values + offset, for norms stored off by one; NaN of any kind stays one, without a warning."""
    with np.errstate(invalid="ignore"):
        return values + np.float32(offset)


def finite_f32(array: np.ndarray, first_row: int = 0) -> np.ndarray:
    """Plain numbers as float32 (not copied if they are); FormatError for NaN, infinity, or float64 beyond float32.

    first_row: row number of the array's first row in the whole tensor, for the message.
    """
    plain_format(array.dtype)
    with np.errstate(over="ignore"):
        wide = array.astype(np.float32, copy=False)
    _refuse_lost(array, ~np.isfinite(wide), "F32", first_row)
    return wide


def cast(array: np.ndarray, format: Format) -> np.ndarray:
    """Plain numbers as F32, F16 or BF16, rounded half to even.

    The same type again is returned unchanged, bit for bit, NaN and all. Any real conversion refuses non-finite input
    and values beyond the target's largest with a FormatError; float64 and integers go through float32.
    """
    target = PLAIN_DTYPES[format.name]
    if array.dtype == target:
        return array
    wide = finite_f32(array)
    with np.errstate(over="ignore"):
        result = wide.astype(target)
    _refuse_lost(array, ~np.isfinite(result), format.name)
    return result


def _refuse_lost(array: np.ndarray, lost: np.ndarray, name: str, first_row: int = 0) -> None:
    """FormatError naming the first element of `array` marked in `lost` (same shape), if any is."""
    if not lost.any():
        return
    index = np.unravel_index(lost.argmax(), lost.shape)
    row, column = divmod(int(lost.argmax()), lost.shape[-1] if lost.ndim else 1)
    value, place = float(array[index]), f"row {first_row + row}, column {column}"
    if not np.isfinite(value):
        raise FormatError(f"{value} in {place}: weights must be finite, so the source is damaged")
    raise FormatError(
        f"{value:g} in {place} does not fit {name}, whose largest value is {CAST_LIMITS[name]:g}: keep a wider type"
    )

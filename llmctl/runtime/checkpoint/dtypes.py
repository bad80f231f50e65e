"""Which numpy type holds each plain format, and how mapped bytes become a tensor."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format


def _file_only(name: str, size: int) -> Format:
    """A plain format that safetensors stores and GGUF does not (so no id)."""
    return Format(name, -1, 1, size)


_GGUF_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": ml_dtypes.bfloat16,
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
}
_SAFETENSORS_DTYPES = {
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
}

PLAIN_DTYPES: dict[str, np.dtype] = {name: np.dtype(dtype) for name, dtype in {**_GGUF_DTYPES, **_SAFETENSORS_DTYPES}.items()}
"""Format name → numpy dtype, for every format that is an ordinary array in memory."""

SAFETENSORS_FORMATS: dict[str, Format] = {
    **{name: FORMATS[name] for name in _GGUF_DTYPES},
    **{name: _file_only(name, PLAIN_DTYPES[name].itemsize) for name in _SAFETENSORS_DTYPES},
}
"""The dtype names of safetensors that are read. Its sub-byte and complex types are refused by name."""

_FORMAT_OF_DTYPE: dict[np.dtype, Format] = {PLAIN_DTYPES[name]: entry for name, entry in SAFETENSORS_FORMATS.items()}


def format_of(tensor: np.ndarray | QuantTensor) -> Format:
    """The stored format of a tensor in memory; UnsupportedError for a dtype no file holds."""
    if isinstance(tensor, QuantTensor):
        return tensor.format
    if found := _FORMAT_OF_DTYPE.get(tensor.dtype):
        return found
    raise UnsupportedError(f"arrays of dtype {tensor.dtype} have no stored format")


def tensor_from_bytes(raw: np.ndarray, form: Format, shape: tuple[int, ...]) -> np.ndarray | QuantTensor:
    """The tensor whose stored bytes are `raw` (uint8, one axis), sharing its memory.

    Only where a file places numbers off their natural boundary (safetensors permits it) is the array a copy: kernels
    may assume alignment. Either way it is read-only.
    """
    if not form.is_plain:
        return QuantTensor(form, shape, raw.reshape(*shape[:-1], form.row_bytes(shape[-1])))
    array = raw.view(PLAIN_DTYPES[form.name])
    if not array.flags.aligned:
        array = array.copy()
        array.setflags(write=False)
    return array.reshape(shape)

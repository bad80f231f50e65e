"""GGUF's value types and limits, shared by the reader and the writer.

Source: the GGUF description in the ggml repository (docs/gguf.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Any

import numpy as np

from llmctl.runtime.checkpoint.string_array import StringArray

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8  # the format asks for a multiple of 8; numbers of 8 bytes need it
MAX_ALIGNMENT = 2 << 20  # a huge page, the largest boundary anything maps at
MAX_DIMS = 4
MAX_DEPTH = 8  # nested arrays; no known file goes beyond 2
MAX_KEY_BYTES = 65535
MAX_NAME_BYTES = 64  # the format's limit; see WRITTEN_NAME_BYTES
WRITTEN_NAME_BYTES = 63  # llama.cpp keeps a zero behind the name
MAX_ITEMS = 1 << 20  # keys, tensors: bounds the Python objects a file can make us build


class ValueType(IntEnum):
    """Type of a metadata value."""

    U8 = 0
    I8 = 1
    U16 = 2
    I16 = 3
    U32 = 4
    I32 = 5
    F32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    U64 = 10
    I64 = 11
    F64 = 12


SCALARS: dict[ValueType, Struct] = {
    ValueType.U8: Struct("<B"),
    ValueType.I8: Struct("<b"),
    ValueType.U16: Struct("<H"),
    ValueType.I16: Struct("<h"),
    ValueType.U32: Struct("<I"),
    ValueType.I32: Struct("<i"),
    ValueType.F32: Struct("<f"),
    ValueType.BOOL: Struct("<B"),
    ValueType.U64: Struct("<Q"),
    ValueType.I64: Struct("<q"),
    ValueType.F64: Struct("<d"),
}
"""How a scalar of each type is packed (strings and arrays are not scalars)."""

DTYPES: dict[ValueType, np.dtype] = {
    ValueType.U8: np.dtype("u1"),
    ValueType.I8: np.dtype("i1"),
    ValueType.U16: np.dtype("<u2"),
    ValueType.I16: np.dtype("<i2"),
    ValueType.U32: np.dtype("<u4"),
    ValueType.I32: np.dtype("<i4"),
    ValueType.F32: np.dtype("<f4"),
    ValueType.BOOL: np.dtype("?"),
    ValueType.U64: np.dtype("<u8"),
    ValueType.I64: np.dtype("<i8"),
    ValueType.F64: np.dtype("<f8"),
}
"""numpy type of an array of each scalar type."""

VALUE_TYPES: dict[np.dtype, ValueType] = {dtype: value_type for value_type, dtype in DTYPES.items()}

MetaValue = bool | int | float | str | StringArray | np.ndarray | list[Any]
"""A metadata value: scalars are Python's; arrays of numbers numpy's, of strings StringArray, of arrays lists."""


@dataclass(frozen=True)
class Typed:
    """A metadata value with its GGUF type stated, where inference would choose another.

    type: of the scalar, or of the items if `value` is a list or an array.
    """

    value: Any
    type: ValueType


def is_alignment(value: int) -> bool:
    """Whether tensors may be aligned to this: a power of two from 8 bytes to 2 MiB."""
    return MIN_ALIGNMENT <= value <= MAX_ALIGNMENT and value & (value - 1) == 0


def padding(position: int, alignment: int) -> int:
    """Bytes from `position` to the next multiple of `alignment`."""
    return -position % alignment

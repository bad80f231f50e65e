"""Metadata values as the bytes GGUF stores, their types inferred or stated."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.gguf_types import (
    DTYPES,
    MAX_DEPTH,
    MAX_KEY_BYTES,
    SCALARS,
    VALUE_TYPES,
    Typed,
    ValueType,
)
from llmctl.runtime.checkpoint.string_array import StringArray
from llmctl.runtime.checkpoint.text import quoted

_U32 = SCALARS[ValueType.U32]
_U64 = SCALARS[ValueType.U64]
# The first that holds every value wins.
_INTEGERS = (ValueType.U32, ValueType.I32, ValueType.U64, ValueType.I64)


def encode_key_value(key: str, value: Any) -> bytes:
    """Key, type and value as stored.

    value: bool, int (u32, else i32, u64, i64, as it fits), float (f32), str, bytes (a string), a sequence of one of
    these (ints and floats mixed are f32), a numpy array (its dtype decides), a StringArray (copied as it is), a nested
    sequence, or Typed. FormatError naming the key if it cannot be stored so.
    """
    try:
        raw_key = key.encode()
        value_type, payload = _encode(value, depth=0)
    except (ValueError, TypeError, ArithmeticError, struct.error) as error:
        raise FormatError(f"metadata key {quoted(key)}: {quoted(repr(value))} cannot be stored: {error}") from error
    if not 0 < len(raw_key) <= MAX_KEY_BYTES:
        raise FormatError(f"metadata key {quoted(key)} must be 1 to {MAX_KEY_BYTES} bytes long")
    return _U64.pack(len(raw_key)) + raw_key + _U32.pack(value_type) + payload


def _encode(value: Any, depth: int) -> tuple[ValueType, bytes]:
    if depth > MAX_DEPTH:
        raise ValueError(f"arrays are nested deeper than {MAX_DEPTH}")
    if isinstance(value, Typed):
        if _is_array(value.value):
            return ValueType.ARRAY, _encode_array(value.value, value.type, depth)
        return value.type, _encode_scalar(value.value, value.type)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return _encode(Typed(value.item(), _dtype_type(value.dtype)), depth)
    if _is_array(value):
        return ValueType.ARRAY, _encode_array(value, None, depth)
    value_type = _infer([value])
    return value_type, _encode_scalar(value, value_type)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes))


def _encode_scalar(value: Any, value_type: ValueType) -> bytes:
    if value_type is ValueType.STRING:
        raw = value.encode() if isinstance(value, str) else bytes(memoryview(value))
        return _U64.pack(len(raw)) + raw
    if value_type is ValueType.ARRAY:
        raise TypeError("expected a list or an array")
    if isinstance(value, np.generic):
        value = value.item()
    if (value_type is ValueType.BOOL) != isinstance(value, bool):
        raise TypeError(f"type {value_type.name} does not hold {type(value).__name__}")
    return SCALARS[value_type].pack(value)


def _encode_array(value: Any, item_type: ValueType | None, depth: int) -> bytes:
    if isinstance(value, StringArray):
        if item_type not in (None, ValueType.STRING):
            raise TypeError("a StringArray holds strings")
        return _array_start(ValueType.STRING, len(value)) + value.buffer.tobytes()
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biuf":
        return _encode_numbers(value, item_type)
    items = value.tolist() if isinstance(value, np.ndarray) else list(value)
    item_type = item_type if item_type is not None else _infer(items)
    if item_type is ValueType.ARRAY:
        return _array_start(item_type, len(items)) + b"".join(_nested(item, depth + 1) for item in items)
    if item_type is ValueType.STRING:
        return _array_start(item_type, len(items)) + StringArray.encode(items).buffer.tobytes()
    return _array_start(item_type, len(items)) + b"".join(_encode_scalar(item, item_type) for item in items)


def _nested(value: Any, depth: int) -> bytes:
    value_type, payload = _encode(value, depth)
    if value_type is not ValueType.ARRAY:
        raise TypeError("lists and other values cannot be mixed")
    return payload


def _encode_numbers(value: np.ndarray, item_type: ValueType | None) -> bytes:
    item_type = item_type if item_type is not None else _dtype_type(value.dtype)
    with np.errstate(over="raise", invalid="raise"):
        converted = value.astype(DTYPES[item_type])
    if item_type is not ValueType.F32 and not np.array_equal(converted, value, equal_nan=value.dtype.kind == "f"):
        raise ValueError(f"its {value.dtype} numbers do not fit {item_type.name}")
    return _array_start(item_type, len(value)) + converted.tobytes()


def _array_start(item_type: ValueType, count: int) -> bytes:
    return _U32.pack(item_type) + _U64.pack(count)


def _dtype_type(dtype: np.dtype) -> ValueType:
    found = VALUE_TYPES.get(dtype.newbyteorder("<"))
    if found is None:
        raise TypeError(f"GGUF metadata has no type for {dtype}; convert it first")
    return found


def _infer(values: list[Any]) -> ValueType:
    """The type that holds all values."""
    kinds = {_kind(value) for value in values}
    if kinds == {int}:
        return _fitting_integer(min(values), max(values))
    if kinds <= {int, float} and kinds:
        return ValueType.F32
    if len(kinds) != 1:
        raise TypeError(f"its items are of {len(kinds)} kinds; give their type (Typed)")
    return {bool: ValueType.BOOL, str: ValueType.STRING, list: ValueType.ARRAY}[kinds.pop()]


def _kind(value: Any) -> type:
    if _is_array(value):
        return list
    for kind, accepted in ((bool, bool), (int, int), (float, float), (str, (str, bytes))):
        if isinstance(value, accepted):
            return kind
    raise TypeError(f"{type(value).__name__} has no place in GGUF metadata")


def _fitting_integer(low: int, high: int) -> ValueType:
    for value_type in _INTEGERS:
        limits = np.iinfo(DTYPES[value_type])
        if limits.min <= low and high <= limits.max:
            return value_type
    raise ValueError("an integer is beyond 64 bits")

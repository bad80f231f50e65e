"""The header of one GGUF file: metadata and where its tensors lie, every number checked before it is used.

A model file is input from a stranger. Each count is compared with the bytes left before anything is made for it, each
tensor's end with the size of the file before any is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.kernels.formats.spec import Format, format_by_gguf_id
from llmctl.runtime.checkpoint.checkpoint import TensorEntry
from llmctl.runtime.checkpoint.gguf_types import (
    DEFAULT_ALIGNMENT,
    DTYPES,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_ITEMS,
    MAX_KEY_BYTES,
    MAX_NAME_BYTES,
    MIN_ALIGNMENT,
    SCALARS,
    VERSIONS,
    MetaValue,
    ValueType,
    is_alignment,
    padding,
)
from llmctl.runtime.checkpoint.string_array import scan_strings
from llmctl.runtime.checkpoint.text import quoted

_MAX_ELEMENTS = 2**63 - 1
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # a key of one letter, a type, a value of one byte
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # a name of one letter, no dimensions, type, offset


@dataclass(frozen=True)
class GgufHeader:
    """What the header of one file says.

    types: the value type of each key (ARRAY for arrays: their items tell their own).
    entries: the tensors in the order of the file.
    """

    version: int
    alignment: int
    metadata: dict[str, MetaValue]
    types: dict[str, ValueType]
    entries: list[TensorEntry]


def read_header(path: Path, data: np.ndarray) -> GgufHeader:
    """Read and check the header of the file at `path`, mapped as `data` (uint8).

    Errors: FormatError or UnsupportedError naming the file and the key or tensor at fault.
    """
    cursor = _Cursor(path, data)
    version = _read_version(cursor)
    num_tensors = cursor.count("tensors", _MIN_TENSOR_BYTES, size=8)
    num_keys = cursor.count("metadata keys", _MIN_KEY_BYTES, size=8)
    metadata, types = _read_metadata(cursor, num_keys)
    alignment = _alignment(path, metadata, types)
    stored = _read_tensors(cursor, num_tensors)
    entries = _place(path, stored, cursor.position + padding(cursor.position, alignment), alignment)
    _check_ends(path, entries, len(data))
    return GgufHeader(version, alignment, metadata, types, entries)


class _Cursor:
    """A position in the file that never passes its end."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.data = data
        self.view = memoryview(data)
        self.position = 0

    @property
    def left(self) -> int:
        """Bytes behind the position."""
        return len(self.data) - self.position

    def fail(self, message: str) -> FormatError:
        """A FormatError naming the file."""
        return FormatError(f"{self.path}: {message}")

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        if count > self.left:
            raise self.fail(f"truncated in {what}: file is {len(self.data)} bytes, needs at least {self.position + count}")
        self.position += count
        return self.view[self.position - count : self.position]

    def scalar(self, value_type: ValueType, what: str) -> Any:
        """The next number; a bool that is neither 0 nor 1 is refused."""
        packing = SCALARS[value_type]
        (value,) = packing.unpack(self.take(packing.size, what))
        if value_type is ValueType.BOOL:
            if value > 1:
                raise self.fail(f"{what} is a bool with the value {value}")
            return bool(value)
        return value

    def count(self, what: str, min_bytes: int, *, size: int, limit: int = MAX_ITEMS) -> int:
        """The next u64 (or u32, by `size`), as a number of things that take at least `min_bytes` each."""
        value = self.scalar(ValueType.U64 if size == 8 else ValueType.U32, f"the number of {what}")
        if value > limit:
            raise self.fail(f"claims {value} {what}, the limit is {limit}")
        self.check_fits(value, min_bytes, what)
        return value

    def check_fits(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse `count` things of at least `min_bytes` each if the bytes left cannot hold them."""
        if count * min_bytes > self.left:
            raise self.fail(f"claims {count} {what}, which need at least {count * min_bytes} bytes; {self.left} are left")

    def raw_string(self, what: str, limit: int | None = None) -> bytes:
        """The next string's bytes."""
        length = self.scalar(ValueType.U64, f"the length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} claims {length} bytes, the limit is {limit}")
        if length > self.left:
            raise self.fail(f"{what} claims {length} bytes where {self.left} are left")
        return bytes(self.take(length, what))

    def text(self, what: str, limit: int | None = None) -> str:
        """The next string, which must be UTF-8."""
        raw = self.raw_string(what, limit)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8: {quoted(raw)} at byte {error.start}") from error


def _read_version(cursor: _Cursor) -> int:
    found = bytes(cursor.take(4, "the magic"))
    if found != MAGIC:
        raise cursor.fail(f"not a GGUF file: expected it to begin with {MAGIC!r}, found {found!r}")
    version = cursor.scalar(ValueType.U32, "the version")
    if version in VERSIONS:
        return version
    if version and not version & 0xFFFF:
        raise UnsupportedError(f"{cursor.path}: big-endian GGUF is not read; convert it to little-endian")
    hint = "convert the model again with a current tool" if version == 1 else "known versions are 2 and 3"
    raise UnsupportedError(f"{cursor.path}: GGUF version {version} is not read; {hint}")


def _read_metadata(cursor: _Cursor, num_keys: int) -> tuple[dict[str, MetaValue], dict[str, ValueType]]:
    metadata: dict[str, MetaValue] = {}
    types: dict[str, ValueType] = {}
    for index in range(num_keys):
        key = cursor.text(f"metadata key {index}", MAX_KEY_BYTES)
        if not key:
            raise cursor.fail(f"metadata key {index} is empty")
        if key in metadata:
            raise cursor.fail(f"metadata key {quoted(key)} appears twice")
        what = f"metadata key {quoted(key)}"
        types[key] = _value_type(cursor, what)
        metadata[key] = _read_value(cursor, types[key], what, depth=0)
    return metadata, types


def _value_type(cursor: _Cursor, what: str) -> ValueType:
    number = cursor.scalar(ValueType.U32, f"the type of {what}")
    try:
        return ValueType(number)
    except ValueError:
        raise cursor.fail(f"unknown value type {number} for {what}") from None


def _read_value(cursor: _Cursor, value_type: ValueType, what: str, depth: int) -> MetaValue:
    if value_type is ValueType.STRING:
        return cursor.text(what)
    if value_type is ValueType.ARRAY:
        return _read_array(cursor, what, depth + 1)
    return cursor.scalar(value_type, what)


def _read_array(cursor: _Cursor, what: str, depth: int) -> MetaValue:
    if depth > MAX_DEPTH:
        raise cursor.fail(f"{what} nests arrays deeper than {MAX_DEPTH}")
    item_type = _value_type(cursor, f"the items of {what}")
    count = cursor.scalar(ValueType.U64, f"the item count of {what}")
    reader = _ARRAY_READERS.get(item_type, _read_numbers)
    return reader(cursor, item_type, count, what, depth)


def _read_strings(cursor: _Cursor, item_type: ValueType, count: int, what: str, depth: int) -> MetaValue:
    cursor.check_fits(count, 8, f"strings in {what}")
    try:
        strings = scan_strings(cursor.data, cursor.position, count)
    except FormatError as error:
        raise cursor.fail(f"{what}: {error}") from error
    cursor.position += len(strings.buffer)
    return strings


def _read_nested(cursor: _Cursor, item_type: ValueType, count: int, what: str, depth: int) -> MetaValue:
    cursor.check_fits(count, 12, f"arrays in {what}")
    if count > MAX_ITEMS:
        raise cursor.fail(f"{what} claims {count} arrays, the limit is {MAX_ITEMS}")
    return [_read_array(cursor, what, depth + 1) for _ in range(count)]


def _read_numbers(cursor: _Cursor, item_type: ValueType, count: int, what: str, depth: int) -> MetaValue:
    dtype = DTYPES[item_type]
    cursor.check_fits(count, dtype.itemsize, f"items in {what}")
    raw = np.frombuffer(cursor.take(count * dtype.itemsize, what), np.uint8)
    if item_type is ValueType.BOOL and count and raw.max() > 1:
        raise cursor.fail(f"{what} holds bools with the value {raw.max()}")
    numbers = raw.view(dtype).copy()  # the header aligns nothing; kernels and users expect aligned numbers
    numbers.setflags(write=False)
    return numbers


_ArrayReader = Callable[[_Cursor, ValueType, int, str, int], MetaValue]
_ARRAY_READERS: dict[ValueType, _ArrayReader] = {ValueType.STRING: _read_strings, ValueType.ARRAY: _read_nested}


def _alignment(path: Path, metadata: dict[str, MetaValue], types: dict[str, ValueType]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    stated = types.get("general.alignment", ValueType.U32)
    if stated is not ValueType.U32 or not isinstance(value, int):
        raise FormatError(f"{path}: general.alignment must be a u32, found {stated.name}")
    if not is_alignment(value):
        raise FormatError(
            f"{path}: general.alignment is {value}, expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )
    return value


@dataclass(frozen=True)
class _StoredTensor:
    """A tensor as listed: its offset counts from the beginning of the data."""

    name: str
    format: Format
    shape: tuple[int, ...]
    offset: int


def _read_tensors(cursor: _Cursor, num_tensors: int) -> list[_StoredTensor]:
    tensors: dict[str, _StoredTensor] = {}
    for index in range(num_tensors):
        tensor = _read_tensor(cursor, index)
        if tensor.name in tensors:
            raise cursor.fail(f"tensor {quoted(tensor.name)} appears twice")
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _read_tensor(cursor: _Cursor, index: int) -> _StoredTensor:
    name = cursor.text(f"the name of tensor {index}", MAX_NAME_BYTES)
    what = f"tensor {quoted(name)}"
    if not name:
        raise cursor.fail(f"tensor {index} has an empty name")
    num_dims = cursor.count(f"dimensions of {what}", 8, size=4, limit=MAX_DIMS)
    dims = [cursor.scalar(ValueType.U64, f"the dimensions of {what}") for _ in range(num_dims)]
    if 0 in dims:
        raise cursor.fail(f"{what} has a dimension of 0: {dims}")
    if prod(dims) > _MAX_ELEMENTS:
        raise cursor.fail(f"{what} claims {prod(dims)} elements: {dims}")
    type_id = cursor.scalar(ValueType.U32, f"the type of {what}")
    try:
        form = format_by_gguf_id(type_id)
        form.row_bytes(dims[0] if dims else 1)
    except LlmctlError as error:
        raise type(error)(f"{cursor.path}: {what}: {error}") from error
    return _StoredTensor(name, form, tuple(reversed(dims)), cursor.scalar(ValueType.U64, f"the offset of {what}"))


def _place(path: Path, tensors: list[_StoredTensor], data_start: int, alignment: int) -> list[TensorEntry]:
    """Absolute places of the tensors, which must be aligned and must not overlap. Gaps are allowed."""
    entries = []
    for tensor in tensors:
        if tensor.offset % alignment:
            raise FormatError(
                f"{path}: tensor {quoted(tensor.name)} has offset {tensor.offset}, not a multiple of {alignment} (alignment)"
            )
        rows = prod(tensor.shape[:-1])
        nbytes = rows * tensor.format.row_bytes(tensor.shape[-1] if tensor.shape else 1)
        entries.append(TensorEntry(tensor.name, tensor.format, tensor.shape, nbytes, path, data_start + tensor.offset))
    ordered = sorted(entries, key=lambda entry: entry.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise FormatError(f"{path}: tensors {quoted(before.name)} and {quoted(after.name)} overlap")
    return entries


def _check_ends(path: Path, entries: list[TensorEntry], size: int) -> None:
    last = max(entries, key=lambda entry: entry.offset + entry.nbytes, default=None)
    if last is not None and last.offset + last.nbytes > size:
        raise FormatError(
            f"{path}: truncated or inconsistent: file is {size} bytes, needs {last.offset + last.nbytes} "
            f"(the end of tensor {quoted(last.name)}); download or make it again"
        )

"""The header of one safetensors file, checked in full before a tensor is looked at.

Layout: u64 header length, the header (a JSON object name → {dtype, shape, data_offsets}), then the data, which the
tensors must cover exactly: no overlap, no gap, nothing behind. Source: the safetensors project's description.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.checkpoint.checkpoint import TensorEntry
from llmctl.runtime.checkpoint.dtypes import SAFETENSORS_FORMATS
from llmctl.runtime.checkpoint.identify import MAX_SAFETENSORS_HEADER
from llmctl.runtime.checkpoint.text import quoted

# Part of the format, but below one byte or complex: no weight here is stored so.
_KNOWN_UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "C64")
_MAX_BYTES = 2**63 - 1
_MAX_AXES = 32  # numpy's, before its version 2


@dataclass(frozen=True)
class SafetensorsHeader:
    """metadata: the file's `__metadata__`; entries: tensors in the order of their data."""

    metadata: dict[str, str]
    entries: list[TensorEntry]


def read_header(path: Path, data: np.ndarray) -> SafetensorsHeader:
    """Read and check the header of the file at `path`, mapped as `data` (uint8).

    Errors: FormatError, or UnsupportedError for a dtype that is not read, naming the file and the tensor.
    """
    length = _header_length(path, data)
    header = _parse_json(path, data[8 : 8 + length].tobytes())
    metadata = _file_metadata(path, header.pop("__metadata__", {}))
    entries = [_entry(path, name, info, 8 + length) for name, info in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.offset + entry.nbytes))
    _check_coverage(path, entries, 8 + length, len(data))
    return SafetensorsHeader(metadata, entries)


def _header_length(path: Path, data: np.ndarray) -> int:
    if len(data) < 8:
        raise FormatError(f"{path}: truncated: file is {len(data)} bytes, a safetensors file needs at least 10")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if length > MAX_SAFETENSORS_HEADER:
        raise FormatError(
            f"{path}: not a safetensors file, or damaged: it claims a header of {length} bytes, "
            f"the limit is {MAX_SAFETENSORS_HEADER}"
        )
    if length > len(data) - 8:
        raise FormatError(f"{path}: truncated in the header: file is {len(data)} bytes, needs at least {8 + length}")
    return length


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except _RepeatedKeyError as error:
        raise FormatError(f"{path}: the header repeats the key {quoted(error.args[0])}") from error
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header must be a JSON object, found {type(header).__name__}")
    return header


class _RepeatedKeyError(Exception):
    """A JSON object names a key twice."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        raise _RepeatedKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))
    return result


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _file_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{path}: __metadata__ must be an object of strings")
    return metadata


def _entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    what = f"{path}: tensor {quoted(name)}"
    if not name.isascii() and name != name.encode("utf-8", "replace").decode():
        raise FormatError(f"{what} has half a surrogate pair in its name")
    if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
        raise FormatError(f"{what} must have dtype, shape and data_offsets")
    form = _format(what, info["dtype"])
    shape = tuple(_naturals(what, "shape", info["shape"]))
    if len(shape) > _MAX_AXES:
        raise FormatError(f"{what} claims {len(shape)} axes, the limit is {_MAX_AXES}")
    offsets = _naturals(what, "data_offsets", info["data_offsets"])
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{what} has data_offsets {quoted(offsets)}, expected [begin, end] with begin ≤ end")
    begin, end = offsets
    if end > _MAX_BYTES:
        raise FormatError(f"{what} has data_offsets {quoted(offsets)}, beyond any file")
    nbytes = prod(shape) * form.bytes_per_block
    if nbytes > _MAX_BYTES:
        raise FormatError(f"{what} of shape {quoted(list(shape))} claims {quoted(nbytes)} bytes")
    if nbytes != end - begin:
        raise FormatError(
            f"{what} of shape {quoted(list(shape))} and dtype {form.name} needs {nbytes} bytes, "
            f"its data_offsets span {end - begin}"
        )
    return TensorEntry(name, form, shape, nbytes, path, data_start + begin)


def _format(what: str, dtype: Any) -> Format:
    if isinstance(dtype, str) and dtype in SAFETENSORS_FORMATS:
        return SAFETENSORS_FORMATS[dtype]
    if dtype in _KNOWN_UNREAD:
        raise UnsupportedError(f"{what} has the dtype {dtype}, which is not read")
    raise FormatError(f"{what} has the unknown dtype {quoted(str(dtype))}")


def _naturals(what: str, key: str, value: Any) -> list[int]:
    """A JSON list of numbers that are whole and not negative (true and 1.0 are neither)."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise FormatError(f"{what} has the {key} {quoted(str(value))}, expected a list of whole numbers ≥ 0")
    return value


def _check_coverage(path: Path, entries: list[TensorEntry], data_start: int, size: int) -> None:
    """The tensors, in order of their data, must cover data_start..size exactly."""
    position = data_start
    before = "the header"
    for entry in entries:
        name = quoted(entry.name)
        if entry.offset < position:
            raise FormatError(f"{path}: tensors {before} and {name} overlap")
        if entry.offset > position:
            raise FormatError(f"{path}: {entry.offset - position} bytes between {before} and {name} belong to no tensor")
        position, before = entry.offset + entry.nbytes, name
    if position > size:
        raise FormatError(
            f"{path}: truncated: file is {size} bytes, needs {position} (the end of tensor {before}); download it again"
        )
    if position < size:
        raise FormatError(f"{path}: {size - position} bytes behind {before} belong to no tensor")

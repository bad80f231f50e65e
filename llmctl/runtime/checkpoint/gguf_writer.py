"""Writing GGUF files: declare every tensor, then stream their data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.runtime.checkpoint.dtypes import format_of
from llmctl.runtime.checkpoint.gguf_types import (
    DEFAULT_ALIGNMENT,
    MAGIC,
    MAX_ALIGNMENT,
    MAX_DIMS,
    MIN_ALIGNMENT,
    SCALARS,
    WRITTEN_NAME_BYTES,
    Typed,
    ValueType,
    is_alignment,
    padding,
)
from llmctl.runtime.checkpoint.gguf_values import encode_key_value
from llmctl.runtime.checkpoint.output_file import OutputFile, refuse_same_file
from llmctl.runtime.checkpoint.text import quoted

__all__ = ["GgufWriter", "Typed", "ValueType", "refuse_same_file"]

_VERSION = 3
_U32 = SCALARS[ValueType.U32]
_U64 = SCALARS[ValueType.U64]


@dataclass(frozen=True)
class _Declared:
    name: str
    format: Format
    shape: tuple[int, ...]
    nbytes: int


class GgufWriter:
    """Writes one GGUF v3 file; memory needed is one tensor.

    Use it as a context manager: the file appears at `path` when the block ends, and not at all when the block ends by an
    exception (KeyboardInterrupt included). Within: `declare` all tensors, then `write` each in that order.

    metadata: key → value (see gguf_values.encode_key_value for the types) or Typed(value, type).
    alignment: of the tensors; by default that of the metadata's general.alignment, else 32. One that is not 32 is
    written to the metadata.

    Errors: FormatError for what GGUF cannot hold or what was not declared so; OutputError for the disk and the folder.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any], alignment: int | None = None) -> None:
        self.path = Path(path)
        metadata, self.alignment = _with_alignment(metadata, alignment)
        self._num_keys = len(metadata)
        self._metadata = b"".join(encode_key_value(key, value) for key, value in metadata.items())
        self._declared: dict[str, _Declared] = {}
        self._waiting: list[_Declared] | None = None  # None while declaring; then what is still to be written, last first
        self._complete = False
        self._file = OutputFile(self.path)

    def declare(self, name: str, form: Format, shape: tuple[int, ...]) -> None:
        """Announce a tensor. shape: torch order, the last axis a whole number of blocks."""
        what = f"{self.path}: tensor {quoted(name)}"
        if self._waiting is not None:
            raise FormatError(f"{what} is declared after the first tensor was written")
        if name in self._declared:
            raise FormatError(f"{what} is declared twice")
        if not _is_writable_name(name):
            raise FormatError(f"{what} must have a name of 1 to {WRITTEN_NAME_BYTES} bytes of UTF-8")
        if form.gguf_id < 0:
            raise UnsupportedError(f"{what}: GGUF has no type {form.name}")
        self._declared[name] = _Declared(name, form, tuple(shape), tensor_bytes(self.path, name, form, shape))

    def require(self, count: int) -> None:
        """OutputError if the disk has not `count` bytes free."""
        self._file.require(count)

    def write(self, name: str, tensor: np.ndarray | QuantTensor) -> None:
        """Write the data of the next declared tensor, which must be as declared. Strided arrays are written right."""
        if self._waiting is None:
            self._write_header()
        if name not in self._declared:
            raise FormatError(f"{self.path}: tensor {quoted(name)} was never declared")
        expected = self._waiting[-1] if self._waiting else None
        if expected is None or expected.name != name:
            turn = f"it is the turn of {quoted(expected.name)}" if expected else "all tensors are written"
            raise FormatError(f"{self.path}: tensor {quoted(name)} is out of order: {turn}")
        _check_declared(self.path, expected, tensor)
        data = tensor.blocks if isinstance(tensor, QuantTensor) else tensor
        self._file.write(memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
        self._file.write(bytes(padding(self._file.position, self.alignment)))
        self._waiting.pop()

    def close(self) -> None:
        """Complete the file and put it at its name. FormatError, and no file, if a declared tensor was not written."""
        if self._complete:
            return
        try:
            if self._waiting is None:
                self._write_header()
            if self._waiting:
                raise FormatError(
                    f"{self.path}: {len(self._waiting)} declared tensors were never written, "
                    f"the first is {quoted(self._waiting[-1].name)}"
                )
            self._file.commit()
            self._complete = True
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Give up: nothing is left, neither at `path` nor under the temporary name."""
        self._file.abort()

    def __enter__(self) -> GgufWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *rest: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    def _write_header(self) -> None:
        tensors = list(self._declared.values())
        header, data_bytes = _header(self._metadata, self._num_keys, tensors, self.alignment)
        self._file.require(len(header) + data_bytes)
        self._file.write(header)
        self._metadata = b""
        self._waiting = tensors[::-1]


def _header(metadata: bytes, num_keys: int, tensors: Sequence[_Declared], alignment: int) -> tuple[bytes, int]:
    """Everything before the data, and how many bytes the data are."""
    infos, offset = [], 0
    for tensor in tensors:
        infos.append(_tensor_info(tensor, offset))
        offset += tensor.nbytes + padding(tensor.nbytes, alignment)
    counts = _U32.pack(_VERSION) + _U64.pack(len(tensors)) + _U64.pack(num_keys)
    header = b"".join([MAGIC, counts, metadata, *infos])
    return header + bytes(padding(len(header), alignment)), offset


def file_bytes(path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Format, tuple[int, ...]]]) -> int:
    """Bytes of the file that GgufWriter would make of these (name, format, shape). path: for messages."""
    metadata, alignment = _with_alignment(metadata, None)
    encoded = b"".join(encode_key_value(key, value) for key, value in metadata.items())
    declared = [_Declared(name, form, shape, tensor_bytes(path, name, form, shape)) for name, form, shape in tensors]
    header, data_bytes = _header(encoded, len(metadata), declared, alignment)
    return len(header) + data_bytes


def _with_alignment(metadata: Mapping[str, Any], alignment: int | None) -> tuple[dict[str, Any], int]:
    stated = metadata.get("general.alignment")
    stated = stated.value if isinstance(stated, Typed) else stated
    chosen = alignment if alignment is not None else stated if stated is not None else DEFAULT_ALIGNMENT
    if not isinstance(chosen, int) or not is_alignment(chosen):
        raise FormatError(f"alignment {quoted(chosen)}: expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}")
    if stated is not None and not (isinstance(stated, int) and stated == chosen):
        raise FormatError(f"general.alignment is {quoted(stated)} in the metadata, but {chosen} was asked for")
    if stated is None and chosen == DEFAULT_ALIGNMENT:
        return dict(metadata), chosen
    return {**metadata, "general.alignment": Typed(chosen, ValueType.U32)}, chosen


def _is_writable_name(name: str) -> bool:
    try:
        return 0 < len(name.encode()) <= WRITTEN_NAME_BYTES
    except UnicodeEncodeError:
        return False


def tensor_bytes(path: Path, name: str, form: Format, shape: tuple[int, ...]) -> int:
    """Bytes of the tensor in a file; FormatError if it cannot be stored so."""
    what = f"{path}: tensor {quoted(name)}"
    if len(shape) > MAX_DIMS or any(size < 1 for size in shape) or (not shape and not form.is_plain):
        raise FormatError(f"{what} of shape {tuple(shape)} cannot be stored as {form.name} in GGUF")
    try:
        return prod(shape[:-1]) * form.row_bytes(shape[-1] if shape else 1)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error


def _tensor_info(tensor: _Declared, offset: int) -> bytes:
    raw_name = tensor.name.encode()
    dims = b"".join(_U64.pack(size) for size in reversed(tensor.shape))
    return (
        _U64.pack(len(raw_name)) + raw_name + _U32.pack(len(tensor.shape)) + dims
        + _U32.pack(tensor.format.gguf_id) + _U64.pack(offset)
    )  # fmt: skip


def _check_declared(path: Path, declared: _Declared, tensor: np.ndarray | QuantTensor) -> None:
    try:
        found = (format_of(tensor).name, tuple(tensor.shape))
    except UnsupportedError as error:
        raise UnsupportedError(f"{path}: tensor {quoted(declared.name)}: {error}") from error
    expected = (declared.format.name, declared.shape)
    if found != expected:
        raise FormatError(
            f"{path}: tensor {quoted(declared.name)} was declared {expected[0]} {expected[1]}, got {found[0]} {found[1]}"
        )

"""Round to nearest: each weight to the closest value of its block's grid, from the weight and how much its column matters.

Pure: (weight, format, importance) → the rounded tensor and how far it is from the weight. Nothing here knows files or names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.integer_blocks import as_blocks
from llmctl.kernels.formats.mapped import release_mapped
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import PLAIN_DTYPES, plain_format
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format

Tensor = np.ndarray | QuantTensor | PackedIntTensor

_CHUNK_ELEMENTS = 1 << 20  # 4 MiB as float32: what is unfolded at once, whatever the size of the tensor


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape that become one with a leading axis: the experts of a layer. Each is read when it is its turn."""

    parts: Sequence[Callable[[], Tensor]]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Rounded:
    """A tensor in its new format.

    squared_error: Σ (w − ŵ)². squared_weight: Σ w². Both None if they were not asked for.
    """

    tensor: Tensor
    squared_error: float | None
    squared_weight: float | None

    @property
    def relative_error(self) -> float | None:
        """Root mean square error relative to that of the weight, 0 where the weight is all zeros."""
        if self.squared_error is None or self.squared_weight is None:
            return None
        return relative_error(self.squared_error, self.squared_weight)


def relative_error(squared_error: float, squared_weight: float) -> float:
    """√(Σ (w − ŵ)² / Σ w²); 0 where there is no weight to be wrong about."""
    return sqrt(squared_error / squared_weight) if squared_weight else 0.0


def stored_format(tensor: Tensor) -> Format:
    """The format a tensor in memory is stored in; UnsupportedError for numbers that have none."""
    if isinstance(tensor, PackedIntTensor):
        return packed_format(tensor.bits)
    return tensor.format if isinstance(tensor, QuantTensor) else plain_format(tensor.dtype)


def packed_format(bits: int) -> Format:
    """What stands for grouped integers, which are no stored format of a GGUF file, in plans and reports."""
    return Format(f"INT{bits}", -1, 8, bits)


def round_to_nearest(
    weight: Tensor,
    form: Format,
    importance: np.ndarray | None = None,
    *,
    measure: bool = True,
    encoder: Encoder | None = None,
) -> Rounded:
    """The weight in another format, rounded block by block along its last axis.

    weight: plain numbers or blocks, any shape, or packed integers; they are unfolded first, but integers that `form` can hold
    keep their codes. form: one with an encoder. The same format again
    gives the same tensor, bit for bit. importance: float32, weights of the squared errors in each column: (K,), or (E, K) for a
    stack of E matrices. measure: also work out the error. encoder: with the threads to use; one by default.
    Memory beyond the result is a few chunks; the pages of a mapped weight are released as they are done with. Raises FormatError
    if a value is NaN, infinite or does not fit the format (the caller adds the tensor's name), or if rows are not whole blocks;
    UnsupportedError without an encoder.
    """
    if stored_format(weight) == form:
        return Rounded(weight, 0.0 if measure else None, _squared_weight(weight) if measure else None)
    encoder = encoder or Encoder()
    rows, result = _rows(weight), _empty(form, weight.shape)
    made = _rows(result)
    squared_error = squared_weight = 0.0
    rows_per_matrix = weight.shape[-2] if importance is not None and importance.ndim == 2 else max(1, rows.shape[0])
    for start, stop in _chunks(rows.shape, rows_per_matrix):
        part = _slice(rows, start, stop)
        columns = importance if importance is None or importance.ndim == 1 else importance[start // rows_per_matrix]
        kept = as_blocks(part, form) if isinstance(part, PackedIntTensor) else None
        rounded = kept or _encode(encoder, _plain(part, form), form, columns, start)
        _store(made, start, stop, rounded)
        if measure:
            values = dequantize(part)
            squared_weight += _squared(values)
            squared_error += _squared(values - dequantize(rounded))
        release_mapped(_bytes(part))
    return Rounded(result, squared_error if measure else None, squared_weight if measure else None)


def round_stack(
    stack: Stack, form: Format, importance: np.ndarray | None = None, *, measure: bool = True, encoder: Encoder | None = None
) -> Rounded:
    """As `round_to_nearest`, for every part of the stack. importance: float32 (E, K)."""
    result = _empty(form, stack.shape)
    bytes_of_parts, errors = result.blocks if isinstance(result, QuantTensor) else result, []
    for index, read in enumerate(stack.parts):
        columns = None if importance is None else importance[index]
        part = round_to_nearest(read(), form, columns, measure=measure, encoder=encoder)
        bytes_of_parts[index] = _bytes(part.tensor)
        errors.append((part.squared_error or 0.0, part.squared_weight or 0.0))
    return Rounded(result, *(map(sum, zip(*errors, strict=True)) if measure else (None, None)))


def first_nonfinite(weight: Tensor | Stack) -> tuple[int, int] | None:
    """Row and column of the first NaN or infinity; None if all values are finite. Leading axes count as rows."""
    if isinstance(weight, Stack):
        found = ((index, first_nonfinite(read())) for index, read in enumerate(weight.parts))
        return next(((index * prod(weight.shape[1:-1]) + at[0], at[1]) for index, at in found if at), None)
    rows = _rows(weight)
    for start, stop in _chunks(rows.shape):
        wrong = ~np.isfinite(dequantize(_slice(rows, start, stop)))
        if wrong.any():
            row, column = divmod(int(wrong.argmax()), wrong.shape[-1])
            return start + row, column
    return None


def _plain(part: Tensor, form: Format) -> np.ndarray:
    """Blocks and packed integers unfolded; plain numbers as they are, but for F32, which holds them all, NaN and infinity too."""
    return dequantize(part) if not isinstance(part, np.ndarray) or form.name == "F32" else part


def _bytes(part: Tensor) -> np.ndarray:
    """The array that most of the tensor is in."""
    return part.blocks if isinstance(part, QuantTensor) else part.codes if isinstance(part, PackedIntTensor) else part


def _encode(encoder: Encoder, part: np.ndarray, form: Format, importance: np.ndarray | None, first_row: int) -> Tensor:
    try:
        return encoder.encode(part, form, importance)
    except FormatError as error:
        raise FormatError(f"{error} (rows counted from {first_row})" if first_row else str(error)) from error


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with two axes, sharing memory; a number or vector is one row."""
    columns = tensor.shape[-1] if tensor.shape else 1
    shape = (prod(tensor.shape[:-1]), columns)
    if isinstance(tensor, QuantTensor):
        return QuantTensor(tensor.format, shape, tensor.blocks.reshape(shape[0], -1))
    if isinstance(tensor, PackedIntTensor):
        assert len(tensor.shape) == 2, tensor.shape
        return tensor
    return tensor.reshape(shape)


def _slice(rows: Tensor, start: int, stop: int) -> Tensor:
    if isinstance(rows, QuantTensor):
        return QuantTensor(rows.format, (stop - start, rows.shape[1]), rows.blocks[start:stop])
    if isinstance(rows, PackedIntTensor):
        zeros = None if rows.zero_points is None else rows.zero_points[start:stop]
        part = {"codes": rows.codes[start:stop], "scales": rows.scales[start:stop], "zero_points": zeros}
        return replace(rows, shape=(stop - start, rows.shape[1]), **part)
    return rows[start:stop]


def _store(rows: Tensor, start: int, stop: int, part: Tensor) -> None:
    if isinstance(rows, QuantTensor):
        rows.blocks[start:stop] = part.blocks
    else:
        rows[start:stop] = part


def _empty(form: Format, shape: tuple[int, ...]) -> Tensor:
    if form.is_plain:
        return np.empty(shape, PLAIN_DTYPES[form.name])
    return QuantTensor(form, shape, np.empty((*shape[:-1], form.row_bytes(shape[-1])), np.uint8))


def _chunks(shape: tuple[int, ...], rows_per_matrix: int | None = None) -> Iterator[tuple[int, int]]:
    """Rows start … stop − 1 of each chunk; none lies in two matrices."""
    step = max(1, _CHUNK_ELEMENTS // max(1, shape[1]))
    size = rows_per_matrix or max(1, shape[0])
    for matrix in range(0, shape[0], size):
        for start in range(matrix, matrix + size, step):
            yield start, min(start + step, matrix + size)


def _squared(values: np.ndarray) -> float:
    flat = values.reshape(-1)
    return float(np.dot(flat, flat))


def _squared_weight(weight: Tensor) -> float:
    rows = _rows(weight)
    return sum(_squared(dequantize(_slice(rows, start, stop))) for start, stop in _chunks(rows.shape))

"""PackedIntTensor: the one form in which packed 4-bit and 8-bit integers with groups reach the kernels.

GPTQ, AWQ and compressed-tensors checkpoints differ in the order of codes, in how they pack zero points and in the dtype of
scales; whoever reads such a file brings it to this form, and nothing above or below knows the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from llmctl.errors import FormatError

_GROUP_MULTIPLE = 32  # columns that share one activation scale
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True, eq=False)
class PackedIntTensor:
    """Rows of unsigned codes in groups: value = scale · (code − zero).

    bits: 4 or 8. group_size: columns that share a scale, a multiple of 32 that divides the row; −1 is the whole row.
    shape: logical shape, torch order (out_features, in_features) or (experts, out, in); groups run along the last axis.
    codes: uint8 (*shape[:-1], columns · bits / 8), of two 4-bit codes the earlier column in the low nibble.
    scales: float32 (*shape[:-1], groups), finite, of either sign.
    zero_points: uint8 like scales, or None for symmetric codes: 2^(bits − 1).
    column_order: int32 (columns,), or None for columns in their own order. The stored column j is the column column_order[j] of
    the weight (GPTQ with activation order brings the columns of a group together); `dequantize` puts them back.
    """

    bits: int
    group_size: int
    shape: tuple[int, ...]
    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    column_order: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise FormatError(f"packed integers have 4 or 8 bits, got {self.bits}")
        if not self.shape or not self.shape[-1]:
            raise FormatError(f"packed integers need rows of columns, got shape {self.shape}")
        self._check_group_size()
        rows, columns = tuple(self.shape[:-1]), self.shape[-1]
        _check_array("codes", self.codes, np.uint8, (*rows, columns * self.bits // 8))
        _check_array("scales", self.scales, np.float32, (*rows, self.num_groups))
        if not np.isfinite(self.scales).all():
            raise FormatError("scales of packed integers must be finite, so the source is damaged")
        if self.zero_points is not None:
            _check_array("zero_points", self.zero_points, np.uint8, (*rows, self.num_groups))
            if self.zero_points.max(initial=0) >> self.bits:
                raise FormatError(f"zero points of {self.bits}-bit codes are below {1 << self.bits}")
        if self.column_order is not None:
            _check_array("column_order", self.column_order, np.int32, (columns,))
            if not np.array_equal(np.sort(self.column_order), np.arange(columns)):
                raise FormatError(f"column_order must name each of the {columns} columns once")

    def _check_group_size(self) -> None:
        columns, group = self.shape[-1], self.columns_per_group
        if group < _GROUP_MULTIPLE or group % _GROUP_MULTIPLE or columns % group:
            raise FormatError(
                f"the group size must be a multiple of {_GROUP_MULTIPLE} that divides the {columns} columns of a row, "
                f"or -1 for whole rows of such a length; got {self.group_size}"
            )

    @property
    def columns_per_group(self) -> int:
        """Columns that share a scale, the whole row spelled out."""
        return self.shape[-1] if self.group_size == -1 else self.group_size

    @property
    def num_groups(self) -> int:
        """Groups of a row."""
        return self.shape[-1] // self.columns_per_group

    @property
    def nbytes(self) -> int:
        """Stored bytes: codes, scales, zero points and column order."""
        others = (self.zero_points, self.column_order)
        return self.codes.nbytes + self.scales.nbytes + sum(array.nbytes for array in others if array is not None)

    @property
    def num_elements(self) -> int:
        """Logical elements."""
        return prod(self.shape)


def _check_array(name: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise FormatError(f"{name} must be {np.dtype(dtype)} {shape}, got {array.dtype} {array.shape}")


def dequantize_packed_int(tensor: PackedIntTensor, out: np.ndarray | None = None) -> np.ndarray:
    """The values as float32 of the tensor's shape; out: C-contiguous float32 array of that shape to fill and return."""
    if out is None:
        out = np.empty(tensor.shape, np.float32)
    columns, groups = tensor.shape[-1], tensor.num_groups
    rows, codes = out.reshape(-1, columns), tensor.codes.reshape(-1, tensor.codes.shape[-1])
    scales, zeros = tensor.scales.reshape(-1, groups, 1), _zero_points(tensor)
    places = None if tensor.column_order is None else np.argsort(tensor.column_order)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        grouped = rows[part].reshape(-1, groups, tensor.columns_per_group)
        grouped[...] = unpack_packed_int(codes[part], tensor.bits).reshape(grouped.shape)
        grouped -= zeros[part]
        grouped *= scales[part]
        if places is not None:
            rows[part] = np.take(rows[part], places, axis=1)
    return out


def _zero_points(tensor: PackedIntTensor) -> np.ndarray:
    """float32 (rows, groups, 1)."""
    if tensor.zero_points is None:
        return np.broadcast_to(np.float32(1 << (tensor.bits - 1)), (tensor.scales.size // tensor.num_groups, 1, 1))
    return tensor.zero_points.reshape(-1, tensor.num_groups, 1).astype(np.float32)


def unpack_packed_int(codes: np.ndarray, bits: int) -> np.ndarray:
    """The codes of a tensor one a byte: uint8 (rows, bytes) → uint8 (rows, columns)."""
    if bits == 8:
        return codes
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)

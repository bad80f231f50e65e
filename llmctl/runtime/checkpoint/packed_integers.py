"""StoredIntegers: a matrix of grouped integer codes with its file's quirks resolved, and how it reaches the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from llmctl.errors import FormatError
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.runtime.checkpoint.packed_bits import pack_codes, unpack_codes

GROUP_MULTIPLE = 32
"""Columns: the groups that the kernels read are whole multiples of it."""


@dataclass(frozen=True, eq=False)
class StoredIntegers:
    """value[n, k] = scales[n, g] · (code[n, k] − zero_points[n, g]) with g = g_idx[k]; every bit that the file has, no more.

    bits: 2 to 8. group_size: columns of a group, −1 for the whole row. shape: (out_features, in_features).
    load_words: reads the codes, the streams of all rows (packed_bits), when they are wanted.
    scales: float16, bfloat16 or float32 (out_features, groups), of either sign.
    zero_points: uint8 like scales; None for symmetric codes, whose zero is 2^(bits − 1).
    g_idx: int32 (in_features,), None where it is k // group_size.
    """

    bits: int
    group_size: int
    shape: tuple[int, int]
    load_words: Callable[[], np.ndarray]
    scales: np.ndarray
    zero_points: np.ndarray | None = None
    g_idx: np.ndarray | None = None

    @property
    def words(self) -> np.ndarray:
        """uint32 (out_features, words_for(in_features, bits)); read anew every time."""
        return self.load_words()

    @property
    def symmetric_zero(self) -> int:
        """The zero point of symmetric codes."""
        return 1 << (self.bits - 1)

    @property
    def columns_per_group(self) -> int:
        """Columns that share a scale; of the last group there may be fewer."""
        return self.shape[1] if self.group_size == -1 else min(self.group_size, self.shape[1])

    def codes(self) -> np.ndarray:
        """uint8 (out_features, in_features)."""
        return unpack_codes(self.words, self.bits, self.shape[1])

    def groups(self) -> np.ndarray:
        """int32 (in_features,): the group of every column."""
        return self.g_idx if self.g_idx is not None else regular_groups(self.shape[1], self.columns_per_group)

    def all_zero_points(self) -> np.ndarray:
        """uint8 like scales, those of symmetric codes spelled out."""
        if self.zero_points is not None:
            return self.zero_points
        return np.full(self.scales.shape, self.symmetric_zero, np.uint8)

    def simplified(self) -> StoredIntegers:
        """The same values, without zero points that are those of symmetric codes and without a g_idx in order."""
        symmetric = self.zero_points is not None and (self.zero_points == self.symmetric_zero).all()
        ordered = self.g_idx is not None and np.array_equal(self.g_idx, regular_groups(self.shape[1], self.columns_per_group))
        return replace(
            self,
            zero_points=None if symmetric else self.zero_points,
            g_idx=None if ordered else self.g_idx,
        )


def regular_groups(columns: int, columns_per_group: int) -> np.ndarray:
    """int32 (columns,): k // columns_per_group."""
    return np.arange(columns, dtype=np.int32) // np.int32(columns_per_group)


def canonical(stored: StoredIntegers) -> PackedIntTensor | np.ndarray:
    """The same values as the kernels read them; as float32 where groups are not whole multiples of 32 columns.

    Codes of 2 and 3 bits become 4-bit ones, of 5 to 7 bits 8-bit ones: the steps are the same, so nothing is rounded. Columns
    are sorted by group, groups that do not divide the row are cut into equal ones that do.
    """
    groups = stored.groups()
    order = None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable").astype(np.int32)
    in_order = groups if order is None else groups[order]
    size = gcd(stored.shape[1], *(np.flatnonzero(np.diff(in_order)) + 1).tolist())
    if size % GROUP_MULTIPLE:
        return dequantized(stored)
    chosen = in_order[::size]
    wide = 4 if stored.bits <= 4 else 8
    return PackedIntTensor(
        bits=wide,
        group_size=size,
        shape=stored.shape,
        codes=_wide_codes(stored, wide, order),
        scales=np.ascontiguousarray(stored.scales[:, chosen].astype(np.float32)),
        zero_points=None if stored.zero_points is None else np.ascontiguousarray(stored.zero_points[:, chosen]),
        column_order=order,
    )


def _wide_codes(stored: StoredIntegers, bits: int, order: np.ndarray | None) -> np.ndarray:
    """uint8 (out_features, in_features · bits / 8): the stream of the file itself where that is what is wanted."""
    if bits == stored.bits and order is None:
        return np.ascontiguousarray(stored.words).view(np.uint8)
    codes = stored.codes()
    if order is not None:
        codes = np.take(codes, order, axis=1)  # ten times as fast as an index
    if stored.zero_points is None and bits > stored.bits:  # the zero of symmetric codes moves with their width
        codes = codes + np.uint8((1 << (bits - 1)) - stored.symmetric_zero)
    return pack_codes(codes, bits).view(np.uint8)


def dequantized(stored: StoredIntegers) -> np.ndarray:
    """float32 of the shape; the products are exact for float16 and bfloat16 scales."""
    groups = stored.groups()
    values = stored.codes().astype(np.float32)
    values -= stored.all_zero_points().astype(np.float32)[:, groups]
    values *= stored.scales.astype(np.float32)[:, groups]
    return values


def check_g_idx(where: str, g_idx: np.ndarray, num_groups: int) -> np.ndarray:
    """g_idx itself; FormatError unless every column's group is one of the `num_groups` there are."""
    wrong = (g_idx < 0) | (g_idx >= num_groups)
    if wrong.any():
        column = int(wrong.argmax())
        raise FormatError(f"{where} puts column {column} into group {g_idx[column]}, expected 0 to {num_groups - 1}")
    return g_idx


def check_scales(where: str, scales: np.ndarray) -> np.ndarray:
    """The scales themselves; FormatError for one that is not finite."""
    wrong = ~np.isfinite(scales)
    if wrong.any():
        row, column = np.unravel_index(int(wrong.argmax()), scales.shape)
        raise FormatError(f"{where} holds {float(scales[row, column])} in row {row}, column {column}: the file is damaged")
    return scales

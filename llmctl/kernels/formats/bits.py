"""Bit and scale helpers the block codecs share. Arrays are chunks of n blocks, small enough to stay in cache."""

from __future__ import annotations

import numpy as np

from llmctl.errors import FormatError

F16_MAX = 65504.0
HUGE = 1e9
"""No format's block reaches it with scales in float16 (Q6_K comes to 2.7e8), and sums of products with its square fit float32."""


def unpack_planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Split bytes into codes: uint8 (..., w) -> uint8 (..., 8 // bits, w); plane p is bits [p*bits, p*bits + bits)."""
    packed = np.ascontiguousarray(packed)
    codes = np.empty((*packed.shape[:-1], 8 // bits, packed.shape[-1]), np.uint8)
    for plane in range(8 // bits):
        np.right_shift(packed, plane * bits, out=codes[..., plane, :])
    codes &= (1 << bits) - 1
    return codes


def pack_planes(codes: np.ndarray) -> np.ndarray:
    """Inverse of `unpack_planes`: codes uint8 (..., planes, w) below 2^(8 // planes) -> uint8 (..., w)."""
    planes = codes.shape[-2]
    packed = codes[..., 0, :].copy()
    for plane in range(1, planes):
        packed |= codes[..., plane, :] << (plane * (8 // planes))
    return packed


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Low four bits of codes uint8 (32, n) -> (n, 16): element j in the low nibble of byte j, j + 16 in the high."""
    return ((codes[:16] & 15) | (codes[16:] << 4)).T


def unpack_bits(packed: np.ndarray) -> np.ndarray:
    """Bytes to bits, lowest first: uint8 (..., w) -> uint8 (..., 8 * w) of 0 and 1."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def to_f32(column: np.ndarray) -> np.ndarray:
    """One number per block as float32: (n,) -> (n, 1), ready to broadcast over the block."""
    return column.astype(np.float32)[:, None]


def scale_groups(out: np.ndarray, scales: np.ndarray) -> None:
    """out float32 (n, E) *= scales float32 (n, groups), each group covering E / groups neighbours, in place."""
    groups = out.reshape(*scales.shape, -1)
    groups *= scales[..., None]


def subtract_groups(out: np.ndarray, offsets: np.ndarray) -> None:
    """out float32 (n, E) -= offsets float32 (n, groups), each group covering E / groups neighbours, in place."""
    groups = out.reshape(*offsets.shape, -1)
    groups -= offsets[..., None]


def to_f16_scale(values: np.ndarray) -> np.ndarray:
    """Round block scales or offsets to float16 (half to even); FormatError if one exceeds the largest float16."""
    with np.errstate(over="ignore"):
        stored = values.astype(np.float16)
    if not np.isfinite(stored).all():
        worst = values[~np.isfinite(stored)][0]
        raise FormatError(
            f"values too large: a block needs a scale or offset of {worst:g}; the largest float16 is {F16_MAX:g}"
        )
    return stored


def refuse_huge(columns: np.ndarray) -> None:
    """FormatError for values that no block with float16 scales reaches: searches would lose their way among infinities."""
    largest = np.abs(columns).max(initial=0)
    if largest > HUGE:
        raise FormatError(
            f"values too large: a block with {largest:g} needs a scale beyond float16; the largest float16 is {F16_MAX:g}"
        )


def safe_inverse(scales: np.ndarray) -> np.ndarray:
    """1 / scales, and 0 where that is not finite (zero and the smallest subnormal scales, which are 0 in float16)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[~np.isfinite(inverse)] = 0
    return inverse


def round_half_away(values: np.ndarray) -> np.ndarray:
    """Nearest integer, ties away from zero like C's roundf (numpy's rint would send ties to even)."""
    whole = np.trunc(values)
    rest = values - whole  # exact
    rest += rest
    whole += np.trunc(rest, out=rest)
    return whole

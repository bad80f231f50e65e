"""IQ1 to IQ4: codes that index a fixed grid of vectors, or of values, decoded; IQ4_NL also encoded.

Decoders take records of n blocks (see layouts.py) and fill float32 (n, elements); for encoders see legacy.py. The
grids are constants of the formats; they come from the installed `gguf` package (a dependency), imported when the first such
tensor is decoded.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from llmctl.kernels.formats.bits import pack_nibbles, refuse_huge, scale_groups, to_f16_scale, to_f32, unpack_bits, unpack_planes
from llmctl.kernels.formats.importance import Importance
from llmctl.kernels.formats.search import TINY, F, extreme, ordered_sum

_IQ1_DELTA = np.float32(0.125)


@cache
def _grid(name: str) -> np.ndarray:
    """The grid of an IQ format as float32 (entries, vector length), taken from gguf-py."""
    import gguf.quants

    traits = getattr(gguf.quants, name)
    traits.init_grid()
    return np.ascontiguousarray(traits.grid, np.float32).reshape(traits.grid_shape)


@cache
def iq4_values() -> np.ndarray:
    """The 16 values of IQ4_NL and IQ4_XS as float32, taken from gguf-py."""
    import gguf.quants

    return np.array(gguf.quants.IQ4_NL.kvalues, np.float32)


@cache
def _signs() -> np.ndarray:
    """float32 (256, 8): entry b holds -1 where bit i of b is set, else 1."""
    bits = unpack_bits(np.arange(256, dtype=np.uint8)[:, None])
    return 1 - 2 * bits.astype(np.float32)


@cache
def _even_signs() -> np.ndarray:
    """float32 (128, 8): the first seven signs are the index's bits; the eighth makes the number of minuses even."""
    index = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(unpack_bits(index[:, None]), axis=1)
    return _signs()[index | (odd << 7)]


def _look_up(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Fill out float32 (n, E) with table rows (entries, w) at index (n, E / w)."""
    np.take(table, index, axis=0, out=out.reshape(*index.shape, table.shape[1]), mode="clip")


def _apply_signs(table: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
    """Multiply out float32 (n, E) by rows of a sign table (entries, 8) at index (n, E / 8), in place."""
    vectors = out.reshape(*index.shape, 8)
    vectors *= table[index]


def _sign_indices(words: np.ndarray) -> np.ndarray:
    """Four 7-bit indices out of each word, lowest first: uint32 (n, w) -> (n, 4 * w)."""
    shifts = np.array([0, 7, 14, 21], np.uint32)
    return ((words[..., None] >> shifts) & np.uint32(127)).reshape(len(words), -1)


def _nibble_scales(packed: np.ndarray) -> np.ndarray:
    """Nibbles, low one first, as float32: uint8 (n, w) -> (n, 2 * w)."""
    return unpack_planes(packed[..., None], 4).reshape(len(packed), -1).astype(np.float32)


def decode_iq2_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 8; per 32 elements four 7-bit sign indices and a 4-bit scale s: d (0.5 + s) / 4."""
    words = np.ascontiguousarray(blocks["groups"]["signs"])
    _look_up(_grid("IQ2_XXS"), blocks["groups"]["grid"].reshape(-1, 32), out)
    scale_groups(out, to_f32(blocks["d"]) * factors_iq2_xxs(blocks))
    _apply_signs(_even_signs(), _sign_indices(words), out)


def factors_iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    """float32 (n, 8): the scale of each 32 elements without d."""
    return _high_nibble_factors(np.ascontiguousarray(blocks["groups"]["signs"]), 0.25)


def _high_nibble_factors(words: np.ndarray, step: float) -> np.ndarray:
    return (np.float32(0.5) + (words >> np.uint32(28)).astype(np.float32)) * np.float32(step)


def decode_iq2_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 8: 9-bit grid and 7-bit sign index; per 16 elements a 4-bit scale s: d (0.5 + s) / 4."""
    _look_up(_grid("IQ2_XS"), blocks["qs"] & np.uint16(511), out)
    _scale_iq2(blocks, out)
    _apply_signs(_even_signs(), blocks["qs"] >> np.uint16(9), out)


def decode_iq2_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 8: 10-bit grid index, its top two bits in qh; a sign bit per element; scales as IQ2_XS."""
    high = unpack_planes(blocks["qh"][..., None], 2).reshape(-1, 32)
    _look_up(_grid("IQ2_S"), blocks["qs"] | (high.astype(np.uint16) << 8), out)
    _scale_iq2(blocks, out)
    _apply_signs(_signs(), blocks["signs"], out)


def _scale_iq2(blocks: np.ndarray, out: np.ndarray) -> None:
    scale_groups(out, to_f32(blocks["d"]) * factors_iq2(blocks))


def factors_iq2(blocks: np.ndarray) -> np.ndarray:
    """IQ2_XS and IQ2_S, float32 (n, 16): the scale of each 16 elements without d."""
    return (np.float32(0.5) + _nibble_scales(blocks["scales"])) * np.float32(0.25)


def decode_iq3_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 4; per 32 elements four 7-bit sign indices and a 4-bit scale s: d (0.5 + s) / 2."""
    words = np.ascontiguousarray(blocks["signs"])
    _look_up(_grid("IQ3_XXS"), blocks["qs"], out)
    scale_groups(out, to_f32(blocks["d"]) * factors_iq3_xxs(blocks))
    _apply_signs(_even_signs(), _sign_indices(words), out)


def factors_iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    """float32 (n, 8): the scale of each 32 elements without d."""
    return _high_nibble_factors(np.ascontiguousarray(blocks["signs"]), 0.5)


def decode_iq3_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 4: 9-bit grid index, its top bit in qh; a sign bit per element; per 32 a scale s: d (1 + 2 s)."""
    _look_up(_grid("IQ3_S"), blocks["qs"] | (unpack_bits(blocks["qh"]).astype(np.uint16) << 8), out)
    scale_groups(out, to_f32(blocks["d"]) * factors_iq3_s(blocks))
    _apply_signs(_signs(), blocks["signs"], out)


def factors_iq3_s(blocks: np.ndarray) -> np.ndarray:
    """float32 (n, 8): the scale of each 32 elements without d."""
    return 1 + 2 * _nibble_scales(blocks["scales"])


def decode_iq1_s(blocks: np.ndarray, out: np.ndarray) -> None:
    """Vectors of 8: 11-bit grid index; per 32 elements qh holds four 3-bit tops, a 3-bit scale s and the sign of delta.

    x = d (2 s + 1) (grid + delta), delta = -0.125 where the top bit of qh is set, else 0.125.
    """
    qh = np.ascontiguousarray(blocks["qh"])
    shifts = np.array([0, 3, 6, 9], np.uint16)
    high = ((qh[..., None] >> shifts) & np.uint16(7)).reshape(-1, 32)
    _look_up(_grid("IQ1_S"), blocks["qs"] | (high << np.uint16(8)), out)
    groups = out.reshape(-1, 8, 32)
    groups += np.where(qh & np.uint16(0x8000), -_IQ1_DELTA, _IQ1_DELTA)[..., None]
    scale_groups(out, to_f32(blocks["d"]) * factors_iq1_s(blocks))


def factors_iq1_s(blocks: np.ndarray) -> np.ndarray:
    """uint16 (n, 8): the scale of each 32 elements without d."""
    return 2 * ((np.ascontiguousarray(blocks["qh"]) >> np.uint16(12)) & np.uint16(7)) + 1


def decode_iq1_m(blocks: np.ndarray, out: np.ndarray) -> None:
    """As IQ1_S with a 3-bit scale per 16 elements and a delta sign per 8; d lies in the top nibbles of the scales."""
    qh = unpack_planes(blocks["qh"][..., None], 4).reshape(-1, 32)
    _look_up(_grid("IQ1_M"), blocks["qs"] | ((qh & 7).astype(np.uint16) << 8), out)
    vectors = out.reshape(-1, 32, 8)
    vectors += np.where(qh & 8, -_IQ1_DELTA, _IQ1_DELTA)[..., None]
    scale_groups(out, to_f32(iq1_m_scale(blocks)) * factors_iq1_m(blocks))


def factors_iq1_m(blocks: np.ndarray) -> np.ndarray:
    """uint16 (n, 16): the scale of each 16 elements without d."""
    shifts = np.array([0, 3, 6, 9], np.uint16)
    return 2 * ((blocks["scales"][..., None] >> shifts) & np.uint16(7)).reshape(-1, 16) + 1


def iq1_m_scale(blocks: np.ndarray) -> np.ndarray:
    """d as float16 (n,): the top nibble of word i of the scales is its bits 4i to 4i + 3."""
    top = np.ascontiguousarray(blocks["scales"]) >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16)
    return np.bitwise_or.reduce(top, axis=1).view(np.float16)


def decode_iq4_nl(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d * value of the nibble; element j in the low nibble of byte j, j + 16 in the high one."""
    np.take(iq4_values(), unpack_planes(blocks["qs"], 4).reshape(-1, 32), out=out, mode="clip")
    out *= to_f32(blocks["d"])


def decode_iq4_xs(blocks: np.ndarray, out: np.ndarray) -> None:
    """8 sub-blocks of 32 like IQ4_NL with a 6-bit scale s (low four bits in scales_l): (d (s - 32)) * value."""
    np.take(iq4_values(), unpack_planes(blocks["qs"], 4).reshape(-1, 256), out=out, mode="clip")
    low = unpack_planes(blocks["scales_l"][..., None], 4).reshape(-1, 8)
    high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scales = (low | (high.astype(np.uint8) << 4)).view(np.int8) - np.int8(32)
    scale_groups(out, to_f32(blocks["d"]) * scales)


def encode_iq4_nl(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """The scale is searched for as in search.py, with weights x² without an importance; then the nearest of the 16 values."""
    if importance is None:
        weights = columns * columns
    else:
        weights = importance.element_weights(columns, ordered_sum(columns * columns) * F(2 / 32))
    scale = _fit_values(columns, weights)
    inverse = np.where(scale != 0, 1 / scale, F(0))
    blocks["d"] = to_f16_scale(scale)
    store_iq4_nl(blocks, _nearest_value(inverse * columns).T)


def store_iq4_nl(blocks: np.ndarray, codes: np.ndarray) -> None:
    """The elements: codes (n, 32), indices of `iq4_values`."""
    blocks["qs"] = pack_nibbles(codes.T.astype(np.uint8))


def _nearest_value(values: np.ndarray) -> np.ndarray:
    """Codes of the nearest of IQ4's values; the higher one in the middle of two."""
    grid = iq4_values()
    return np.searchsorted((grid[:-1] + grid[1:]) / F(2), values, side="right")


def _fit_values(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(32, n) → scales (n,)."""
    refuse_huge(columns)
    largest, grid = extreme(columns), iq4_values()

    def sums(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        values = grid[_nearest_value(inverse * columns)]
        weighted = weights * values
        return ordered_sum(weighted * columns), ordered_sum(weighted * values)

    sum_xq, sum_q2 = sums(1 / (-largest / grid[0]))
    scale = np.where(sum_q2 > 0, sum_xq / sum_q2, F(0))
    most = scale * sum_xq
    for i in range(-7, 8):
        sum_xq, sum_q2 = sums((F(i) + grid[0]) / largest)
        better = (sum_q2 > 0) & (sum_xq * sum_xq > most * sum_q2)
        scale = np.where(better, sum_xq / sum_q2, scale)
        most = np.where(better, scale * sum_xq, most)
    return np.where(np.abs(largest) < TINY, F(0), scale)


DECODERS = {
    "IQ1_S": decode_iq1_s,
    "IQ1_M": decode_iq1_m,
    "IQ2_XXS": decode_iq2_xxs,
    "IQ2_XS": decode_iq2_xs,
    "IQ2_S": decode_iq2_s,
    "IQ3_XXS": decode_iq3_xxs,
    "IQ3_S": decode_iq3_s,
    "IQ4_NL": decode_iq4_nl,
    "IQ4_XS": decode_iq4_xs,
}
ENCODERS = {"IQ4_NL": encode_iq4_nl}

"""Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: one float16 scale (and offset) per 32 elements, decoded and encoded.

Decoders take records of n blocks (see layouts.py) and fill float32 (n, 32). Encoders take float32 *columns* (32, n),
element by block, so that every step runs along long contiguous rows, an importance or None, and fill the records. The codes
are those of llama.cpp, including its signed zeros: without an importance a block is rounded from its extremes, with one its
scale is searched for.
"""

from __future__ import annotations

import numpy as np

from llmctl.kernels.formats.bits import (
    pack_nibbles,
    round_half_away,
    safe_inverse,
    to_f16_scale,
    to_f32,
    unpack_bits,
    unpack_planes,
)
from llmctl.kernels.formats.importance import Importance
from llmctl.kernels.formats.search import Steps, fit_affine, fit_symmetric


def decode_q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d (q - 8)."""
    codes = unpack_planes(blocks["qs"], 4).reshape(-1, 32).view(np.int8)
    codes -= 8
    out[...] = codes
    out *= to_f32(blocks["d"])


def decode_q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d q + m."""
    out[...] = unpack_planes(blocks["qs"], 4).reshape(-1, 32)
    out *= to_f32(blocks["d"])
    out += to_f32(blocks["m"])


def decode_q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d (q - 16); bit j of qh is the fifth bit of element j."""
    codes = _five_bit_codes(blocks).view(np.int8)
    codes -= 16
    out[...] = codes
    out *= to_f32(blocks["d"])


def decode_q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d q + m; bit j of qh is the fifth bit of element j."""
    out[...] = _five_bit_codes(blocks)
    out *= to_f32(blocks["d"])
    out += to_f32(blocks["m"])


def decode_q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d q."""
    out[...] = blocks["qs"]
    out *= to_f32(blocks["d"])


def _five_bit_codes(blocks: np.ndarray) -> np.ndarray:
    codes = unpack_planes(blocks["qs"], 4).reshape(-1, 32)
    codes |= unpack_bits(blocks["qh"]) << 4
    return codes


def encode_q4_0(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """d = (signed value of largest magnitude) / -8, q = min(15, trunc(x / d + 8.5))."""
    codes = _signed_codes(columns, importance, blocks, 8)
    blocks["qs"] = pack_nibbles(codes)


def encode_q5_0(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """d = (signed value of largest magnitude) / -16, q = min(31, trunc(x / d + 16.5))."""
    codes = _signed_codes(columns, importance, blocks, 16)
    blocks["qs"] = pack_nibbles(codes)
    blocks["qh"] = _pack_fifth_bits(codes)


def encode_q4_1(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """m = min, d = (max - min) / 15, q = trunc((x - m) / d + 0.5)."""
    codes = _offset_codes(columns, importance, blocks, 15)
    blocks["qs"] = pack_nibbles(codes)


def encode_q5_1(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """m = min, d = (max - min) / 31, q = trunc((x - m) / d + 0.5)."""
    codes = _offset_codes(columns, importance, blocks, 31)
    blocks["qs"] = pack_nibbles(codes)
    blocks["qh"] = _pack_fifth_bits(codes)


def encode_q8_0(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """d = absmax / 127, q = x / d rounded half away from zero, with an importance as well: the steps are fine enough."""
    scales = np.abs(columns).max(axis=0) / np.float32(127)
    blocks["d"] = to_f16_scale(scales)
    blocks["qs"] = round_half_away(columns * safe_inverse(scales)).astype(np.int8).T


def _signed_codes(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray, half: int) -> np.ndarray:
    """Fills d; codes uint8 (32, n) from 0."""
    if importance is not None:
        fit = fit_symmetric(columns, importance.element_weights(columns, importance.row_mean_square), half)
        blocks["d"] = to_f16_scale(fit.scale)
        return fit.codes(columns, half).astype(np.uint8)
    scales = _signed_extreme(columns) / np.float32(-half)
    blocks["d"] = to_f16_scale(scales)
    steps = columns * safe_inverse(scales)
    steps += np.float32(half + 0.5)
    codes = steps.astype(np.uint8)
    return np.minimum(codes, 2 * half - 1, out=codes)


def _offset_codes(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray, top: int) -> np.ndarray:
    """Fills d and m; codes uint8 (32, n)."""
    if importance is not None:
        fit = fit_affine(
            columns, importance.element_weights(columns, importance.row_mean_square), top, Steps(-0.9, 0.05, 36)
        )
        blocks["d"], blocks["m"] = to_f16_scale(fit.scale), to_f16_scale(-fit.offset)
        return fit.codes(columns, top).astype(np.uint8)
    lowest = _first_minimum(columns)
    with np.errstate(over="ignore"):  # an infinite range is refused with the scale
        span = columns.max(axis=0) - lowest
    scales = (span + np.float32(0)) / np.float32(top)  # + 0: zeros of both signs may differ by -0
    blocks["d"] = to_f16_scale(scales)
    blocks["m"] = to_f16_scale(lowest)
    steps = columns - lowest
    steps *= safe_inverse(scales)
    steps += np.float32(0.5)  # at most top + 0.5 and a rounding error, so no clamp is needed
    return steps.astype(np.uint8)


def _signed_extreme(columns: np.ndarray) -> np.ndarray:
    """Per block the value of largest magnitude with its sign, the first of a tie; +0 for an all-zero block."""
    highest, lowest = columns.max(axis=0), columns.min(axis=0)
    extreme = np.where(highest > -lowest, highest, lowest)
    tied = np.flatnonzero(highest == -lowest)
    if tied.size:
        candidates = columns[:, tied]
        first = np.abs(candidates).argmax(axis=0)
        extreme[tied] = candidates[first, np.arange(tied.size)]
    return extreme + np.float32(0)


def _first_minimum(columns: np.ndarray) -> np.ndarray:
    """Per block the minimum; of zeros of both signs the first, as a running `<` keeps it."""
    lowest = columns.min(axis=0)
    zeros = np.flatnonzero(lowest == 0)
    if zeros.size:
        candidates = columns[:, zeros]
        lowest[zeros] = candidates[(candidates == 0).argmax(axis=0), np.arange(zeros.size)]
    return lowest


def _pack_fifth_bits(codes: np.ndarray) -> np.ndarray:
    """Bit 4 of codes uint8 (32, n) -> (n, 4), element j at bit j."""
    return np.packbits(codes >> 4, axis=0, bitorder="little").T


DECODERS = {
    "Q4_0": decode_q4_0,
    "Q4_1": decode_q4_1,
    "Q5_0": decode_q5_0,
    "Q5_1": decode_q5_1,
    "Q8_0": decode_q8_0,
}
ENCODERS = {
    "Q4_0": encode_q4_0,
    "Q4_1": encode_q4_1,
    "Q5_0": encode_q5_0,
    "Q5_1": encode_q5_1,
    "Q8_0": encode_q8_0,
}

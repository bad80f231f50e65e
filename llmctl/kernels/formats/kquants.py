"""Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: super-blocks of 256 with quantized sub-block scales, decoded.

Decoders take records of n blocks (see layouts.py) and fill float32 (n, 256). Products are formed in the order of the
format descriptions, (d * scale) * q - (dmin * m), which fixes every bit of the result.
"""

from __future__ import annotations

import numpy as np

from llmctl.kernels.formats.bits import scale_groups, subtract_groups, to_f32, unpack_planes


def unpack_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 6-bit scales and offsets of Q4_K and Q5_K: uint8 (n, 12) -> two uint8 (n, 8).

    The first four of each are the low six bits of bytes 0..3 and 4..7; the last four have their low nibbles in bytes
    8..11 and their top two bits above the first four.
    """
    first_scales, first_offsets, nibbles = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first_scales & 63, (nibbles & 15) | (first_scales >> 6 << 4)], axis=1)
    offsets = np.concatenate([first_offsets & 63, (nibbles >> 4) | (first_offsets >> 6 << 4)], axis=1)
    return scales, offsets


def pack_scales(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Inverse of `unpack_scales`: two uint8 (n, 8), each below 64 -> uint8 (n, 12)."""
    assert scales.max(initial=0) < 64
    assert offsets.max(initial=0) < 64
    first_scales = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    first_offsets = offsets[:, :4] | (offsets[:, 4:] >> 4 << 6)
    nibbles = (scales[:, 4:] & 15) | (offsets[:, 4:] << 4)
    return np.concatenate([first_scales, first_offsets, nibbles], axis=1)


def decode_q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """16 sub-blocks of 16: x = (d * low nibble) q - (dmin * high nibble)."""
    out[...] = unpack_planes(blocks["qs"], 2).reshape(-1, 256)
    scale_groups(out, to_f32(blocks["d"]) * (blocks["scales"] & 15))
    subtract_groups(out, to_f32(blocks["dmin"]) * (blocks["scales"] >> 4))


def decode_q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """16 sub-blocks of 16: x = (d (scale - 32)) (q - 4), the third bit of q in qh, one bit plane per 32 elements."""
    codes = unpack_planes(blocks["qs"], 2).reshape(-1, 8, 32)
    codes |= unpack_planes(blocks["qh"], 1) << 2
    signed = codes.view(np.int8)
    signed -= 4
    out[...] = signed.reshape(-1, 256)
    scale_groups(out, to_f32(blocks["d"]) * q3_k_scales(blocks["scales"]))


def q3_k_scales(packed: np.ndarray) -> np.ndarray:
    """uint8 (n, 12) -> int8 (n, 16): low nibbles in bytes 0..7 (low half first), top bit pairs in bytes 8..11."""
    low = unpack_planes(packed[:, :8], 4).reshape(-1, 16)
    high = unpack_planes(packed[:, 8:], 2).reshape(-1, 16)
    return (low | (high << 4)).view(np.int8) - np.int8(32)


def decode_q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """8 sub-blocks of 32: x = (d * sc) q - (dmin * m)."""
    out[...] = unpack_planes(blocks["qs"], 4).reshape(-1, 256)
    _apply_scale_and_offset(blocks, out)


def decode_q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K with a fifth bit: bit j of qh[l] belongs to element l of sub-block j."""
    codes = unpack_planes(blocks["qs"], 4).reshape(-1, 8, 32)
    codes |= unpack_planes(blocks["qh"], 1) << 4
    out[...] = codes.reshape(-1, 256)
    _apply_scale_and_offset(blocks, out)


def _apply_scale_and_offset(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, offsets = unpack_scales(blocks["scales"])
    scale_groups(out, to_f32(blocks["d"]) * scales)
    subtract_groups(out, to_f32(blocks["dmin"]) * offsets)


def decode_q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """16 sub-blocks of 16: x = (d * scale) (q - 32); low nibbles in ql, top bit pairs in qh, by halves of 128."""
    codes = unpack_planes(blocks["ql"], 4).reshape(-1, 2, 4, 32)
    codes |= unpack_planes(blocks["qh"], 2) << 4
    signed = codes.view(np.int8)
    signed -= 32
    out[...] = signed.reshape(-1, 256)
    scale_groups(out, to_f32(blocks["d"]) * blocks["scales"])


DECODERS = {
    "Q2_K": decode_q2_k,
    "Q3_K": decode_q3_k,
    "Q4_K": decode_q4_k,
    "Q5_K": decode_q5_k,
    "Q6_K": decode_q6_k,
}

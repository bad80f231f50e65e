"""TQ1_0 and TQ2_0 (ternary), MXFP4 and NVFP4 (4-bit floats with 8-bit float scales), decoded; MXFP4 also encoded.

Decoders take records of n blocks (see layouts.py) and fill float32 (n, elements); for encoders see legacy.py.
Source of the 4-bit floats: OCP Microscaling Formats (MX) specification 1.0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from llmctl.kernels.formats.bits import pack_nibbles, scale_groups, to_f32, unpack_planes
from llmctl.kernels.formats.importance import Importance

# E2M1 values times two, so that they are integers; the scales below are halved in turn. Code 8 is plain zero here.
_E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def decode_tq1_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d (t - 1); five base-3 digits t in a byte (four in qh), stored as the fraction byte / 256."""
    parts = (blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4)
    digits = np.concatenate([_base3_digits(packed, count) for packed, count in parts], axis=1)
    out[...] = digits.view(np.int8) - np.int8(1)
    out *= to_f32(blocks["d"])


def _base3_digits(packed: np.ndarray, count: int) -> np.ndarray:
    """uint8 (n, w) -> uint8 (n, count * w): the first `count` base-3 digits of each fraction, digit by digit."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[:, None, :] * powers  # modulo 256: what is left after the digits before
    return (rest.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(packed), -1)


def decode_tq2_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = d (q - 1), 2-bit q."""
    codes = unpack_planes(blocks["qs"], 2).reshape(-1, 256).view(np.int8)
    codes -= 1
    out[...] = codes
    out *= to_f32(blocks["d"])


def decode_mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """x = 2^(e - 127) * E2M1; element j in the low nibble of byte j, j + 16 in the high one."""
    np.take(_E2M1_DOUBLED, unpack_planes(blocks["qs"], 4).reshape(-1, 32), out=out, mode="clip")
    out *= _half_powers_of_two()[blocks["e"]][:, None]


def decode_nvfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """Four sub-blocks of 16 with an unsigned E4M3 scale each: x = scale * E2M1."""
    np.take(_E2M1_DOUBLED, unpack_planes(blocks["qs"], 4).reshape(-1, 64), out=out, mode="clip")
    scale_groups(out, half_e4m3()[blocks["d"]])


@cache
def _half_powers_of_two() -> np.ndarray:
    """float32 (256,): 2^(e - 128), half of what the exponent byte e means (E8M0); 255 is not NaN in this format."""
    return np.ldexp(np.float32(1), np.arange(256) - 128)


@cache
def half_e4m3() -> np.ndarray:
    """float32 (256,): half the value of each unsigned E4M3 byte, the top bit ignored; 127 (NaN) reads as 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    values = np.where(exponent == 0, np.ldexp(mantissa, -10), normal)
    values[127] = 0
    return values.astype(np.float32)


def encode_mxfp4(columns: np.ndarray, importance: Importance | None, blocks: np.ndarray) -> None:
    """e = floor(log2 absmax) − 2 and the nearest 4-bit floats, the smaller in the middle of two; with an importance as well.

    As llama.cpp has it: the logarithm is one in float32, so that just below a power of two it is that power's. Blocks below
    2^−125, where llama.cpp's exponent wraps, get the smallest exponent.
    """
    largest = np.abs(columns).max(axis=0)
    positive = np.where(largest > 0, largest, np.float32(1))
    exponents = np.floor(np.log2(positive.astype(np.float64)).astype(np.float32)).astype(np.int32) - 2 + 127
    blocks["e"] = np.where(largest > 0, np.maximum(exponents, 0), 0)
    middles = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)[:, None, None] * _half_powers_of_two()[blocks["e"]]
    codes = (np.abs(columns) > middles).sum(axis=0, dtype=np.uint8)
    codes |= np.where((columns < 0) & (codes > 0), 8, 0).astype(np.uint8)
    blocks["qs"] = pack_nibbles(codes)


DECODERS = {
    "TQ1_0": decode_tq1_0,
    "TQ2_0": decode_tq2_0,
    "MXFP4": decode_mxfp4,
    "NVFP4": decode_nvfp4,
}
ENCODERS = {"MXFP4": encode_mxfp4}

"""What a cache of each type makes of the numbers it is given, in numpy: the rounding of the reference's pages, without pages."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from llmctl.kernels.formats.codecs import dequantize_blocks, quantize
from llmctl.kernels.kv_types import BLOCK_TYPES, rotation

_PLAIN = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}
LARGEST_FP8 = 448.0


def rotate(x: np.ndarray, block: int) -> np.ndarray:
    """Every `block` numbers of the last axis times H / √block, H the Hadamard matrix; as it is for 0. Its own inverse."""
    if block == 0:
        return x
    shape, x = x.shape, x.reshape(-1, block)
    step = 1
    while step < block:
        pairs = x.reshape(-1, 2, step)
        x = np.concatenate((pairs[:, :1] + pairs[:, 1:], pairs[:, :1] - pairs[:, 1:]), 1).reshape(-1, block)
        step *= 2
    return (x / np.float32(math.sqrt(block))).reshape(shape)


def encode_rows(rows: np.ndarray, side: str, block: int) -> np.ndarray:
    """rows float32 [..., width] as blocks of a block type, rotated by `block` before. A row with a number that is not finite
    reads back as NaN."""
    with np.errstate(invalid="ignore"):
        values = rotate(rows, block)
    finite = np.isfinite(values).all(-1)
    blocks = quantize(np.where(finite[..., None], values, 0), BLOCK_TYPES[side]).blocks
    blocks[~finite] = 0xFF
    return blocks


def decode_rows(blocks: np.ndarray, side: str, block: int) -> np.ndarray:
    """The reverse of `encode_rows`."""
    return rotate(dequantize_blocks(BLOCK_TYPES[side], blocks), block)


def as_kept(rows: np.ndarray, side: str, *latent: int) -> np.ndarray:
    """rows float32 [n, num_kv_heads, width] as they read back from pages of that type. latent: how many numbers of a row are
    values as well."""
    if side in BLOCK_TYPES:
        block = rotation(side, rows.shape[-1], *latent)
        return decode_rows(encode_rows(rows, side, block), side, block)
    if side == "f32":
        return rows
    if side == "fp8":
        rows = np.where(np.isfinite(rows), np.clip(rows, -LARGEST_FP8, LARGEST_FP8), np.float32(np.nan))
    with np.errstate(over="ignore"):
        return rows.astype(_PLAIN[side]).astype(np.float32)

"""Activations for kernels that multiply integers: int8 codes with a scale for every 32 numbers, and sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llmctl.kernels.triton_lib.launch import cdiv, empty

SUB_BLOCK = 32
_BLOCKS_AT_ONCE = 32


@dataclass(frozen=True)
class QuantizedRows:
    """x [T, K] rounded: codes int8 [T, K] times scales float32 [T, K / 32]. sums float32 [T, K / 16]: of every 16 numbers, as
    rounded, what offsets of weights are multiplied by."""

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


@triton.jit
def round_sub_blocks(x):
    """x float32 [n, 32] → codes int32 [n, 32], scales [n], sums [n, 2]: the largest of 32 becomes 127, halves go up. For other
    kernels that give their result rounded, too."""
    scales = tl.max(tl.abs(x), axis=1) / 127.0
    inverse = tl.where(scales > 0, 1.0 / tl.where(scales > 0, scales, 1.0), 0.0)
    codes = tl.floor(x * inverse[:, None] + 0.5)
    sums = tl.sum(tl.reshape(codes, [x.shape[0], 2, 16]), axis=2) * scales[:, None]
    return codes.to(tl.int32), scales, sums


@triton.jit
def store_rounded(values, codes, scales, sums, row, size, begin, BLOCK: tl.constexpr):
    """values float32 [BLOCK], the numbers of a row of `size` from `begin` on, as QuantizedRows has them. BLOCK: of whole 32."""
    block = begin // 32 + tl.arange(0, BLOCK // 32)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    rounded, factors, summed = round_sub_blocks(tl.reshape(values, [BLOCK // 32, 32]))
    tl.store(codes + row * size + column, rounded.to(tl.int8), mask=column < size)
    tl.store(scales + row * (size // 32) + block, factors, mask=block * 32 < size)
    tl.store(sums + row * (size // 16) + half, summed, mask=half * 16 < size)


@triton.jit
def quantize_rows_kernel(x, codes, scales, sums, K, row_stride, BLOCKS: tl.constexpr, ROUND: tl.constexpr):
    """One program: BLOCKS sub-blocks of one row. Without ROUND `codes` are the numbers as they are."""
    row = tl.program_id(1)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    values = tl.load(x + row * row_stride + column, mask=column < K, other=0.0).to(tl.float32)
    half = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    if ROUND:
        rounded, factors, summed = round_sub_blocks(values)
        tl.store(codes + row * K + column, rounded.to(tl.int8), mask=column < K)
        tl.store(scales + row * (K // 32) + block, factors, mask=block * 32 < K)
    else:
        tl.store(codes + row * K + column, values, mask=column < K)
        summed = tl.sum(tl.reshape(values, [BLOCKS, 2, 16]), axis=2)
    tl.store(sums + row * (K // 16) + half, summed, mask=half * 16 < K)


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """x [T, K], K a multiple of 32, of any float type."""
    rounded = empty_rows(*x.shape, x.device)
    _launch(x, rounded.codes, rounded.scales, rounded.sums, True)
    return rounded


def empty_rows(rows: int, columns: int, device: torch.device) -> QuantizedRows:
    """Memory for rows [rows, columns], not initialised."""
    return QuantizedRows(
        empty((rows, columns), torch.int8, device),
        empty((rows, columns // SUB_BLOCK), torch.float32, device),
        empty((rows, columns // 16), torch.float32, device),
    )


def float_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as float32, and its sums of every 16 numbers, float32 [T, K / 16]."""
    wide = empty(tuple(x.shape), torch.float32, x.device)
    sums = empty((x.shape[0], x.shape[1] // 16), torch.float32, x.device)
    _launch(x, wide, sums, sums, False)
    return wide, sums


def _launch(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, is_rounded: bool) -> None:
    rows, columns = x.shape
    assert x.stride(1) == 1
    assert columns % SUB_BLOCK == 0
    grid = (cdiv(columns, _BLOCKS_AT_ONCE * SUB_BLOCK), rows)
    quantize_rows_kernel[grid](x, codes, scales, sums, columns, x.stride(0), BLOCKS=_BLOCKS_AT_ONCE, ROUND=is_rounded)

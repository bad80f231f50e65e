"""Weights times blocks of rows: small batches and experts' tokens. Codes become numbers in registers and go into tensor cores;
the same code writes them out for a prefill, which multiplies with torch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.kernels.triton_lib.unpack import code_at, scale_at, words_at


@triton.jit
def _numbers(
    low,
    high,
    factor,
    offset,
    half,
    word,
    byte,
    dtype: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
):
    """Weights of one byte of every word."""
    code = code_at(low, high, half, word, byte, LOW, HIGH, SIGNED)
    return (factor * code + offset).to(dtype)


@triton.jit
def _packed_sum(
    total,
    x_rows,
    in_batch,
    low,
    high,
    scales,
    extra,
    rows,
    stride,
    K,
    begin,
    end,
    x_type: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
):
    """total + x · weight of the sub-blocks from begin to end, SUB_BLOCKS a turn: four columns of each, one of every word, make
    one tile, so the words of a tile are loaded once and give eight of them."""
    line = tl.arange(0, 4 * SUB_BLOCKS)
    word = (line % 4)[:, None]
    here = (rows < stride)[None, :]
    for turn in range(begin, end, SUB_BLOCKS):
        sub_block = (turn + line // 4)[:, None]
        mask = (sub_block < end) & here
        for half in tl.static_range(2):
            factor, offset = scale_at(scales, extra, sub_block, half, stride, rows[None, :], mask, LOW, KIND, GROUP, ZEROS)
            low_words = words_at(low, sub_block, half, word, stride, rows[None, :], mask, LOW)
            high_words = low_words
            if HIGH:
                high_words = words_at(high, sub_block, half, word, stride, rows[None, :], mask, HIGH)
            for byte in tl.static_range(4):
                weight = _numbers(low_words, high_words, factor, offset, half, word, byte, x_type, LOW, HIGH, SIGNED)
                column = (turn + line // 4) * 32 + 16 * half + 4 * (line % 4) + byte
                values = tl.load(x_rows + column[None, :], mask=in_batch & (column < end * 32)[None, :], other=0.0)
                total = tl.dot(values.to(x_type), weight, total, input_precision="ieee")
    return total


@triton.jit
def _plain_sum(total, x_rows, in_batch, weight, rows, N, K, begin, end, x_type: tl.constexpr, SUB_BLOCKS: tl.constexpr):
    """The same of plain numbers [N, K]."""
    line = tl.arange(0, 32 * SUB_BLOCKS)
    for turn in range(begin, end, SUB_BLOCKS):
        column = turn * 32 + line
        inside = column < K
        place = weight + rows.to(tl.int64)[None, :] * K + column[:, None]
        numbers = tl.load(place, mask=(rows < N)[None, :] & inside[:, None], other=0.0)
        values = tl.load(x_rows + column[None, :], mask=in_batch & inside[None, :], other=0.0)
        total = tl.dot(values.to(x_type), numbers.to(x_type), total, input_precision="ieee")
    return total


@triton.jit
def matmul_kernel(
    x,
    low,
    high,
    scales,
    extra,
    order,
    experts,
    bias,
    out,
    M,
    N,
    stride,
    K,
    low_step,
    high_step,
    scales_step,
    extra_step,
    x_share,
    between,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    SORTED: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Program (tile, split, g): a tile of out [SPLITS, rows, N]. Row r of it is row r · between + g of out and takes row
    (r · between + g) // x_share of x. SORTED: row order[r] instead, −1 for none; BLOCK_M rows share the matrix experts[block].
    BATCHED: g is the matrix. KIND "plain": low is [N, K]. UPCAST: multiply float32 (the interpreter is wrong about bf16).
    """
    tiles = tl.cdiv(N, BLOCK_N)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    split, g = tl.program_id(1), tl.program_id(2)
    r = block * BLOCK_M + tl.arange(0, BLOCK_M)
    place = r * between + g
    in_batch = r < M
    expert = g.to(tl.int64)
    if SORTED:
        place = tl.load(order + r, mask=in_batch, other=-1)
        in_batch = place >= 0
        expert = tl.load(experts + block).to(tl.int64)
    if SORTED or BATCHED:
        low += expert * low_step
        high += expert * high_step
        scales += expert * scales_step
        extra += expert * extra_step
    x_type: tl.constexpr = tl.float32 if UPCAST else x.dtype.element_ty
    rows = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_rows = x + (place // x_share).to(tl.int64)[:, None] * K
    sub_blocks = tl.cdiv(K, 32)
    per_split = tl.cdiv(tl.cdiv(sub_blocks, SUB_BLOCKS), SPLITS) * SUB_BLOCKS
    begin, end = split * per_split, tl.minimum(split * per_split + per_split, sub_blocks)
    if SORTED:
        end = tl.where(tl.max(place, axis=0) >= 0, end, begin)  # no rows, no work
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if KIND == "plain":
        total = _plain_sum(total, x_rows, in_batch[:, None], low, rows, N, K, begin, end, x_type, SUB_BLOCKS)
    else:
        total = _packed_sum(total, x_rows, in_batch[:, None], low, high, scales, extra, rows, stride, K, begin, end, x_type,
                            LOW, HIGH, SIGNED, KIND, GROUP, ZEROS, SUB_BLOCKS)  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + expert * N + rows, mask=rows < N, other=0.0).to(tl.float32)[None, :]
    target = (place.to(tl.int64) + split.to(tl.int64) * (M * between))[:, None] * N + rows[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=in_batch[:, None] & (rows < N)[None, :])


@triton.jit
def dequantize_kernel(
    low,
    high,
    scales,
    extra,
    out,
    stride,
    sub_blocks,
    low_step,
    high_step,
    scales_step,
    extra_step,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SUB_BLOCKS: tl.constexpr,
):
    """Program (n, k, matrix): the numbers of BLOCK_N rows and SUB_BLOCKS sub-blocks, out [matrices, K, N padded]."""
    matrix = tl.program_id(2).to(tl.int64)
    low += matrix * low_step
    high += matrix * high_step
    scales += matrix * scales_step
    extra += matrix * extra_step
    out += matrix * sub_blocks * 32 * stride
    rows = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    line = tl.arange(0, 4 * SUB_BLOCKS)[:, None]
    sub_block = tl.program_id(1) * SUB_BLOCKS + line // 4
    mask = (sub_block < sub_blocks) & (rows < stride)
    dtype: tl.constexpr = out.dtype.element_ty
    for half in tl.static_range(2):
        factor, offset = scale_at(scales, extra, sub_block, half, stride, rows, mask, LOW, KIND, GROUP, ZEROS)
        low_words = words_at(low, sub_block, half, line % 4, stride, rows, mask, LOW)
        high_words = low_words
        if HIGH:
            high_words = words_at(high, sub_block, half, line % 4, stride, rows, mask, HIGH)
        for byte in tl.static_range(4):
            number = _numbers(low_words, high_words, factor, offset, half, line % 4, byte, dtype, LOW, HIGH, SIGNED)
            column = sub_block * 32 + 16 * half + 4 * (line % 4) + byte
            tl.store(out + column.to(tl.int64) * stride + rows, number, mask=mask)

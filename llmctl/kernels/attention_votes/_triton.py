"""attention_votes in Triton: attention says what each query's weights sum to, then every key gathers its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.attention._triton import ANY, Choices, attend_parts, dot_type, numbers_of, sizes_of
from llmctl.kernels.attention._triton_batch import DevicePageMap
from llmctl.kernels.attention._triton_kernels import to_powers
from llmctl.kernels.attention._triton_tiles import decode_tile
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.store_kv._triton_rows import load_rows
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.launch import cdiv, empty


def attention_votes(
    queries: torch.Tensor,
    pages: TritonPages,
    block_table: torch.Tensor,
    length: int,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """queries [W, num_heads, width] of the last tokens of a sequence with pages block_table and `length` tokens: the votes,
    float32 [num_kv_heads, length]."""
    count, heads, kv_heads = *queries.shape[:2], pages.num_kv_heads
    queries, layer = queries.contiguous(), Choices(scale, None, softcap, sinks)
    tile, splits = decode_tile(numbers_of(queries, pages), kv_heads, 1, queries.device)
    lens = torch.tensor([length], dtype=torch.int32, device=queries.device)
    starts = torch.tensor([0, count], dtype=torch.int32, device=queries.device)
    table = block_table.to(torch.int32)[None].contiguous()
    page_map = DevicePageMap(None, [length], [], lens, table, starts, 0, count)
    logs = attend_parts(queries, pages, page_map, layer, tile, splits, ANY, count)[1]
    votes = empty((kv_heads, length), torch.float32, queries.device)
    votes_kernel[(cdiv(length, tile.block_n), kv_heads)](
        *(queries, logs, votes, pages.keys.codes, pages.keys.scales, table, count, length, scale, softcap or 0.0),
        **sizes_of(heads, pages),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SPLITS=splits,
        HAS_SOFTCAP=softcap is not None,
        DOT=dot_type(queries.dtype, pages.keys.numbers.dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return votes


@triton.jit(do_not_specialize=["count", "length"])
def votes_kernel(
    queries,  # [count, HEADS, WIDTH + ROPE]
    logs,  # float32 [count, HEADS, SPLITS]: log2 of the sum of a query's weights over each split of the keys
    votes,  # float32 [KV_HEADS, length]
    key_codes,
    key_scales,
    table,  # [pages] int32
    count,
    length,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DOT: tl.constexpr,
):
    """BLOCK_N keys of one kv head a program, over all queries that read it."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    STRIDE: tl.constexpr = WIDTH + ROPE
    kv_head = tl.program_id(1)
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = keys < length
    pages = tl.load(table + keys // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    slots = (pages * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head
    k = load_rows(key_codes, key_scales, slots, there, 0, STRIDE, WIDTH, BLOCK_D, DOT)
    if ROPE > 0:
        k_rope = load_rows(key_codes, key_scales, slots, there, WIDTH, STRIDE, ROPE, BLOCK_R, DOT)
    column, rope, split = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R), tl.arange(0, SPLITS)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, count * GROUP, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)
        is_row = rows < count * GROUP
        row = (rows // GROUP) * HEADS + kv_head * GROUP + rows % GROUP
        wanted = is_row[:, None] & (column < WIDTH)[None, :]
        q = tl.load(queries + row[:, None] * STRIDE + column[None, :], mask=wanted, other=0.0).to(DOT)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if ROPE > 0:
            wanted = is_row[:, None] & (rope < ROPE)[None, :]
            q_rope = tl.load(queries + row[:, None] * STRIDE + WIDTH + rope[None, :], mask=wanted, other=0.0).to(DOT)
            scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
        log = tl.load(logs + row[:, None] * SPLITS + split[None, :], mask=is_row[:, None], other=0.0)
        top = tl.max(log, 1)
        log = top + tl.log2(tl.sum(tl.exp2(log - top[:, None]), 1))
        position = length - count + rows // GROUP
        seen = is_row[:, None] & (keys[None, :] <= position[:, None])
        weights = tl.exp2(to_powers(scores, scale, softcap, HAS_SOFTCAP) - log[:, None])
        total += tl.sum(tl.where(seen, weights, 0.0), 0)
    tl.store(votes + kv_head.to(tl.int64) * length + keys, total, mask=there)


def kernel_cases() -> list[Case]:
    """Heads of 128 over pages of f16."""
    types = {"queries": "*fp16", "logs": "*fp32", "votes": "*fp32", "key_codes": "*fp16", "table": "*i32"}
    numbers = {"count": "i32", "length": "i32", "scale": "fp32", "softcap": "fp32"}
    sizes = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "ROPE": 0, "BLOCK_D": 128, "BLOCK_R": 32, "BLOCK_SIZE": 16}
    tiles = {"BLOCK_M": 16, "BLOCK_N": 64, "SPLITS": 32, "HAS_SOFTCAP": False, "DOT": tl.float16, "key_scales": None}
    return [Case("attention_votes.d128.f16", votes_kernel, types | numbers, sizes | tiles, tuple(types), num_stages=2)]

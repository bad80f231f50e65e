"""rotary in Triton: alone, or with the norms of heads before it and the store of keys and values after it, in one launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from llmctl.kernels.store_kv._triton import NUMBERS, store_tokens, stored
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.store_kv._triton_rows import PER_SCALE, store_rows
from llmctl.kernels.triton_lib.casts import narrow
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.launch import cdiv, empty, power_of_two


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm over every head of queries and keys. Weights float32 [head_dim], or [heads, head_dim] where each has its own."""

    queries: torch.Tensor
    keys: torch.Tensor
    eps: float


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim elements of every head of x [T, heads, head_dim]."""
    x, y = x.contiguous(), empty(tuple(x.shape), x.dtype, x.device)
    tokens, heads, width = x.shape
    if tokens:
        sizes = {"HEADS": heads, "WIDTH": width, "HALF": cos.shape[-1], **_rows(width)}
        rotary_kernel[(cdiv(tokens * heads, sizes["ROWS"]),)](x, cos.contiguous(), sin.contiguous(), y, tokens, **sizes)
    return y


def rotary_store(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    pages: TritonPages,
    slot_mapping: torch.Tensor,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Queries [T, num_heads, head_dim] normed and rotated; keys the same and, with the values, stored in their slots of pages,
    where −1 stores nothing. angles: cos and sin, None for a layer without positions."""
    queries, y = queries.contiguous(), empty(tuple(queries.shape), queries.dtype, queries.device)
    (tokens, heads, width), kv_heads = queries.shape, keys.shape[1]
    assert (kv_heads, width) == tuple(pages.keys.numbers.shape[1:]), (keys.shape, pages.keys.numbers.shape)
    cos, sin = (None, None) if angles is None else (each.contiguous() for each in angles)
    weights = (None, None, 0.0) if norms is None else (norms.queries, norms.keys, norms.eps)
    half, norm = 0 if cos is None else cos.shape[-1], 0 if norms is None else norms.queries.ndim
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width, "HALF": half, "NORM": norm, **_rows(width)}
    if tokens:
        sides = (*stored(pages.keys), *stored(pages.values))
        grid = (cdiv(tokens * heads, sizes["ROWS"]), 3)
        inputs = (queries, keys.contiguous(), values.contiguous(), cos, sin, *weights)
        rotary_store_kernel[grid](*inputs, y, *sides, slot_mapping, tokens, **sizes)
    return y


def _rows(width: int) -> dict[str, int]:
    """How many heads a program has, and in how wide a block each."""
    block = power_of_two(width, PER_SCALE)
    return {"ROWS": max(NUMBERS // 2 // block, 1), "BLOCK": block}


@triton.jit(do_not_specialize=["tokens"])
def rotary_kernel(
    x,
    cos,
    sin,
    y,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS heads of x [tokens · HEADS, WIDTH] a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    numbers = _turned(x, row, cos, sin, x, 0.0, tokens, HEADS, WIDTH, HALF, 0, BLOCK)
    column = tl.arange(0, BLOCK)
    wanted = (row < tokens * HEADS)[:, None] & (column < WIDTH)[None, :]
    tl.store(y + row[:, None] * WIDTH + column[None, :], narrow(numbers, y.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["tokens"])
def rotary_store_kernel(
    queries,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    y,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    slots,
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,  # axes that a norm's weight has: 0 for no norms, 1, 2 where each head has its own
):
    """ROWS heads a program: of queries, of keys, of values by the second number of the program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        wanted = (row < tokens * HEADS)[:, None] & (column < WIDTH)[None, :]
        numbers = _turned(queries, row, cos, sin, query_norm, eps, tokens, HEADS, WIDTH, HALF, NORM, BLOCK)
        tl.store(y + row[:, None] * WIDTH + column[None, :], narrow(numbers, y.dtype.element_ty), mask=wanted)
    elif tl.program_id(0) * ROWS < tokens * KV_HEADS:
        if tl.program_id(1) == 1:
            slot = tl.load(slots + row // KV_HEADS, mask=row < tokens * KV_HEADS, other=-1)
            numbers = _turned(keys, row, cos, sin, key_norm, eps, tokens, KV_HEADS, WIDTH, HALF, NORM, BLOCK)
            store_rows(key_codes, key_scales, slot * KV_HEADS + row % KV_HEADS, slot >= 0, numbers, WIDTH, BLOCK)
        else:
            store_tokens(values, row, value_codes, value_scales, slots, tokens, KV_HEADS, WIDTH, BLOCK)


@triton.jit
def _turned(
    x,
    row,
    cos,
    sin,
    norm,
    eps,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The rows `row` [N] of x [tokens · HEADS, WIDTH], normed and rotated: float32 [N, BLOCK]. NORM: axes of the
    norm's weight, 0 for no norm."""
    column = tl.arange(0, BLOCK)
    there = row < tokens * HEADS
    wanted = there[:, None] & (column < WIDTH)[None, :]
    numbers = tl.load(x + row[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0).to(tl.float32)
    # Element i < HALF is turned with i + HALF, that one with i, the rest with none.
    turns = column < 2 * HALF
    other = tl.where(column < HALF, column + HALF, column - HALF)
    seen = there[:, None] & turns[None, :]
    if HALF > 0:
        partner = tl.load(x + row[:, None] * WIDTH + other[None, :], mask=seen, other=0.0).to(tl.float32)
    if NORM > 0:
        inverse = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) / WIDTH + eps)
        weights = norm + ((row % HEADS if NORM == 2 else row * 0) * WIDTH)[:, None]
        numbers = numbers * inverse[:, None] * tl.load(weights + column[None, :], mask=wanted, other=0.0)
        if HALF > 0:
            partner = partner * inverse[:, None] * tl.load(weights + other[None, :], mask=seen, other=0.0)
    if HALF > 0:
        angle = (row // HEADS * HALF)[:, None] + (column % HALF)[None, :]
        c = tl.load(cos + angle, mask=seen, other=1.0)
        s = tl.load(sin + angle, mask=seen, other=0.0)
        numbers = numbers * c + partner * tl.where((column < HALF)[None, :], -s, s)
    return numbers


def kernel_cases() -> list[Case]:
    """Heads of 128, normed and not, in two types of pages, and the 64 rotating numbers of latent attention."""
    inputs = dict.fromkeys(("queries", "keys", "values", "y"), "*fp16") | {"cos": "*fp32", "sin": "*fp32", "slots": "*i64"}
    norms = {"query_norm": "*fp32", "key_norm": "*fp32"}
    plain = inputs | {"key_codes": "*fp16", "value_codes": "*fp16"}
    blocks = inputs | {"key_codes": "*i8", "value_codes": "*i8", "key_scales": "*fp16", "value_scales": "*fp16"}
    sizes = {"HEADS": 32, "KV_HEADS": 8, "WIDTH": 128, "HALF": 64, **_rows(128)}
    bare = {"NORM": 0, "query_norm": None, "key_norm": None}
    numbers = {"tokens": "i32"}
    alone = {"x": "*fp16", "y": "*fp16", "cos": "*fp32", "sin": "*fp32"}
    rope = {"HEADS": 128, "WIDTH": 64, "HALF": 32, **_rows(64)}
    return [
        Case("rotary.h64", rotary_kernel, alone | numbers, rope, tuple(alone)),
        Case(
            "rotary.store.normed.f16",
            rotary_store_kernel,
            plain | norms | numbers | {"eps": "fp32"},
            sizes | {"NORM": 1, "key_scales": None, "value_scales": None},
            (*plain, *norms),
        ),
        Case("rotary.store.q8_0", rotary_store_kernel, blocks | numbers | {"eps": "fp32"}, sizes | bare, tuple(blocks)),
    ]

"""Attention over pages as one kernel for prefill, decode and verification, and the merge of what splits of the keys gave.

A program has BLOCK_M rows, which are (token, query head) pairs of one kv head, so that a page is read once for all heads that
share it. It goes through the keys in tiles of BLOCK_N with an online softmax in powers of two (Milakov and Gimelshein, 2018;
Dao, "FlashAttention-2", 2023). With SPLITS > 1 tile number t belongs to split t % SPLITS whatever the sequence's length: a
token's numbers do not depend on how many tokens are verified with it (Dao et al., "Flash-Decoding", 2023, for the splitting).
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.kernels.store_kv._triton_rows import load_rows
from llmctl.kernels.triton_lib.casts import narrow


@triton.jit(do_not_specialize=["window", "anchors", "table_width", "least", "most"])
def attend(
    queries,  # [T, HEADS, WIDTH + ROPE]
    out,  # [T, HEADS, WIDTH] where SPLITS is 1; float32 [T, HEADS, SPLITS, WIDTH] where it is not
    logs,  # float32 [T, HEADS, SPLITS]: log2 of the sum of weights
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    tables,  # [S, table_width] int32
    lens,  # [S] int32
    starts,  # [S + 1] int32
    sinks,  # [HEADS] float32
    scale,
    softcap,
    window,
    anchors,
    table_width,
    least,  # sequences with fewer query tokens, or more than `most`, are not served
    most,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # numbers of a value
    ROPE: tl.constexpr,  # numbers that a key has beside them: of latent pages
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ANCHORS: tl.constexpr,
    DOT_K: tl.constexpr,  # what queries and keys are multiplied in
    DOT_V: tl.constexpr,  # what weights and values are multiplied in
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    STRIDE: tl.constexpr = WIDTH + ROPE
    sequence = tl.program_id(1) // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    begin = tl.load(starts + sequence)
    count = tl.load(starts + sequence + 1) - begin
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # those with most keys start first
    if (count < least) | (count > most) | (first_row >= count * GROUP):
        return
    length = tl.load(lens + sequence)
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < count * GROUP
    position = length - count + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    row = (begin + rows // GROUP).to(tl.int64) * HEADS + head
    column = tl.arange(0, BLOCK_D)
    is_column = column < WIDTH
    q = tl.load(queries + row[:, None] * STRIDE + column[None, :], mask=is_row[:, None] & is_column[None, :], other=0.0).to(DOT_K)
    rope = tl.arange(0, BLOCK_R)
    q_rope = q
    if ROPE > 0:
        at = row[:, None] * STRIDE + WIDTH + rope[None, :]
        q_rope = tl.load(queries + at, mask=is_row[:, None] & (rope < ROPE)[None, :], other=0.0).to(DOT_K)

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, total + 1.0, total)

    first = length - count + first_row // GROUP
    last = tl.minimum(length - 1, length - count + (first_row + BLOCK_M - 1) // GROUP)
    low = 0
    if HAS_WINDOW:
        low = tl.maximum(first - window + 1, 0)
    table = tables + sequence.to(tl.int64) * table_width
    step = SPLITS * BLOCK_N
    begin_tile = low // BLOCK_N
    start = (begin_tile + (split + SPLITS - begin_tile % SPLITS) % SPLITS) * BLOCK_N
    if HAS_ANCHORS:
        end = tl.where(split == 0, tl.minimum(anchors, begin_tile * BLOCK_N), 0)
        for key in range(0, end, BLOCK_N):
            highest, total, acc = _tile(
                q, q_rope, highest, total, acc, key, end, 0, position, table, kv_head,
                key_codes, key_scales, value_codes, value_scales, scale, softcap, 0, end, True,
                KV_HEADS, WIDTH, ROPE, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, IS_LATENT,
                HAS_SOFTCAP, HAS_WINDOW, HAS_ANCHORS, DOT_K, DOT_V,
            )  # fmt: skip
    if SPLITS == 1:
        if HAS_WINDOW:
            whole = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
            for key in range(start, tl.minimum(whole, last + 1), BLOCK_N):
                highest, total, acc = _tile(
                    q, q_rope, highest, total, acc, key, last + 1, low, position, table, kv_head,
                    key_codes, key_scales, value_codes, value_scales, scale, softcap, window, anchors, True,
                    KV_HEADS, WIDTH, ROPE, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, IS_LATENT,
                HAS_SOFTCAP, HAS_WINDOW, HAS_ANCHORS, DOT_K, DOT_V,
                )  # fmt: skip
            start = tl.maximum(start, whole)
        end = (first + 1) // BLOCK_N * BLOCK_N
        for key in range(start, end, BLOCK_N):
            highest, total, acc = _tile(
                q, q_rope, highest, total, acc, key, end, 0, position, table, kv_head,
                key_codes, key_scales, value_codes, value_scales, scale, softcap, window, anchors, False,
                KV_HEADS, WIDTH, ROPE, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, IS_LATENT,
                HAS_SOFTCAP, HAS_WINDOW, HAS_ANCHORS, DOT_K, DOT_V,
            )  # fmt: skip
        start = tl.maximum(start, end)
    for key in range(start, last + 1, step):
        highest, total, acc = _tile(
            q, q_rope, highest, total, acc, key, last + 1, low, position, table, kv_head,
            key_codes, key_scales, value_codes, value_scales, scale, softcap, window, anchors, True,
            KV_HEADS, WIDTH, ROPE, BLOCK_D, BLOCK_R, BLOCK_SIZE, BLOCK_N, IS_LATENT,
            HAS_SOFTCAP, HAS_WINDOW, HAS_ANCHORS, DOT_K, DOT_V,
        )  # fmt: skip

    some = total > 0.0
    total = tl.where(some, total, 1.0)
    acc = acc / total[:, None]
    at = (row * SPLITS + split)[:, None] * WIDTH + column[None, :]
    tl.store(out + at, narrow(acc, out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
    if SPLITS > 1:
        tl.store(logs + row * SPLITS + split, tl.where(some, highest + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit
def _tile(
    q,
    q_rope,
    highest,
    total,
    acc,
    key,  # the first key
    end,  # keys from there on are not there
    low,  # keys before it are seen by no row, if they are no anchors
    position,
    table,
    kv_head,
    key_codes,
    key_scales,
    value_codes,
    value_scales,
    scale,
    softcap,
    window,
    anchors,
    IS_MASKED: tl.constexpr,  # False: every row sees every key
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_LATENT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_ANCHORS: tl.constexpr,
    DOT_K: tl.constexpr,
    DOT_V: tl.constexpr,
):
    """One more tile of keys and values: the highest score so far, the sum of the weights relative to it, the weighted sum."""
    keys = key + tl.arange(0, BLOCK_N)
    there = keys < end
    if IS_MASKED:
        if HAS_WINDOW:
            there = there & (keys >= low)
            if HAS_ANCHORS:
                there = there | ((keys < anchors) & (keys < end))
        pages = tl.load(table + keys // BLOCK_SIZE, mask=there, other=0)
    else:
        pages = tl.load(table + keys // BLOCK_SIZE)
    rows = (pages.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * KV_HEADS + kv_head
    STRIDE: tl.constexpr = WIDTH + ROPE
    k = load_rows(key_codes, key_scales, rows, there, 0, STRIDE, WIDTH, BLOCK_D, DOT_K)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if ROPE > 0:
        k_rope = load_rows(key_codes, key_scales, rows, there, WIDTH, STRIDE, ROPE, BLOCK_R, DOT_K)
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee")
    scores = to_powers(scores, scale, softcap, HAS_SOFTCAP)
    if IS_MASKED:
        seen = keys[None, :] <= position[:, None]
        if HAS_WINDOW:
            near = position[:, None] - keys[None, :] < window
            if HAS_ANCHORS:
                near = near | (keys < anchors)[None, :]
            seen = seen & near
        scores = tl.where(seen & there[None, :], scores, float("-inf"))
    top = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top) if IS_MASKED else top
    weights = tl.exp2(scores - base[:, None])
    shrunk = tl.exp2(highest - base)
    total = total * shrunk + tl.sum(weights, 1)
    v = k if IS_LATENT else load_rows(value_codes, value_scales, rows, there, 0, WIDTH, WIDTH, BLOCK_D, DOT_V)
    acc = tl.dot(weights.to(DOT_V), v, acc * shrunk[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit
def to_powers(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Products of queries and keys, scaled and capped, as exponents of 2: times log2 e."""
    if HAS_SOFTCAP:
        # tanh x = 1 − 2 / (1 + e^2x)
        power = tl.exp2(scores * (scale * 2.8853900817779268) / softcap)
        return (softcap - 2.0 * softcap / (1.0 + power)) * 1.4426950408889634
    else:
        return scores * (scale * 1.4426950408889634)


@triton.jit(do_not_specialize=["most"])
def merge(
    parts,  # float32 [T, HEADS, SPLITS, WIDTH]
    logs,  # float32 [T, HEADS, SPLITS]
    out,  # [T, HEADS, WIDTH]
    starts,
    most,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token's head: its splits' results, weighted by their sums; zeros where it saw no key."""
    begin = tl.load(starts + tl.program_id(1))
    count = tl.load(starts + tl.program_id(1) + 1) - begin
    token = tl.program_id(0) // HEADS
    if (count > most) | (token >= count):
        return
    row = (begin + token).to(tl.int64) * HEADS + tl.program_id(0) % HEADS
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLITS)
    log = tl.load(logs + row * SPLITS + split)
    top = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(top == float("-inf"), 0.0, top))
    wanted = (weight > 0.0)[:, None] & (column < WIDTH)[None, :]
    part = tl.load(parts + (row * SPLITS + split)[:, None] * WIDTH + column[None, :], mask=wanted, other=0.0)
    total = tl.sum(weight, 0)
    y = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * WIDTH + column, narrow(y, out.dtype.element_ty), mask=column < WIDTH)

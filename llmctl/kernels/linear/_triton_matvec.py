"""Packed weights times one to eight rows: decoding. A thread owns rows of the weight and reads them word by word; activations are
int8 (dot products of four integers in one instruction) or floats as they are. Splits of K are added in their order by a second
kernel, so a result has the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.kernels.triton_lib.unpack import code_number, code_word, dp4a, halves, load_words

# Tuples grow by `+`: triton compiles no starred expression.
# ruff: noqa: RUF005


@triton.jit
def _integer_dots(low, high, x, row_step, zero, M: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr,
                  INTERPRET: tl.constexpr):
    """Codes of a sub-block times those of M rows of x: two tuples of int32, columns 0 to 15 and 16 to 31."""
    first, second = (zero,) * M, (zero,) * M
    for w in tl.static_range(4):
        first = _dot_word(code_word(low, high, w, LOW, HIGH, SIGNED), x + w, row_step, first, zero, M, INTERPRET)
    for w in tl.static_range(4, 8):
        second = _dot_word(code_word(low, high, w, LOW, HIGH, SIGNED), x + w, row_step, second, zero, M, INTERPRET)
    return first, second


@triton.jit
def _dot_word(word, x, row_step, sums, zero, M: tl.constexpr, INTERPRET: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        added = added + (dp4a(word, tl.load(x + m * row_step) + zero, sums[m], INTERPRET),)
    return added


@triton.jit
def _float_dots(low, high, x, row_step, zero, M: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr):
    """The same of x as it is, float32; signed codes count 2^shift times here as well."""
    first, second = (zero,) * M, (zero,) * M
    for w in tl.static_range(4):
        for b in tl.static_range(4):
            code = code_number(low, high, w, b, LOW, HIGH, SIGNED)
            first = _add_column(code, x + 4 * w + b, row_step, first, M)
    for w in tl.static_range(4, 8):
        for b in tl.static_range(4):
            code = code_number(low, high, w, b, LOW, HIGH, SIGNED)
            second = _add_column(code, x + 4 * w + b, row_step, second, M)
    return first, second


@triton.jit
def _add_column(code, x, row_step, sums, M: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        added = added + (sums[m] + code * tl.load(x + m * row_step).to(tl.float32),)
    return added


@triton.jit
def _small_scales(word, ODD: tl.constexpr, KIND: tl.constexpr):
    """(s, s', m, m') of the two halves of a sub-block, int32, from the word that two sub-blocks share."""
    if KIND == "pairs":
        scale, offset = (word >> (8 * ODD)) & 0xFF, (word >> (16 + 8 * ODD)) & 0xFF
        return scale, scale, offset, offset
    elif KIND == "signed16":
        return (word << (24 - 16 * ODD)) >> 24, (word << (16 - 16 * ODD)) >> 24, word, word
    else:
        both = word >> (16 * ODD)
        return both & 15, (both >> 8) & 15, (both >> 4) & 15, (both >> 12) & 15


@triton.jit
def _weighted(dots, scales, x_scales, row_step, KIND: tl.constexpr, M: tl.constexpr, INT8: tl.constexpr):
    """What a sub-block adds, but for the scale that comes last: float32, one a row of x."""
    parts = ()
    for m in tl.static_range(M):
        if KIND == "pairs":
            part = (dots[0][m] + dots[1][m]) * scales[0]
        elif KIND == "signed16" or KIND == "nibbles":
            part = dots[0][m] * scales[0] + dots[1][m] * scales[1]
        else:
            part = dots[0][m] + dots[1][m]
        if INT8:
            part = part.to(tl.float32) * tl.load(x_scales + m * row_step)
        parts = parts + (part,)
    return parts


@triton.jit
def _plus(sums, parts, M: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        added = added + (sums[m] + parts[m],)
    return added


@triton.jit
def _plus_scaled(sums, parts, factor, M: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        added = added + (sums[m] + parts[m] * factor,)
    return added


@triton.jit
def _plus_offsets(sums, first, second, x_sums, row_step, M: tl.constexpr):
    """sums + first · Σx of columns 0 to 15 + second · Σx of 16 to 31."""
    added = ()
    for m in tl.static_range(M):
        here = x_sums + m * row_step
        added = added + (sums[m] + first * tl.load(here) + second * tl.load(here + 1),)
    return added


@triton.jit
def matvec_kernel(
    x,
    x_scales,
    x_sums,
    low,
    high,
    scales,
    extra,
    experts,
    bias,
    out,
    N,
    stride,
    K,
    low_step,
    high_step,
    scales_step,
    extra_step,
    x_share,
    x_between,
    M: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    INT8: tl.constexpr,
    EXPERTS: tl.constexpr,
    BATCHED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Program (n, split, g): BLOCK_N rows of matrix `experts[g]` (EXPERTS), g (BATCHED) or the only one, for a part of K, times the
    rows m · x_between + g // x_share of x. Results at row m · x_between + g of out [SPLITS, rows, N]: sums of their part in
    float32, or where there is one part y, with bias. x: words of codes (INT8) or floats. STEP: sub-blocks of a turn.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = rows < stride
    split, g = tl.program_id(1), tl.program_id(2)
    expert = 0
    if EXPERTS or BATCHED:
        expert = tl.load(experts + g).to(tl.int64) if EXPERTS else g.to(tl.int64)
        low += expert * low_step
        high += expert * high_step
        scales += expert * scales_step
        extra += expert * extra_step
    x_row = (g // x_share).to(tl.int64)
    x += x_row * (K // 4 if INT8 else K)
    x_scales += x_row * (K // 32)
    x_sums += x_row * (K // 16)
    steps = K // (32 * STEP)
    per_split = tl.cdiv(steps, SPLITS)
    zero = tl.zeros((BLOCK_N,), tl.float32)
    izero = tl.zeros((BLOCK_N,), tl.int32)
    total = (zero,) * M
    x_step, scale_step, sum_step = x_between * (K // 4 if INT8 else K), x_between * (K // 32), x_between * (K // 16)
    for step in range(split * per_split, tl.minimum(split * per_split + per_split, steps)):
        part, offset = (zero,) * M, (zero,) * M
        for c in tl.static_range(STEP):
            at = step * STEP + c
            low_words = load_words(low, at, stride, rows, mask, LOW)
            high_words = low_words
            if HIGH:
                high_words = load_words(high, at, stride, rows, mask, HIGH)
            if INT8:
                dots = _integer_dots(low_words, high_words, x + at * 8, x_step, izero, M, LOW, HIGH, SIGNED, INTERPRET)
            else:
                dots = _float_dots(low_words, high_words, x + at * 32, x_step, zero, M, LOW, HIGH, SIGNED)
            if KIND == "half" or KIND == "affine":
                word = tl.load(scales + at * stride + rows, mask=mask)
                parts = _weighted(dots, (word, word), x_scales + at, scale_step, KIND, M, INT8)
                if KIND == "half":
                    total = _plus_scaled(total, parts, word.to(tl.float32), M)
                else:
                    d, m = halves(word)
                    total = _plus_scaled(total, parts, d, M)
                    total = _plus_offsets(total, m, m, x_sums + at * 2, sum_step, M)
            elif KIND == "groups":
                part = _plus(part, _weighted(dots, (izero, izero), x_scales + at, scale_step, KIND, M, INT8), M)
                if ZEROS:
                    offset = _plus_offsets(offset, 1.0, 1.0, x_sums + at * 2, sum_step, M)
            else:
                if c % 2 == 0:
                    word = tl.load(scales + (step * (STEP // 2) + c // 2) * stride + rows, mask=mask)
                small = _small_scales(word, c % 2, KIND)
                part = _plus(part, _weighted(dots, small, x_scales + at, scale_step, KIND, M, INT8), M)
                if KIND != "signed16":
                    first, second = small[2].to(tl.float32), small[3].to(tl.float32)
                    offset = _plus_offsets(offset, first, second, x_sums + at * 2, sum_step, M)
        if KIND == "groups":
            line = (step * STEP // GROUP) * stride + rows
            factor = tl.load(scales + line, mask=mask)
            total = _plus_scaled(total, part, factor, M)
            if ZEROS:
                total = _plus_scaled(total, offset, -factor * tl.load(extra + line, mask=mask).to(tl.float32), M)
        elif KIND == "signed16":
            total = _plus_scaled(total, part, tl.load(extra + step * stride + rows, mask=mask).to(tl.float32), M)
        elif KIND == "pairs" or KIND == "nibbles":
            d, dmin = halves(tl.load(extra + step * stride + rows, mask=mask))
            total = _plus_scaled(_plus_scaled(total, part, d, M), offset, -dmin, M)
    unit: tl.constexpr = 1.0 / (1 << (8 - LOW - HIGH)) if SIGNED else 1.0
    own = rows < N
    for m in tl.static_range(M):
        result = total[m] * unit
        if HAS_BIAS:
            result += tl.load(bias + expert * N + rows, mask=own).to(tl.float32)
        row = (m * x_between + g).to(tl.int64) + split * (M * tl.num_programs(2))
        tl.store(out + row * N + rows, result.to(out.dtype.element_ty), mask=own)


@triton.jit
def add_splits_kernel(parts, experts, bias, out, N, numbers, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, EXPERTS: tl.constexpr,
                      BLOCK: tl.constexpr):
    """out [rows, N] = the sum over splits of parts [SPLITS, rows, N], in order, plus bias [N], of experts [experts[row], N]."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < numbers
    total = tl.load(parts + place, mask=mask)
    for split in range(1, SPLITS):
        total += tl.load(parts + split * numbers.to(tl.int64) + place, mask=mask)
    if HAS_BIAS:
        line = place % N
        if EXPERTS:
            line += tl.load(experts + place // N, mask=mask, other=0).to(tl.int32) * N
        total += tl.load(bias + line, mask=mask).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mask)

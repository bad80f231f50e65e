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
def _integer_dots(
    low,
    high,
    x,
    row_step,
    zero,
    M: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    IN_TWO: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Codes of a sub-block times those of M rows of x, two words of them at a time: int32. IN_TWO: a tuple for columns 0 to 15
    and one for 16 to 31; else they go on, and the second tuple is of all."""
    first = (zero,) * M
    for w in tl.static_range(0, 4, 2):
        words = code_word(low, high, w, LOW, HIGH, SIGNED), code_word(low, high, w + 1, LOW, HIGH, SIGNED)
        first = _dot_words(words, x + w // 2, row_step, first, zero, M, INTERPRET)
    second = (zero,) * M if IN_TWO else first
    for w in tl.static_range(4, 8, 2):
        words = code_word(low, high, w, LOW, HIGH, SIGNED), code_word(low, high, w + 1, LOW, HIGH, SIGNED)
        second = _dot_words(words, x + w // 2, row_step, second, zero, M, INTERPRET)
    return first, second


@triton.jit
def _dot_words(words, x, row_step, sums, zero, M: tl.constexpr, INTERPRET: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        both = tl.load(x + m * row_step)
        so_far = dp4a(words[0], both.to(tl.int32) + zero, sums[m], INTERPRET)
        added = added + (dp4a(words[1], (both >> 32).to(tl.int32) + zero, so_far, INTERPRET),)
    return added


@triton.jit
def _float_dots(
    low,
    high,
    x,
    row_step,
    zero,
    M: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    IN_TWO: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The same of x as it is, two float32 at a time; signed codes count 2^shift times here as well."""
    first = (zero,) * M
    for place in tl.static_range(0, 16, 2):
        codes = _two_codes(low, high, place, LOW, HIGH, SIGNED, INTERPRET)
        first = _add_columns(codes, x + place // 2, row_step, first, M)
    second = (zero,) * M if IN_TWO else first
    for place in tl.static_range(16, 32, 2):
        codes = _two_codes(low, high, place, LOW, HIGH, SIGNED, INTERPRET)
        second = _add_columns(codes, x + place // 2, row_step, second, M)
    return first, second


@triton.jit
def _two_codes(
    low, high, AT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr, INTERPRET: tl.constexpr
):
    first = code_number(low, high, AT // 4, AT % 4, LOW, HIGH, SIGNED, INTERPRET)
    return first, code_number(low, high, AT // 4, AT % 4 + 1, LOW, HIGH, SIGNED, INTERPRET)


@triton.jit
def _add_columns(codes, x, row_step, sums, M: tl.constexpr):
    added = ()
    for m in tl.static_range(M):
        both = tl.load(x + m * row_step)
        so_far = sums[m] + codes[0] * both.to(tl.int32).to(tl.float32, bitcast=True)
        added = added + (so_far + codes[1] * (both >> 32).to(tl.int32).to(tl.float32, bitcast=True),)
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
def _scales(word, shared, ODD: tl.constexpr, KIND: tl.constexpr):
    """(small, factor, offset, second offset): a number is factor · small · code + offset, `small` two int32 of the halves of a
    sub-block where they have their own, `offset` of both where there is one. word: of `scales`; shared: what `extra` has here."""
    if KIND == "half":
        return (word, word), word.to(tl.float32), shared, shared
    elif KIND == "affine":
        d, m = halves(word)
        return (word, word), d, m, m
    elif KIND == "groups":
        return (word, word), word, -word * shared, shared
    elif KIND == "signed16":
        small = _small_scales(word, ODD, KIND)
        return (small[0], small[1]), shared.to(tl.float32), shared, shared
    else:
        d, dmin = halves(shared)
        small = _small_scales(word, ODD, KIND)
        offset = -dmin * small[2].to(tl.float32)
        if KIND == "pairs":
            return (word, word), d * small[0].to(tl.float32), offset, offset
        else:
            return (small[0], small[1]), d, offset, -dmin * small[3].to(tl.float32)


@triton.jit
def _weigh(
    total,
    dots,
    small,
    factor,
    x_scales,
    row_step,
    M: tl.constexpr,
    IN_TWO: tl.constexpr,
    INT8: tl.constexpr,
):
    """total + what the dot products of a sub-block come to, one tensor a row of x."""
    added = ()
    for m in tl.static_range(M):
        part = dots[1][m]
        if IN_TWO:
            part = dots[0][m] * small[0] + dots[1][m] * small[1]
        if INT8:
            part = part.to(tl.float32) * tl.load(x_scales + m * row_step)
        added = added + (total[m] + part * factor,)
    return added


@triton.jit
def _add_offsets(total, first, second, x_sums, row_step, M: tl.constexpr, IN_TWO: tl.constexpr):
    """total + the offsets of a sub-block times the sums of x."""
    added = ()
    for m in tl.static_range(M):
        here = x_sums + m * row_step
        if IN_TWO:
            added = added + (total[m] + first * tl.load(here) + second * tl.load(here + 1),)
        else:
            added = added + (total[m] + first * (tl.load(here) + tl.load(here + 1)),)
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
    """Program (n, split, g): BLOCK_N rows of matrix `experts[g]` (EXPERTS), g (BATCHED) or the only one, for a part of K, times
    the rows m · x_between + g // x_share of x. Results at row m · x_between + g of out [SPLITS, rows, N]: sums of their part in
    float32, or where there is one part y, with bias. x: int64 of eight codes (INT8) or two float32. STEP: sub-blocks of a turn.
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
    # Two words, or two floats, of x at a time.
    x_row, x_columns = (g // x_share).to(tl.int64), K // 8 if INT8 else K // 2
    x += x_row * x_columns
    x_scales += x_row * (K // 32)
    x_sums += x_row * (K // 16)
    steps = K // (32 * STEP)
    per_split = tl.cdiv(steps, SPLITS)
    in_two: tl.constexpr = KIND == "signed16" or KIND == "nibbles"
    in_super: tl.constexpr = in_two or KIND == "pairs"
    total = (tl.zeros((BLOCK_N,), tl.float32),) * M
    for step in range(split * per_split, tl.minimum(split * per_split + per_split, steps)):
        shared = tl.zeros((BLOCK_N,), tl.float32)
        if in_super:
            shared = tl.load(extra + (step * STEP // 8) * stride + rows, mask=mask)
        elif KIND == "groups":
            line = (step * STEP // GROUP) * stride + rows
            word = tl.load(scales + line, mask=mask)
            if ZEROS:
                shared = tl.load(extra + line, mask=mask).to(tl.float32)
        for c in tl.static_range(STEP):
            at = step * STEP + c
            low_words = load_words(low, at, stride, rows, mask, LOW)
            high_words = low_words
            if HIGH:
                high_words = load_words(high, at, stride, rows, mask, HIGH)
            if KIND == "half" or KIND == "affine":
                word = tl.load(scales + at * stride + rows, mask=mask)
            elif in_super and c % 2 == 0:
                word = tl.load(scales + (step * (STEP // 2) + c // 2) * stride + rows, mask=mask)
            if INT8:
                dots = _integer_dots(low_words, high_words, x + at * 4, x_between * x_columns, tl.zeros((BLOCK_N,), tl.int32), M,
                                     LOW, HIGH, SIGNED, in_two, INTERPRET)  # fmt: skip
            else:
                dots = _float_dots(low_words, high_words, x + at * 16, x_between * x_columns, tl.zeros((BLOCK_N,), tl.float32), M,
                                   LOW, HIGH, SIGNED, in_two, INTERPRET)  # fmt: skip
            small, factor, offset, second = _scales(word, shared, c % 2, KIND)
            total = _weigh(total, dots, small, factor, x_scales + at, x_between * (K // 32), M, in_two, INT8)
            if KIND == "affine" or KIND == "pairs" or KIND == "nibbles" or ZEROS:
                total = _add_offsets(total, offset, second, x_sums + at * 2, x_between * (K // 16), M, in_two)
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

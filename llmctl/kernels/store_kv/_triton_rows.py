"""How a row of numbers stands in a page, for kernels: plain numbers, bytes of e4m3, or codes with a scale for every 32 of them.

Which of them a kernel has is told by the type of its pointer: int8 are codes (q8_0), uint8 are e4m3 that no instruction of the
GPU converts (before compute capability 8.9, and in the interpreter), all others convert themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmctl.kernels.triton_lib.casts import narrow

PER_SCALE = 32
_PER_SCALE: tl.constexpr = tl.constexpr(PER_SCALE)


@triton.jit
def decode_e4m3(code):
    """The float16 numbers of uint8 codes, exact: exponent and mantissa put where float16 has them are 2^8 too small."""
    wide = code.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(tl.float16)


@triton.jit
def encode_e4m3(x):
    """The uint8 codes nearest to float32 numbers, half to even; beyond ±448 those of ±448, of what is not finite NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    whole = size.to(tl.uint32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 0x3C0
    small = (size + 16384.0).to(tl.uint32, bitcast=True) & 0xF  # the last bit of 2^14 is the smallest step, 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where((bits & 0x7F800000) == 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def load_rows(
    codes, scales, rows, seen, first, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr
):
    """Of `rows` [N] the numbers first … first + WIDTH − 1, of type DOT [N, BLOCK]; 0 beside them and for rows not `seen`.

    rows: int64, numbers of rows, of STRIDE numbers each. first: a multiple of 32 where there are scales.
    """
    if codes.dtype.element_ty == tl.int8:
        block = tl.arange(0, BLOCK // _PER_SCALE)
        element = tl.arange(0, _PER_SCALE)
        wanted = seen[:, None] & (block < WIDTH // _PER_SCALE)[None, :]
        at = (rows * (STRIDE // _PER_SCALE) + first // _PER_SCALE)[:, None] + block[None, :]
        scale = tl.load(scales + at, mask=wanted, other=0.0)
        at = (rows * STRIDE + first)[:, None, None] + (block * _PER_SCALE)[None, :, None] + element[None, None, :]
        code = tl.load(codes + at, mask=wanted[:, :, None], other=0)
        return tl.reshape(code.to(DOT) * scale.to(DOT)[:, :, None], (rows.shape[0], BLOCK))
    else:
        column = tl.arange(0, BLOCK)
        wanted = seen[:, None] & (column < WIDTH)[None, :]
        at = (rows * STRIDE + first)[:, None] + column[None, :]
        if codes.dtype.element_ty == tl.uint8:
            return decode_e4m3(tl.load(codes + at, mask=wanted, other=0)).to(DOT)
        else:
            return tl.load(codes + at, mask=wanted, other=0.0).to(DOT)


@triton.jit
def store_rows(codes, scales, rows, kept, values, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write float32 values [N, BLOCK], of which STRIDE are in the page, as the rows [N] of these numbers where `kept`."""
    column = tl.arange(0, BLOCK)
    at = rows[:, None] * STRIDE + column[None, :]
    wanted = kept[:, None] & (column < STRIDE)[None, :]
    if codes.dtype.element_ty == tl.int8:
        _store_codes(codes, scales, rows, kept, tl.where((column < STRIDE)[None, :], values, 0.0), STRIDE, BLOCK)
    elif codes.dtype.element_ty == tl.uint8:
        tl.store(codes + at, encode_e4m3(values), mask=wanted)
    else:
        tl.store(codes + at, narrow(values, codes.dtype.element_ty), mask=wanted)


@triton.jit
def _store_codes(codes, scales, rows, kept, values, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """As blocks of q8_0: d = absmax / 127, codes x / d rounded half away from zero; a row with a number that is not finite is NaN
    throughout."""
    COUNT: tl.constexpr = BLOCK // _PER_SCALE
    finite = tl.min(tl.where(tl.abs(values) < float("inf"), 1, 0), 1) == 1
    blocks = tl.reshape(tl.where(finite[:, None], values, 0.0), (rows.shape[0], COUNT, _PER_SCALE))
    scale = tl.div_rn(tl.max(tl.abs(blocks), 2), 127.0)
    inverse = tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)
    steps = blocks * inverse[:, :, None]
    code = tl.where(steps < 0, -tl.floor(0.5 - steps), tl.floor(steps + 0.5))
    block = tl.arange(0, COUNT)
    wanted = kept[:, None] & (block < STRIDE // _PER_SCALE)[None, :]
    at = rows[:, None] * (STRIDE // _PER_SCALE) + block[None, :]
    tl.store(scales + at, tl.where(finite[:, None], scale, float("nan")).to(tl.float16), mask=wanted)
    at = (at * _PER_SCALE)[:, :, None] + tl.arange(0, _PER_SCALE)[None, None, :]
    tl.store(codes + at, code.to(tl.int8), mask=wanted[:, :, None])

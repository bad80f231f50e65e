"""Codes of packed weights in kernels: words of four codes for dot products of integers, and numbers one by one.

Constexpr arguments are those of `forms.Form.constants`. The layout is that of `layouts`.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl


def _interpreted_dp4a(a, b, c):
    """dp4a of the interpreter's tensors: numpy arrays. In its language it would take two dozen operations."""
    fours = [np.ascontiguousarray(words.handle.data).view(np.int8).reshape(-1, 4).astype(np.int32) for words in (a, b)]
    total = c.handle.data + (fours[0] * fours[1]).sum(axis=1, dtype=np.int32)
    return tl.tensor(type(c.handle)(total, c.handle.dtype), c.type)


_interpreted_dp4a.__triton_builtin__ = True  # so that triton lets kernels name it, in a branch that it does not compile


@triton.jit
def dp4a(a, b, c, INTERPRET: tl.constexpr):
    """c + the dot product of the four int8 in a and b, int32 tensors of one dimension."""
    if INTERPRET:
        return _interpreted_dp4a(a, b, c)
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def load_words(plane, sub_block, stride, rows, mask, COUNT: tl.constexpr):
    """The COUNT words of a sub-block of a plane, for each row."""
    words = ()
    at = plane + (sub_block * COUNT) * stride + rows
    for i in tl.static_range(COUNT):
        words = words + (tl.load(at + i * stride, mask=mask, eviction_policy="evict_first"),)  # noqa: RUF005 what triton compiles
    return words



@triton.jit
def _bits(words, W: tl.constexpr, BITS: tl.constexpr, PLACE: tl.constexpr):
    """The bits that a plane has of word W, from bit PLACE of each byte on."""
    word = words[W % BITS]
    if BITS == 8:
        return word
    mask: tl.constexpr = ((1 << BITS) - 1 << PLACE) * 0x01010101
    move: tl.constexpr = PLACE - BITS * (W // BITS)
    as_signed: tl.constexpr = mask - (1 << 32) if mask >= 1 << 31 else mask
    if move > 0:
        return (word << move) & as_signed
    elif move < 0:
        return (word >> -move) & as_signed
    else:
        return word & as_signed


@triton.jit
def code_word(low, high, W: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr):
    """Word W of a sub-block, four codes, from its planes' words. Signed codes in the upper bits of their bytes."""
    place: tl.constexpr = 8 - LOW - HIGH if SIGNED else 0
    word = _bits(low, W, LOW, place)
    if HIGH:
        word = word | _bits(high, W, HIGH, place + LOW)
    return word


@triton.jit
def code_number(
    low,
    high,
    W: tl.constexpr,
    B: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SIGNED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Byte B of what `code_word` gives as float32, exact. Its bits become the low ones of a float's mantissa: of four bits alone
    without moving them first."""
    if LOW == 4 and HIGH == 0:
        return _nibble_number(low[W % 4], 4 * (W // 4) + 8 * B, SIGNED, INTERPRET)
    flip: tl.constexpr = 0x80 if SIGNED else 0
    word = code_word(low, high, W, LOW, HIGH, SIGNED)
    # A word is shifted as if it had a sign, but 0xFF leaves no more of it than the byte.
    number = (((word >> (8 * B)) & 0xFF) ^ (0x4B000000 | flip)).to(tl.float32, bitcast=True)
    return number - (8388608.0 + flip)


@triton.jit
def _nibble_number(word, AT: tl.constexpr, SIGNED: tl.constexpr, INTERPRET: tl.constexpr):
    """The nibble from bit AT on. At bits 16 to 19 of a float of exponent 2^7 it counts 1, at 12 to 15 of one of 2^11; with an
    exponent larger by 4, 16."""
    to: tl.constexpr = 16 if AT % 8 == 0 else 12
    exponent: tl.constexpr = (0x43000000 if to == 16 else 0x45000000) + (0x02000000 if SIGNED else 0)
    base: tl.constexpr = (128.0 if to == 16 else 2048.0) * (16 if SIGNED else 1)
    flip: tl.constexpr = 8 << to if SIGNED else 0
    middle: tl.constexpr = 128.0 if SIGNED else 0.0
    moved = word << (to - AT) if to > AT else (word >> (AT - to) if to < AT else word)
    number = _masked_xor(moved, 15 << to, exponent | flip, INTERPRET).to(tl.float32, bitcast=True)
    return number - (base + middle)


@triton.jit
def _masked_xor(word, MASK: tl.constexpr, FLIP: tl.constexpr, INTERPRET: tl.constexpr):
    """(word & MASK) ^ FLIP in one instruction."""
    if INTERPRET:
        return (word & MASK) ^ FLIP
    else:
        mask, flip = tl.full(word.shape, MASK, tl.int32), tl.full(word.shape, FLIP, tl.int32)
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x6A;", "=r,r,r,r", [word, mask, flip], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def halves(word):
    """float32 of the two float16 of a word, the low one first."""
    low = (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_at(plane, sub_block, half, word, stride, rows, mask, BITS: tl.constexpr):
    """The words of a plane that hold word 4 · half + word of sub-blocks: tensors that broadcast to one shape."""
    return tl.load(plane + (sub_block * BITS + (4 * half + word) % BITS).to(tl.int64) * stride + rows, mask=mask, other=0)


@triton.jit
def _field(words, half, word, byte, BITS: tl.constexpr):
    return (words >> (BITS * ((4 * half + word) // BITS) + 8 * byte)) & ((1 << BITS) - 1)


@triton.jit
def code_at(low, high, half, word, byte, LOW: tl.constexpr, HIGH: tl.constexpr, SIGNED: tl.constexpr):
    """The code in a byte of a word, as a whole number in float32. low, high: of `words_at`; signed codes count once."""
    code = _field(low, half, word, byte, LOW)
    if HIGH:
        code = code | (_field(high, half, word, byte, HIGH) << LOW)
    if SIGNED:
        middle: tl.constexpr = 1 << (LOW + HIGH - 1)
        code = (code ^ middle) - middle
    return code.to(tl.float32)


@triton.jit
def scale_at(
    scales,
    extra,
    sub_block,
    half,
    stride,
    rows,
    mask,
    LOW: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
):
    """(factor, offset), float32: a number is factor · code + offset. half: which 16 columns of the sub-block."""
    line = sub_block
    if KIND == "groups":
        line = sub_block // GROUP
    elif KIND == "pairs" or KIND == "signed16" or KIND == "nibbles":
        line = sub_block // 2
    place = line.to(tl.int64) * stride + rows
    word = tl.load(scales + place, mask=mask, other=0)
    if KIND == "half":
        return word.to(tl.float32), tl.zeros_like(word).to(tl.float32)
    elif KIND == "affine":
        return halves(word)
    elif KIND == "groups":
        offset = tl.zeros_like(word)
        if ZEROS:
            zero = tl.load(extra + place, mask=mask, other=0).to(tl.float32)
            offset = -word * zero / (1 << (8 - LOW))
        return word, offset
    else:
        shared = tl.load(extra + (sub_block // 8).to(tl.int64) * stride + rows, mask=mask, other=0)
        return _of_super_block(word, shared, sub_block % 2, half, KIND)


@triton.jit
def _of_super_block(word, shared, odd, half, KIND: tl.constexpr):
    """The same from the words of `scales` and `extra`. odd: whether it is the second of two sub-blocks."""
    if KIND == "signed16":
        scale = (word << (24 - 16 * odd - 8 * half)) >> 24
        return shared.to(tl.float32) * scale.to(tl.float32), tl.zeros_like(word).to(tl.float32)
    else:
        d, dmin = halves(shared)
        if KIND == "pairs":
            scale, offset = (word >> (8 * odd)) & 0xFF, (word >> (16 + 8 * odd)) & 0xFF
        else:
            both = word >> (16 * odd + 8 * half)
            scale, offset = both & 15, (both >> 4) & 15
        return d * scale.to(tl.float32), -dmin * offset.to(tl.float32)

"""Types of numbers that kernels store."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, TYPE: tl.constexpr):
    """float32 numbers as those of a type; bfloat16 half to even by their bits, for the interpreter cuts them off."""
    if tl.bfloat16 == TYPE:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x != x, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(TYPE)

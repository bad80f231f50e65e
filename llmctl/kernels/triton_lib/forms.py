"""How kernels see each stored format: one table, from which loaders, kernels and tile choice read what they need.

A weight is made of 32-column *sub-blocks*. Its codes lie in planes of 1, 2, 4 or 8 bits: the word w (0 to 7) of a sub-block holds
the columns 4 w to 4 w + 3, a byte each, once the planes are put together. What turns codes into numbers is one of six kinds:

HALF        one float16 a sub-block: d · code
AFFINE      one word a sub-block, float16 d in its low half, m in its high half: d · code + m
GROUPS      one float32 a group of sub-blocks, and perhaps an int8 zero point: d · (code − zero)
PAIRS       one word two sub-blocks: bytes s, s', m, m'; one word 256 columns, d and dmin: d s · code − dmin m
SIGNED16    one word two sub-blocks: four int8 s, one for 16 columns; a float16 for 256 columns: d s · code
NIBBLES     one word two sub-blocks: four bytes, s in the low nibble, m in the high; d and dmin as in PAIRS

Signed codes are two's complement, so that integer dot products need no correction.
"""

from __future__ import annotations

from dataclasses import dataclass

HALF, AFFINE, GROUPS, PAIRS, SIGNED16, NIBBLES = "half", "affine", "groups", "pairs", "signed16", "nibbles"
SUPER_KINDS = (PAIRS, SIGNED16, NIBBLES)
"""Kinds with numbers that 256 columns share."""


@dataclass(frozen=True)
class Form:
    """low, high: bits of the two planes of a code. is_signed: codes are two's complement. kind: how they become numbers.
    group: sub-blocks that share a scale, of GROUPS; has_zeros: with zero points."""

    low: int
    high: int
    is_signed: bool
    kind: str
    group: int = 1
    has_zeros: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.low + self.high

    @property
    def shift(self) -> int:
        """Signed codes stand in the upper bits of their bytes, where the sign is: they count 2^shift times."""
        return 8 - self.bits if self.is_signed else 0

    @property
    def sub_blocks(self) -> int:
        """The least number of sub-blocks that share nothing with the next: rows are a multiple of it."""
        return 8 if self.kind in SUPER_KINDS else 1

    @property
    def has_offsets(self) -> bool:
        """Whether the sums of activations are needed."""
        return self.kind in (AFFINE, PAIRS, NIBBLES) or self.has_zeros

    def constants(self) -> dict[str, int | bool | str]:
        """The constexpr arguments that every kernel over weights takes."""
        return {
            "LOW": self.low,
            "HIGH": self.high,
            "SIGNED": self.is_signed,
            "KIND": self.kind,
            "GROUP": self.group,
            "ZEROS": self.has_zeros,
        }


FORMS = {
    "Q4_0": Form(4, 0, True, HALF),
    "Q4_1": Form(4, 0, False, AFFINE),
    "Q5_0": Form(4, 1, True, HALF),
    "Q5_1": Form(4, 1, False, AFFINE),
    "Q8_0": Form(8, 0, True, HALF),
    "Q2_K": Form(2, 0, False, NIBBLES),
    "Q3_K": Form(2, 1, True, SIGNED16),
    "Q4_K": Form(4, 0, False, PAIRS),
    "Q5_K": Form(4, 1, False, PAIRS),
    "Q6_K": Form(4, 2, True, SIGNED16),
}
"""Formats whose bits are kept. The others are converted when they are loaded."""


def integer_form(bits: int, columns_per_group: int, has_zeros: bool) -> Form:
    """The form of packed integers of 4 or 8 bits."""
    return Form(bits, 0, True, GROUPS, columns_per_group // 32, has_zeros)

"""Searches for the scale of a group: many roundings are tried, and for each the scale that fits it best.

Groups are *columns*: float32 (elements, n), one group a column, so that every step runs along n groups. What is minimized is
Σ w (x − x̂)² (or Σ w |x − x̂|). The searches are those of llama.cpp, operation by operation in float32: another order of a sum
would now and then choose another code. The formats do not prescribe them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmctl.kernels.formats.bits import refuse_huge

F = np.float32

TINY = F(1e-15)
"""Groups whose largest magnitude is below are all zero."""


def nearest(values: np.ndarray) -> np.ndarray:
    """int32, half to even: what the sum with 1.5 · 2^23 leaves in its mantissa. Beyond 2^22 and for NaN it is another number,
    but always the same one."""
    return ((values + F(12582912)).view(np.int32) & 0x7FFFFF) - 0x400000


def clamped(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """The nearest whole numbers, int32, limited to low … high."""
    return np.clip(nearest(values), low, high)


def rounded(values: np.ndarray, low: int, high: int) -> np.ndarray:
    """The same as float32, for numbers up to 2^22; NaN becomes `high`."""
    whole = (values + F(12582912)) - F(12582912)
    whole = np.where(whole < high, whole, F(high))
    return np.where(whole > low, whole, F(low))


def ordered_sum(terms: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """(elements, n) → (n,), added one element after the other (numpy's own sum may add in pairs)."""
    total = np.zeros(terms.shape[1:], F) if start is None else start
    for term in terms:
        total = total + term
    return total


def extreme(columns: np.ndarray) -> np.ndarray:
    """Of each column the first of the values with the largest magnitude."""
    first = np.abs(columns).argmax(axis=0)
    return np.take_along_axis(columns, first[None], axis=0)[0]


@dataclass
class Affine:
    """x ≈ scale · code − offset with codes 0 … top, offset ≥ 0; all (n,). The codes are those of `inverse` and `base`.

    flat: groups of equal values that are not positive; their codes are 0.
    """

    scale: np.ndarray
    offset: np.ndarray
    inverse: np.ndarray
    base: np.ndarray
    flat: np.ndarray

    def codes(self, columns: np.ndarray, top: int) -> np.ndarray:
        """int32 (elements, n)."""
        return np.where(self.flat, 0, clamped(self.inverse * (columns - self.base), 0, top))


@dataclass(frozen=True)
class Steps:
    """Inverse scales to try: (first + step · i + top) / range for i = 0 … last."""

    first: float
    step: float
    last: int


def fit_affine(columns: np.ndarray, weights: np.ndarray, top: int, steps: Steps, *, absolute: bool = False) -> Affine:
    """The best scale and offset of each column: for every rounding tried, weighted least squares.

    absolute: compare the tries by Σ w |x − x̂|.
    """
    refuse_huge(columns)
    lowest, highest = columns[0], columns[0]
    for x in columns[1:]:
        lowest, highest = np.where(x < lowest, x, lowest), np.where(x > highest, x, highest)
    sum_w = ordered_sum(weights[1:], weights[0])
    sum_x = ordered_sum(weights[1:] * columns[1:], weights[0] * columns[0])
    lowest = np.where(lowest > 0, F(0), lowest)
    inverse = F(top) / (highest - lowest)
    best = Affine(1 / inverse, lowest, inverse, lowest, highest <= lowest)
    least = _loss(columns, weights, rounded(inverse * (columns - lowest), 0, top), best.scale, lowest, absolute)
    offset = lowest
    for i in range(steps.last + 1):
        inverse = (F(steps.first) + F(steps.step) * F(i) + F(top)) / (highest - offset)
        codes = rounded(inverse * (columns - offset), 0, top)
        scale, moved, solvable = _least_squares(columns, weights, codes, sum_w, sum_x)
        loss = _loss(columns, weights, codes, scale, moved, absolute)
        better = solvable & (loss < least)
        least = np.where(better, loss, least)
        best.scale = np.where(better, scale, best.scale)
        best.inverse = np.where(better, inverse, best.inverse)
        best.base = np.where(better, offset, best.base)
        offset = np.where(better, moved, offset)
    best.scale = np.where(best.flat, F(0), best.scale)
    best.offset = -np.where(best.flat, lowest, offset)
    return best


def _least_squares(
    columns: np.ndarray, weights: np.ndarray, codes: np.ndarray, sum_w: np.ndarray, sum_x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The scale and the offset (at most 0, to be added) that fit the codes best, and where there are any."""
    weighted = weights * codes
    sum_l, sum_l2, sum_xl = ordered_sum(weighted), ordered_sum(weighted * codes), ordered_sum(weighted * columns)
    determinant = sum_w * sum_l2 - sum_l * sum_l
    scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
    offset = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
    positive = offset > 0
    return np.where(positive, sum_xl / sum_l2, scale), np.where(positive, F(0), offset), determinant > 0


def _loss(
    columns: np.ndarray, weights: np.ndarray, codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, absolute: bool
) -> np.ndarray:
    error = scale * codes + offset - columns
    return ordered_sum(weights * (np.abs(error) if absolute else error * error))


@dataclass
class Symmetric:
    """x ≈ scale · code with codes −half … half − 1, those of `inverse`; all (n,). zero: groups without values above TINY."""

    scale: np.ndarray
    inverse: np.ndarray
    zero: np.ndarray

    def codes(self, columns: np.ndarray, half: int) -> np.ndarray:
        """int32 (elements, n), counted from 0."""
        return np.where(self.zero, 0, clamped(self.inverse * columns, -half, half - 1) + half)


def fit_symmetric(columns: np.ndarray, weights: np.ndarray, half: int) -> Symmetric:
    """The best scale of each column; the value of largest magnitude goes to about −half."""
    refuse_huge(columns)
    largest = extreme(columns)

    def sums(inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        codes = rounded(inverse * columns, -half, half - 1)
        return ordered_sum(weights * columns * codes), ordered_sum(weights * codes * codes)

    best = Symmetric(largest, F(-half) / largest, np.abs(largest) < TINY)
    sum_xl, sum_l2 = sums(best.inverse)
    best.scale = np.where(sum_l2 != 0, sum_xl / sum_l2, F(0))
    most = best.scale * sum_xl
    for i in (*range(-9, 0), *range(1, 10)):
        inverse = -(F(half) + F(0.1) * F(i)) / largest
        sum_xl, sum_l2 = sums(inverse)
        better = (sum_l2 > 0) & (sum_xl * sum_xl > most * sum_l2)
        best.scale = np.where(better, sum_xl / sum_l2, best.scale)
        most = np.where(better, best.scale * sum_xl, most)
        best.inverse = np.where(better, inverse, best.inverse)
    best.scale = np.where(best.zero, F(0), best.scale)
    return best


def fit_by_turns(columns: np.ndarray, half: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales (n,) and codes from 0, int32 (elements, n), with weights x²: one code after the other is moved to where the others
    would have it, while that helps."""
    refuse_huge(columns)
    largest = extreme(columns)
    weights = columns * columns
    codes = clamped(F(-half) / largest * columns, -half, half - 1)
    scale = _take_turns(columns, weights, codes, -half, half - 1)
    zero = np.abs(largest) < TINY
    return np.where(zero, F(0), scale), np.where(zero, 0, codes + half)


def fit_positive(columns: np.ndarray, weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales (n,) and codes 0 … top, int32 (elements, n), for values that are not negative."""
    highest = np.zeros(columns.shape[1], F)
    for x in columns:
        highest = np.where(highest > x, highest, x)
    inverse = F(top) / highest

    def loss(codes: np.ndarray, inverse: np.ndarray) -> np.ndarray:
        error = columns - 1 / inverse * codes.astype(F)
        return ordered_sum(weights * error * error)

    least = loss(nearest(inverse * columns) & 255, inverse)
    for i in (*range(-4, 0), *range(1, 5)):
        tried = (F(0.1) * F(i) + F(top)) / highest
        found = loss(np.minimum(nearest(tried * columns), top), tried)
        inverse = np.where(found < least, tried, inverse)
        least = np.where(found < least, found, least)
    codes = np.minimum(nearest(inverse * columns), top)
    scale = _take_turns(columns, weights, codes, 0, top)
    zero = highest < TINY
    return np.where(zero, F(0), scale), np.where(zero, 0, np.minimum(codes, top))


def _take_turns(columns: np.ndarray, weights: np.ndarray, codes: np.ndarray, low: int, high: int) -> np.ndarray:
    """Move codes, in place, one element after the other and five times at most; the scales that fit them best.

    low: least code; 0 stands for codes kept as bytes, where a negative one (of values that should have been positive) wraps.
    """
    as_bytes = low == 0
    as_floats = codes.astype(F)
    sum_xl, sum_l2 = ordered_sum(weights * columns * as_floats), ordered_sum(weights * as_floats * as_floats)
    if as_bytes:
        codes &= 255
    for _ in range(5):
        changed = False
        for i, (x, w) in enumerate(zip(columns, weights, strict=True)):
            old = codes[i].astype(F)
            rest_xl, rest_l2 = sum_xl - w * x * old, sum_l2 - w * old * old
            code = nearest(x * rest_l2 / rest_xl)
            code = np.minimum(code, high) if as_bytes else np.clip(code, low, high)
            moved = (rest_xl > 0) & (code != codes[i])
            if as_bytes:
                moved &= rest_l2 > 0
            new = code.astype(F)
            rest_xl, rest_l2 = rest_xl + w * x * new, rest_l2 + w * new * new
            moved &= rest_xl * rest_xl * sum_l2 > sum_xl * sum_xl * rest_l2
            if not as_bytes:
                moved &= rest_l2 > 0
            codes[i] = np.where(moved, code & 255 if as_bytes else code, codes[i])
            sum_xl, sum_l2 = np.where(moved, rest_xl, sum_xl), np.where(moved, rest_l2, sum_l2)
            changed |= bool(moved.any())
        if not changed:
            break
    return np.where(sum_l2 > 0, sum_xl / sum_l2, F(0))

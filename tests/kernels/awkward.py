"""Matrices that encoders find hard, the same everywhere: they come from a hash, no generator that a release may change."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

F = np.float32
COLUMNS = 512
IMPORTANCES = ("none", "uneven", "sparse")


def uniform(count: int, seed: str) -> np.ndarray:
    """float32 in [0, 1), multiples of 2^-24."""
    words = np.frombuffer(hashlib.shake_256(seed.encode()).digest(4 * count), "<u4")
    return (words >> 8).astype(F) / F(1 << 24)


def bell(rows: int, columns: int = COLUMNS, seed: str = "bell") -> np.ndarray:
    """Sums of four uniform numbers, about as weights are distributed: float32 (rows, columns)."""
    parts = uniform(4 * rows * columns, seed).reshape(4, rows, columns)
    return (((parts[0] + parts[1]) + (parts[2] + parts[3])) - F(2)) * F(0.03)


def importance(kind: str, columns: int = COLUMNS) -> np.ndarray | None:
    """Weights of the columns by the name of their kind."""
    values = uniform(columns, kind)
    if kind == "none":
        return None
    return values**3 * F(100) if kind == "uneven" else np.where(np.arange(columns) % 5, F(0), F(1))


_ROWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "plain": lambda x: x,
    "float16": lambda x: x.astype(np.float16).astype(F),
    "zeros": lambda x: x * 0,
    "zeros of both signs": lambda x: np.where(x > 0, F(0), F(-0.0)),
    "a constant": lambda x: np.full_like(x, 0.5),
    "a negative constant": lambda x: np.full_like(x, -0.5),
    "half zeros": lambda x: np.where(np.arange(len(x)) < len(x) // 2 + 40, F(0), x),
    "zeros between": lambda x: np.where(np.arange(len(x)) % 3, x, F(0)),
    "one outlier": lambda x: np.where(np.arange(len(x)) == 77, F(9), x),
    "a negative outlier": lambda x: np.where(np.arange(len(x)) == 300, F(-9), x),
    "all positive": np.abs,
    "all negative": lambda x: -np.abs(x),
    "ties": lambda x: np.round(x * F(100)) / F(64),
    "signs": lambda x: np.sign(np.round(x * F(40))),
    "large": lambda x: x * F(1e5),
    "small": lambda x: x * F(1e-4),
    "around the smallest float16": lambda x: x * F(3e-6),
    "around the limit of zero": lambda x: x * F(3e-14),
    "below the limit of zero": lambda x: x * F(1e-17),
    "powers of two": lambda x: np.sign(x) * np.exp2(np.round(x * F(60))).astype(F),
    "just below powers of two": lambda x: np.sign(x) * (np.exp2(np.round(x * F(60))).astype(F) * (1 - F(2**-24))),
    "scales far apart": lambda x: x * np.exp2(-(np.arange(len(x)) // 16 % 13).astype(F)).astype(F),
}
AWKWARD = list(_ROWS)


def awkward() -> np.ndarray:
    """float32 (len(AWKWARD), COLUMNS), a row for each name in AWKWARD; no block's scale is subnormal in float32."""
    rows = bell(len(_ROWS), seed="awkward")
    return np.stack([np.asarray(change(row), F) for change, row in zip(_ROWS.values(), rows, strict=True)])

"""argmax, top_k and keep_allowed in plain numpy."""

from __future__ import annotations

import numpy as np


def argmax(logits: np.ndarray) -> int:
    """Id of the largest of logits [V]; −1 if one is NaN."""
    best = int(logits.argmax())  # the first NaN, where there is one
    return -1 if np.isnan(logits[best]) else best


def top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n] and values [n] of the k largest of logits [V], n ≤ k; both empty if one is NaN."""
    if k < len(logits):
        parted = np.partition(logits, len(logits) - k)[len(logits) - k :]  # NaN counts as the largest
        pool = np.flatnonzero(logits >= parted[0])
    else:
        parted, pool = logits, np.arange(len(logits))
    if np.isnan(parted).any():
        return pool[:0], logits[:0]
    ids = pool[np.argsort(-logits[pool], kind="stable")][:k]
    finite = int(np.count_nonzero(logits[ids] > -np.inf))
    ids = ids[: max(1, finite)]
    return ids, logits[ids]


def keep_allowed(logits: np.ndarray, allowed: np.ndarray) -> None:
    """Set logits [V] without a bit in allowed [⌈V / 32⌉] uint32 to −inf."""
    bits = np.unpackbits(allowed.astype("<u4").view(np.uint8), bitorder="little", count=len(logits))
    np.putmask(logits, bits == 0, np.float32(-np.inf))

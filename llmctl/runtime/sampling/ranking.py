"""The most likely tokens first, as many as are asked for: what cuts and draws are made of.

To sort a large vocabulary takes longer than to compute a small model's step, and few draws look beyond the first hundreds.
Ties are broken by the smaller id, so a result depends on nothing but the logits. A token that may not be drawn is −inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.kernels.sample import argmax, top_k

_FIRST_RANKS, _MORE_RANKS = 256, 8
"""How many tokens `ranked` sorts at first, and how many times as many when those did not do."""


def most_likely(logits: np.ndarray) -> int:
    """Id of the largest logit, the smallest id where several are equal. LlmctlError if one is not a number."""
    token_id = argmax(logits)
    if token_id < 0:
        raise _not_numbers()
    return token_id


def best(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits of the k most likely, most likely first. LlmctlError if a logit is not a number."""
    ids, kept = top_k(logits, k)
    if not len(ids):
        raise _not_numbers()
    return ids, kept


def ranked(logits: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """As `best`, of more tokens every time, those before at their head, at last of all."""
    count = _FIRST_RANKS
    while True:
        ids, kept = best(logits, count)
        yield ids, kept
        if len(ids) < count or count >= len(logits):
            return
        count *= _MORE_RANKS


def draw_from_all(logits: np.ndarray, uniform: float) -> int:
    """The token at which the cumulative distribution over all of them, most likely first, exceeds a number in [0, 1)."""
    target = uniform * float(np.exp(logits.astype(np.float64) - float(logits.max())).sum())
    for ids, kept in ranked(logits):
        rank = int(relative(kept).cumsum().searchsorted(target, side="right"))
        if rank < len(ids):
            return int(ids[rank])
    return int(ids[-1])


def relative(kept: np.ndarray) -> np.ndarray:
    """Probabilities of logits, the largest first, in units of the largest one's; in float64."""
    return np.exp(kept.astype(np.float64) - float(kept[0]))


def log_normalizer(logits: np.ndarray) -> float:
    """log Σ exp over logits [V]: what a logit exceeds its log-probability by. Summed in float64."""
    largest = logits.max()
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))


def _not_numbers() -> LlmctlError:
    return LlmctlError("the model computed logits that are not numbers: its weights are broken, or overflow in this dtype")

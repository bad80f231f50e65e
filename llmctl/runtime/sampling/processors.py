"""What shapes the logits before the draw, in this order: bias, penalties, top-k, top-p, min-p, temperature.

Bias and penalties change single logits of a copy, and there is no copy without them. From top-k on only the candidates are
looked at. A token that may not be drawn is −inf.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.kernels.sample import argmax, top_k
from llmctl.runtime.sampling.params import SamplingParams

_FIRST_RANKS, _MORE_RANKS = 256, 8
"""How many tokens `ranked` sorts at first, and how many times as many when those did not do."""


def shape(logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int]) -> np.ndarray:
    """Logits [V] with bias and penalties: a copy, or the same array where there are none."""
    if not params.logit_bias and not (params.has_penalties and token_ids):
        return logits
    return apply_penalties(apply_bias(logits.copy(), params), params, token_ids)


def apply_bias(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Add the logit bias in place; ids outside the vocabulary are ignored."""
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(logits):
            logits[token_id] += bias
    return logits


def apply_penalties(logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int]) -> np.ndarray:
    """Repetition (Keskar et al., "CTRL", 2019), presence and frequency penalties over the last tokens, in place."""
    window = params.repetition_window
    recent = token_ids if window < 0 else token_ids[len(token_ids) - min(window, len(token_ids)) :]
    if not params.has_penalties or not recent:
        return logits
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    seen, factor = logits[ids], np.float32(params.repetition_penalty)
    seen = np.where(seen > 0, seen / factor, seen * factor)
    seen -= params.presence_penalty + params.frequency_penalty * counts
    logits[ids] = seen
    return logits


def most_likely(logits: np.ndarray) -> int:
    """Id of the largest logit, the smallest id where several are equal. LlmctlError if one is not a number."""
    token_id = argmax(logits)
    if token_id < 0:
        raise _not_numbers()
    return token_id


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids left by top-k, top-p and min-p, most likely first, and their logits.

    Ties are broken by the smaller id, so the result depends on nothing but the logits. LlmctlError if one is not a number.
    """
    if params.top_k or params.keeps_all:
        ids, kept = _top_k(logits, params.top_k or len(logits))
        keep = _count_kept(kept, params, float(_relative(kept).sum()))
        return ids[:keep], kept[:keep]
    total = math.exp(log_normalizer(logits) - float(logits.max())) if params.top_p < 1.0 else 1.0
    for ids, kept in ranked(logits):
        keep = _count_kept(kept, params, total)
        if keep < len(ids):
            break
    return ids[:keep], kept[:keep]


def draw_from_all(logits: np.ndarray, uniform: float) -> int:
    """The token at which the cumulative distribution over all of them, most likely first, exceeds a number in [0, 1)."""
    target = uniform * float(np.exp(logits.astype(np.float64) - float(logits.max())).sum())
    for ids, kept in ranked(logits):
        rank = int(_relative(kept).cumsum().searchsorted(target, side="right"))
        if rank < len(ids):
            return int(ids[rank])
    return int(ids[-1])


def ranked(logits: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The most likely ids and their logits, most likely first: more of them every time, those before at their head, at last
    all. LlmctlError if a logit is not a number.

    To sort a large vocabulary takes longer than to compute a small model's step, and few draws look beyond the first hundreds.
    """
    count = _FIRST_RANKS
    while True:
        ids, kept = _top_k(logits, count)
        yield ids, kept
        if len(ids) < count or count >= len(logits):
            return
        count *= _MORE_RANKS


def _top_k(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    ids, kept = top_k(logits, k)
    if not len(ids):
        raise _not_numbers()
    return ids, kept


def _count_kept(kept: np.ndarray, params: SamplingParams, total: float) -> int:
    """How many of the largest logits, in order, top-p and min-p leave. total: what `_relative` of all there are adds up to."""
    keep = len(kept)
    if params.top_p < 1.0:
        before = _relative(kept).cumsum()[:-1]
        keep = 1 + int(np.count_nonzero(before < params.top_p * total))
    if params.min_p > 0.0:
        keep = min(keep, max(1, int(np.count_nonzero(kept >= kept[0] + math.log(params.min_p)))))
    return keep


def _relative(kept: np.ndarray) -> np.ndarray:
    """Probabilities of logits, the largest first, in units of the largest one's; in float64."""
    return np.exp(kept.astype(np.float64) - float(kept[0]))


def _not_numbers() -> LlmctlError:
    return LlmctlError("the model computed logits that are not numbers: its weights are broken, or overflow in this dtype")


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities in float64 along the only axis."""
    shifted = np.exp(logits.astype(np.float64) - float(logits.max()))
    return shifted / shifted.sum()


def log_normalizer(logits: np.ndarray) -> float:
    """log Σ exp over logits [V]: what a logit exceeds its log-probability by. Summed in float64."""
    largest = logits.max()
    return float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))

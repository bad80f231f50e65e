"""What shapes the logits before the draw, in this order: bias, penalties, top-k, top-p, min-p, temperature.

Every function takes and returns float32 logits over the whole vocabulary; a token that may not be drawn is −inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmctl.runtime.sampling.params import SamplingParams


def apply_bias(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Add the logit bias; ids outside the vocabulary are ignored."""
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(logits):
            logits[token_id] += bias
    return logits


def apply_penalties(logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int]) -> np.ndarray:
    """Repetition (Keskar et al., "CTRL", 2019), presence and frequency penalties over the last tokens."""
    window = params.repetition_window
    recent = token_ids if window < 0 else token_ids[len(token_ids) - min(window, len(token_ids)) :]
    off = params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0
    if off or not recent:
        return logits
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    seen, factor = logits[ids], np.float32(params.repetition_penalty)
    seen = np.where(seen > 0, seen / factor, seen * factor)
    seen -= params.presence_penalty + params.frequency_penalty * counts
    logits[ids] = seen
    return logits


def candidates(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Token ids left by top-k, top-p and min-p, most likely first, and their logits.

    Ties are broken by the smaller id, so the result depends on nothing but the logits.
    """
    ids = _top_k(logits, params.top_k)
    kept = logits[ids]
    if params.top_p < 1.0:
        probabilities = softmax(kept)
        before = np.cumsum(probabilities) - probabilities
        keep = max(1, int(np.count_nonzero(before < params.top_p)))
        ids, kept = ids[:keep], kept[:keep]
    if params.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(kept >= kept[0] + math.log(params.min_p))))
        ids, kept = ids[:keep], kept[:keep]
    return ids, kept


def _top_k(logits: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k largest finite logits (k = 0: all), sorted by logit, then by id."""
    if 0 < k < len(logits):
        threshold = np.partition(logits, len(logits) - k)[len(logits) - k]
        pool = np.flatnonzero(logits >= threshold)
    else:
        k, pool = len(logits), np.arange(len(logits))
    order = pool[np.lexsort((pool, -logits[pool]))][:k]
    finite = int(np.count_nonzero(logits[order] > -np.inf))
    return order[: max(1, finite)]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities in float64 along the only axis."""
    shifted = np.exp(logits.astype(np.float64) - float(logits.max()))
    return shifted / shifted.sum()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64 along the only axis."""
    shifted = logits.astype(np.float64) - float(logits.max())
    return shifted - np.log(np.exp(shifted).sum())

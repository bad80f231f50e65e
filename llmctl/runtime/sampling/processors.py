"""What shapes the logits before the draw, in this order: bias, penalties, top-k, top-p, min-p, temperature.

Bias and penalties change single logits of a copy, and there is no copy without them. From top-k on only the candidates are
looked at. A token that may not be drawn is −inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.kernels.sample import argmax, top_k
from llmctl.runtime.sampling.params import SamplingParams


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
    ids, kept = top_k(logits, params.top_k or len(logits))
    if not len(ids):
        raise _not_numbers()
    if params.top_p < 1.0:
        probabilities = softmax(kept)
        before = probabilities.cumsum() - probabilities
        keep = max(1, int(np.count_nonzero(before < params.top_p)))
        ids, kept = ids[:keep], kept[:keep]
    if params.min_p > 0.0:
        keep = max(1, int(np.count_nonzero(kept >= kept[0] + math.log(params.min_p))))
        ids, kept = ids[:keep], kept[:keep]
    return ids, kept


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

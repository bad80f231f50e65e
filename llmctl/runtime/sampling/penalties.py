"""What makes tokens likelier or less likely before any is dropped: bias, penalties, DRY. All change logits [V] in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from llmctl.runtime.sampling.params import SamplingParams

_LARGEST_PENALTY = 1e9  # far beyond any logit, far below what overflows float32


def apply_bias(logits: np.ndarray, params: SamplingParams) -> None:
    """Add the logit bias; ids outside the vocabulary are ignored."""
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(logits):
            logits[token_id] += bias


def apply_penalties(logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int]) -> None:
    """Repetition (Keskar et al., "CTRL", 2019), presence and frequency penalties over the last tokens."""
    recent = _last(token_ids, params.repetition_window)
    if not len(recent):
        return
    ids, counts = np.unique(np.asarray(recent, dtype=np.int64), return_counts=True)
    seen, factor = logits[ids], np.float32(params.repetition_penalty)
    seen = np.where(seen > 0, seen / factor, seen * factor)
    seen -= params.presence_penalty + params.frequency_penalty * counts
    logits[ids] = seen


def apply_dry(logits: np.ndarray, params: SamplingParams, token_ids: Sequence[int]) -> None:
    """DRY ("don't repeat yourself", github.com/oobabooga/text-generation-webui pull 5677): a token that would go on with a
    repetition of the last tokens is penalized by multiplier · base^(length − allowed length), where length ≥ allowed length is
    that of the longest stretch before it that the end of the text repeats.

    Tokens of `dry_breakers` end such a stretch and are never penalized themselves.
    """
    recent = np.asarray(_last(token_ids, params.dry_window), dtype=np.int64)
    if len(recent) < 2 or int(recent[-1]) in params.dry_breakers:
        return
    ends = np.flatnonzero(recent[:-1] == recent[-1])
    lengths = _repeated(recent, ends, params)
    ends, lengths = ends[lengths >= params.dry_allowed_length], lengths[lengths >= params.dry_allowed_length]
    longest: dict[int, int] = {}
    for token_id, length in zip(recent[ends + 1].tolist(), lengths.tolist(), strict=True):
        longest[token_id] = max(length, longest.get(token_id, 0))
    for token_id, length in longest.items():
        if token_id not in params.dry_breakers:
            logits[token_id] -= params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)


def _repeated(recent: np.ndarray, ends: np.ndarray, params: SamplingParams) -> np.ndarray:
    """How many tokens up to each of `ends` equal the last ones; every end is known to match in one."""
    lengths, matching = np.ones(len(ends), np.int64), np.arange(len(ends))
    for length in range(1, _longest_length(params)):
        matching = matching[ends[matching] >= length]
        if not len(matching) or int(recent[-1 - length]) in params.dry_breakers:
            break
        matching = matching[recent[ends[matching] - length] == recent[-1 - length]]
        lengths[matching] += 1
    return lengths


def _longest_length(params: SamplingParams) -> int:
    """Length beyond which the penalty does not grow: no logit survives it in any case."""
    if params.dry_base == 1.0:
        return params.dry_allowed_length
    growth = math.log(_LARGEST_PENALTY / params.dry_multiplier) / math.log(params.dry_base)
    return params.dry_allowed_length + max(0, int(growth))


def _last(token_ids: Sequence[int], window: int) -> Sequence[int]:
    return token_ids if window < 0 else token_ids[max(0, len(token_ids) - window) :]

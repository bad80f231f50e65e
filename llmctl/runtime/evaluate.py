"""How well a model predicts a text, and how far its predictions are from another model's.

Perplexity as llama-perplexity defines it: the text is cut into chunks of as many tokens as the context has, each begins with
BOS where the model wants one, and only the second half of a chunk counts, so that every token counted has a context.
The Kullback-Leibler divergence is that of the model from the other one, KL(other ‖ model), in nats at every such place.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np

from llmctl.errors import LlmctlError, UsageError
from llmctl.kernels.sample import argmax
from llmctl.runtime.cache.memory import PREFILL_CHUNK
from llmctl.runtime.engine.model_runner import LogitsReader
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.tokenizer import Tokenizer

SHORTEST_CHUNK = 4
_POSITION_RANGES = 8
_LOGITS_BYTES = 64 << 20  # at once, of one model
_LARGEST_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True)
class Estimate:
    """A mean over the places counted and its standard error."""

    value: float
    error: float

    @classmethod
    def mean(cls, values: np.ndarray) -> Estimate:
        """Of values [n]; the error is 0 for a single one."""
        error = float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        return cls(float(values.mean()), error)

    def exp(self) -> Estimate:
        """Its exponential; the error to first order."""
        if self.value >= _LARGEST_EXPONENT:
            return Estimate(math.inf, math.inf)
        return Estimate(math.exp(self.value), math.exp(self.value) * self.error)


@dataclass(frozen=True)
class Comparison:
    """A model beside another one, place by place.

    perplexity: the other's. perplexity_ratio: the model's by the other's. kl_*: nats. same_top: share of the places where
    both find the same token most likely.
    """

    perplexity: Estimate
    perplexity_ratio: Estimate
    kl: Estimate
    kl_median: float
    kl_99: float
    kl_max: float
    same_top: Estimate


@dataclass(frozen=True)
class PositionRange:
    """Means over the places first … last of all chunks: −log p of the text's token, and KL where two models are compared."""

    first: int
    last: int
    nll: float
    kl: float | None


@dataclass(frozen=True)
class Evaluation:
    """num_chunks of context_length tokens each, num_scored places counted in all. positions: how it goes along a chunk."""

    num_chunks: int
    context_length: int
    num_scored: int
    perplexity: Estimate
    comparison: Comparison | None
    positions: list[PositionRange]


@dataclass(frozen=True)
class Score:
    """One place: −log p of the text's token under the model and under the other, KL, 1.0 where the tops agree."""

    nll: float
    other_nll: float = 0.0
    kl: float = 0.0
    same_top: float = 1.0


def cut(tokenizer: Tokenizer, text: str, context_length: int, limit: int | None = None) -> list[list[int]]:
    """The text's chunks of `context_length` ids, at most `limit`; what is left over at the end is not used.

    UsageError if the text is too short for one.
    """
    if context_length < SHORTEST_CHUNK:
        raise UsageError(f"a chunk must have at least {SHORTEST_CHUNK} tokens, found {context_length}")
    ids = tokenizer.encode(text)
    count = len(ids) // context_length
    if count == 0:
        raise UsageError(f"the text has {len(ids)} tokens, a chunk {context_length}: take a longer text or a smaller context")
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    starts = range(0, context_length * min(count, limit or count), context_length)
    return [[*begin, *ids[start + len(begin) : start + context_length]] for start in starts]


def evaluate(
    model: LoadedModel,
    chunks: list[list[int]],
    other: LoadedModel | None = None,
    progress: Callable[[int], None] | None = None,
) -> Evaluation:
    """Score the chunks of `cut`. progress: called with the number of finished chunks.

    LlmctlError if a model computes something that is not a number, UsageError if the two have not the same number of tokens.
    """
    if other is not None and other.num_tokens != model.num_tokens:
        raise UsageError(f"the models have {model.num_tokens} and {other.num_tokens} tokens: they cannot be compared")
    length = len(chunks[0])
    readers = [LogitsReader(each, length, PREFILL_CHUNK) for each in (model, other) if each is not None]
    scores = []
    for number, chunk in enumerate(chunks):
        scores += [score_place(rows, target) for rows, target in _places(readers, chunk)]
        if progress:
            progress(number + 1)
    return _summary(len(chunks), length, scores, other is not None)


def _places(readers: list[LogitsReader], chunk: list[int]) -> Iterator[tuple[tuple[np.ndarray, ...], int]]:
    """Every place of a chunk's second half: each model's logits [num_tokens], and the id that follows. The chunk's last token
    only follows."""
    first = len(chunk) // 2
    step = max(1, _LOGITS_BYTES // (4 * readers[0].num_tokens))
    num_tokens = readers[0].num_tokens
    pieces = zip(*(reader.rows(chunk[:-1], first, step) for reader in readers), strict=True)
    rows = itertools.chain.from_iterable(zip(*(part[:, :num_tokens] for part in piece), strict=True) for piece in pieces)
    return zip(rows, chunk[first + 1 :], strict=True)


def score_place(rows: tuple[np.ndarray, ...], target: int) -> Score:
    """Score one place by the logits [V] of a model and, where there is one, of another after it.

    Errors: LlmctlError if they are not numbers.
    """
    model, other = rows[0], rows[-1]
    normalizer = _softmax_parts(model)[1]
    if len(rows) == 1:
        return Score(normalizer - float(model[target]))
    weights, other_normalizer = _softmax_parts(other)
    # Σ p (log p − log q), with the logits' difference taken first: equal models are exactly 0 apart, others right to 1e-6.
    weighted = (weights * (other - model)).sum(dtype=np.float64) / weights.sum(dtype=np.float64)
    return Score(
        nll=normalizer - float(model[target]),
        other_nll=other_normalizer - float(other[target]),
        kl=float(weighted) - (other_normalizer - normalizer),
        same_top=float(argmax(model) == argmax(other)),
    )


def _softmax_parts(logits: np.ndarray) -> tuple[np.ndarray, float]:
    """(exp(logits − their maximum) [V], log Σ exp(logits))."""
    largest = logits.max()
    if not np.isfinite(largest):
        raise LlmctlError("the model computed logits that are not numbers: its weights are broken, or overflow in this dtype")
    weights = np.exp(logits - largest)
    return weights, float(largest) + math.log(weights.sum(dtype=np.float64))


def _summary(num_chunks: int, context_length: int, scores: list[Score], compared: bool) -> Evaluation:
    nll, other_nll, kl, same_top = np.array([astuple(score) for score in scores]).T
    perplexity = Estimate.mean(nll).exp()
    comparison = _comparison(nll, other_nll, kl, same_top) if compared else None
    positions = _positions(nll.reshape(num_chunks, -1), kl.reshape(num_chunks, -1), context_length // 2, compared)
    return Evaluation(num_chunks, context_length, len(scores), perplexity, comparison, positions)


def _positions(nll: np.ndarray, kl: np.ndarray, begin: int, compared: bool) -> list[PositionRange]:
    """nll, kl [chunks, places], the first place at position `begin`: means over ranges of about equal length."""
    ranges = [part for part in np.array_split(np.arange(nll.shape[1]), _POSITION_RANGES) if len(part)]
    return [
        PositionRange(
            begin + int(part[0]),
            begin + int(part[-1]),
            float(nll[:, part].mean()),
            float(kl[:, part].mean()) if compared else None,
        )
        for part in ranges
    ]


def _comparison(nll: np.ndarray, other_nll: np.ndarray, kl: np.ndarray, same_top: np.ndarray) -> Comparison:
    return Comparison(
        perplexity=Estimate.mean(other_nll).exp(),
        perplexity_ratio=Estimate.mean(nll - other_nll).exp(),
        kl=Estimate.mean(kl),
        kl_median=float(np.median(kl)),
        kl_99=float(np.quantile(kl, 0.99)),
        kl_max=float(kl.max()),
        same_top=Estimate.mean(same_top),
    )

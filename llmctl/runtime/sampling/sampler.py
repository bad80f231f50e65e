"""Sampler: one sequence's draw of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmctl.kernels.sample import top_k
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.processors import candidates, draw_from_all, log_normalizer, most_likely, shape, softmax


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. logprob and top_logprobs (id → logprob) are of the model's own distribution, before any shaping;
    None and empty unless SamplingParams.num_logprobs asks for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)


class Sampler:
    """Draws tokens for one sequence. Its generator is its own, so a draw depends on the seed and the sequence alone:
    not on threads, and not on what else shares the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if params.seed is None else params.seed
        self._generator = np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, logits: np.ndarray, token_ids: Sequence[int]) -> SampledToken:
        """Choose from logits [vocab_size] float32, given the tokens so far (prompt and completion).

        LlmctlError if the model computed something that is not a number.
        """
        shaped = shape(logits, self.params, token_ids)
        token_id = most_likely(shaped) if self.params.is_greedy else self._draw(shaped)
        if self.params.num_logprobs is None:
            return SampledToken(token_id)
        normalizer = log_normalizer(logits)
        ids, best = top_k(logits, max(self.params.num_logprobs, 1))
        alternatives = list(zip(ids.tolist(), (best.astype(np.float64) - normalizer).tolist(), strict=True))
        return SampledToken(token_id, float(logits[token_id]) - normalizer, dict(alternatives[: self.params.num_logprobs]))

    def _draw(self, logits: np.ndarray) -> int:
        """Inverse of the cumulative distribution over the candidates, at one uniform number."""
        temperature, uniform = np.float32(self.params.temperature), self._generator.random()
        if self.params.keeps_all:
            return draw_from_all(logits / temperature, uniform)
        ids, kept = candidates(logits, self.params)
        cumulative = softmax(kept / temperature).cumsum()
        chosen = cumulative.searchsorted(uniform * cumulative[-1], side="right")
        return int(ids[min(int(chosen), len(ids) - 1)])

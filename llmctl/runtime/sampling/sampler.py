"""Sampler: one sequence's draw of the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.processors import apply_bias, apply_penalties, candidates, log_softmax, softmax


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
        if np.isnan(logits).any():
            raise LlmctlError("the model computed logits that are not numbers: its weights are broken, or overflow in this dtype")
        shaped = apply_penalties(apply_bias(logits.copy(), self.params), self.params, token_ids)
        token_id = int(shaped.argmax()) if self.params.is_greedy else self._draw(shaped)
        if self.params.num_logprobs is None:
            return SampledToken(token_id)
        logprobs = log_softmax(logits)
        best = np.lexsort((np.arange(len(logprobs)), -logprobs))[: self.params.num_logprobs]
        return SampledToken(token_id, float(logprobs[token_id]), {int(i): float(logprobs[i]) for i in best})

    def _draw(self, logits: np.ndarray) -> int:
        """Inverse of the cumulative distribution over the candidates, at one uniform number."""
        ids, kept = candidates(logits, self.params)
        cumulative = np.cumsum(softmax(kept / np.float32(self.params.temperature)))
        chosen = np.searchsorted(cumulative, self._generator.random() * cumulative[-1], side="right")
        return int(ids[min(int(chosen), len(ids) - 1)])

"""Sampler: one sequence's draw of the next token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from llmctl.errors import LlmctlError
from llmctl.kernels.sample import top_k
from llmctl.runtime.sampling import steps
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.penalties import apply_bias
from llmctl.runtime.sampling.ranking import draw_from_all, log_normalizer, most_likely, relative
from llmctl.runtime.sampling.rejection import Proposal, choose
from llmctl.runtime.sampling.steps import Pool


@dataclass(frozen=True)
class SampledToken:
    """A chosen token. logprob and top_logprobs (id → logprob) are of the model's own distribution, before any shaping;
    None and empty unless SamplingParams.num_logprobs asks for them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)


def fresh_seed() -> int:
    """A seed that nobody chose."""
    return int(np.random.SeedSequence().generate_state(1)[0])


class Sampler:
    """Draws tokens for one sequence. Its generator is its own, so a draw depends on the seed and the sequence alone:
    not on threads, and not on what else shares the batch.

    seed: given again it brings the same answer; None once the odds of a draft have decided, which no seed repeats.
    constraint_s: seconds that went to the constraints so far.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.seed: int | None = fresh_seed() if params.seed is None else params.seed
        self._generator = np.random.Generator(np.random.PCG64(self.seed))
        self._is_greedy = params.is_greedy
        self._steps = params.penalty_steps if params.is_greedy else steps.fused(params.steps)
        self._constraints = [make() for make in params.constraints]
        self.constraint_s = 0.0
        self._surprise_limit = 2.0 * (params.mirostat_tau or 0.0)  # where mirostat begins

    def sample(self, logits: np.ndarray, token_ids: Sequence[int], proposal: Proposal | None = None) -> SampledToken:
        """Choose from logits [vocab_size] float32, given the tokens so far (prompt and completion).

        proposal: what a draft says comes next; where it has odds it is taken or replaced so that those here are the same as
        without it, else it changes nothing.
        LlmctlError if the model computed something that is not a number, or nothing is left that may be drawn.
        """
        token_id = self._choose(self._allowed(logits), token_ids, proposal)
        self._accept(token_id)
        if self.params.num_logprobs is None:
            return SampledToken(token_id)
        normalizer = log_normalizer(logits)
        ids, best = top_k(logits, max(self.params.num_logprobs, 1))
        alternatives = list(zip(ids.tolist(), (best.astype(np.float64) - normalizer).tolist(), strict=True))
        return SampledToken(token_id, float(logits[token_id]) - normalizer, dict(alternatives[: self.params.num_logprobs]))

    @property
    def is_complete(self) -> bool:
        """Whether every constraint lets the answer end here."""
        return all(constraint.is_complete for constraint in self._constraints)

    def _allowed(self, logits: np.ndarray) -> np.ndarray:
        """The logits with bias and constraints: a copy, or the same array where there are none."""
        if not self.params.logit_bias and not self._constraints:
            return logits
        logits = logits.copy()
        apply_bias(logits, self.params)
        if not self._constraints:
            return logits
        begin = time.perf_counter()
        for constraint in self._constraints:
            constraint.forbid(logits)
        if logits[most_likely(logits)] == -np.inf:
            raise LlmctlError("no token may follow: what the answer must be and what it must not say exclude each other")
        self.constraint_s += time.perf_counter() - begin
        return logits

    def _accept(self, token_id: int) -> None:
        if self._constraints:
            begin = time.perf_counter()
            for constraint in self._constraints:
                constraint.accept(token_id)
            self.constraint_s += time.perf_counter() - begin

    def follow(self, other: Sampler) -> None:
        """Draw by the same numbers as another one from here on."""
        self._generator.bit_generator.state = other._generator.bit_generator.state
        self._surprise_limit = other._surprise_limit

    def propose(self, logits: np.ndarray, token_ids: Sequence[int], *, with_odds: bool) -> Proposal:
        """Draft a token from a draft model's logits: what this would choose, and the odds it was chosen by where it draws and
        they are wanted."""
        pool = self.candidates(self._allowed(logits), token_ids)
        if self._is_greedy or not with_odds:
            token_id = most_likely(pool.logits) if self._is_greedy else self._draw(pool, None)
            place = token_id if pool.ids is None else int(np.flatnonzero(pool.ids == token_id)[0])
            return Proposal(token_id, confidence=math.exp(float(pool.logits[place]) - log_normalizer(pool.logits)))
        ids, weights = _odds(pool)
        return Proposal(int(ids[self._place(weights)]), ids, weights / weights.sum())

    def _choose(self, logits: np.ndarray, token_ids: Sequence[int], proposal: Proposal | None) -> int:
        pool = self.candidates(logits, token_ids)
        odds = None if proposal is None or proposal.ids is None else proposal
        return most_likely(pool.logits) if self._is_greedy else self._draw(pool, odds)

    def candidates(self, logits: np.ndarray, token_ids: Sequence[int]) -> Pool:
        """What the steps leave to be drawn of logits that have bias and constraints; those before any cut if it is greedy."""
        pool = Pool(None, logits)
        for name in self._steps:
            if name == "xtc":
                strikes = self._generator.random() < self.params.xtc_probability
                pool = steps.xtc(pool, self.params.xtc_threshold) if strikes else pool
            elif name == "mirostat":
                pool = steps.mirostat(pool, self._surprise_limit)
            else:
                pool = steps.take(name, pool, self.params, token_ids, len(logits))
        return pool

    def _draw(self, pool: Pool, proposal: Proposal | None) -> int:
        """One of the candidates."""
        if pool.ids is None and proposal is None:
            return draw_from_all(pool.logits, self._generator.random())
        ids, weights = _odds(pool)
        if proposal is None:
            chosen = self._place(weights)
        else:
            chosen, self.seed = choose(ids, weights, proposal, self._generator), None
        if self.params.mirostat_tau is not None:
            surprise = -math.log2(weights[chosen] / weights.sum())
            self._surprise_limit -= self.params.mirostat_eta * (surprise - self.params.mirostat_tau)
        return int(ids[chosen])

    def _place(self, weights: np.ndarray) -> int:
        """Inverse of the cumulative distribution at one uniform number."""
        cumulative = weights.cumsum()
        return min(int(cumulative.searchsorted(self._generator.random() * cumulative[-1], side="right")), len(weights) - 1)


def _odds(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights, float64, in proportion to their probabilities."""
    if pool.ids is not None:
        return pool.ids, relative(pool.logits)
    return np.arange(len(pool.logits)), np.exp(pool.logits.astype(np.float64) - float(pool.logits.max()))

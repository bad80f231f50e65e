"""A smaller model that drafts: its own weights, its own cache, the same token ids.

A greedy sequence and one with a seed get proposals without odds: what the draft would choose by the target's own random numbers.
The answer is that of plain decoding then, whatever was drafted and however much there was room for. Without a seed nobody can
tell, so there proposals come with their odds, of which rejection sampling accepts more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.cache.memory import PREFILL_CHUNK, Demand, plan_cache
from llmctl.runtime.cache.policy import FULL
from llmctl.runtime.engine.drafter import Wish
from llmctl.runtime.engine.model_runner import ModelRunner
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.rejection import Proposal
from llmctl.runtime.sampling.sampler import Sampler

_LATE = 8
"""Tokens a draft may be behind without that being counted as a prompt of its own."""


@dataclass(eq=False)
class _Shadow:
    """The draft's own picture of a sequence. agreed: leading tokens known to be the target's."""

    sequence: Sequence
    agreed: int = 0


class ModelDrafter:
    """Runs a draft model beside the target.

    num_tokens: ids the target may draw; the draft's others are never proposed. max_num_seqs, longest: sequences at once and
    tokens drafted for each at most. cost: see `Drafter`. A sequence that is longer than the draft's context gets no proposals.
    """

    def __init__(self, model: LoadedModel, *, num_tokens: int, cost: float, longest: int, max_num_seqs: int = 1) -> None:
        model = replace(model, kv_policy=FULL)  # what is dropped from the target's cache may still be good for a guess
        self.name, self.cost, self._model = str(model.checkpoint.path.name), cost, model
        demand = Demand(model.context_length, max_num_seqs, PREFILL_CHUNK, longest + 1)
        plan = plan_cache(model.config.kv_layers(), model.kv_type, demand, most_bytes=model.max_cache_bytes)
        self._blocks, self._runner = BlockManager(plan, reuse_tokens=None), ModelRunner(model, plan)
        self._num_tokens, self._capacity = min(num_tokens, model.num_tokens), plan.capacity
        self._shadows: dict[Sequence, _Shadow] = {}
        self.prefill_s = 0.0

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """As `Drafter.propose`: one step of the draft for every further token, all sequences in it."""
        drafts: list[list[Proposal]] = [[] for _ in wishes]
        shadows = [self._follow(wish.sequence) for wish in wishes]
        counts = [min(wish.count, self._capacity - len(s.token_ids)) for s, wish in zip(shadows, wishes, strict=True)]
        chances = [1.0] * len(wishes)
        while active := [i for i, n in enumerate(counts) if len(drafts[i]) < n and chances[i] >= wishes[i].worth]:
            for i, proposal in zip(active, self._next([shadows[i] for i in active]), strict=True):
                if proposal is None:
                    counts[i] = 0
                    continue
                drafts[i].append(proposal)
                shadows[i].token_ids.append(proposal.token_id)
                chances[i] *= chance(proposal.confidence) if proposal.ids is None else 1.0
        return drafts

    def _follow(self, sequence: Sequence) -> Sequence:
        """The draft's picture of a sequence, brought to the target's text: what was drafted in vain is taken back."""
        shadow = self._shadows.get(sequence) or self._begin(sequence)
        own, ids = shadow.sequence, sequence.token_ids
        most = min(own.num_computed, len(ids) - 1)
        agreed = min(shadow.agreed, most)
        while agreed < most and own.token_ids[agreed] == ids[agreed]:
            agreed += 1
        assert own.pages is not None
        if agreed < own.num_computed:
            own.num_computed = self._blocks.rewind(own.pages, agreed)
        own.token_ids[agreed:] = ids[agreed:]
        if not _with_odds(sequence):
            own.sampler.follow(sequence.sampler)
        shadow.agreed = len(ids)
        return own

    def _begin(self, sequence: Sequence) -> _Shadow:
        # Without a seed it draws one of its own: numbers that odds are drawn by may not be those they are judged by.
        sampler = Sampler(replace(sequence.params, constraints=()))
        own = Sequence(sequence.prompt_token_ids, sequence.params, sampler)
        own.pages = self._blocks.new_pages()
        shadow = self._shadows[sequence] = _Shadow(own)
        return shadow

    def _next(self, shadows: list[Sequence]) -> list[Proposal | None]:
        """A proposal for the end of each text; None where there are no pages for it."""
        chunks = []
        for shadow in shadows:
            self._catch_up(shadow)
            if shadow.num_uncomputed <= _LATE and self._grow(shadow, shadow.num_uncomputed):
                chunks.append(ScheduledChunk(shadow, shadow.num_uncomputed))
        if not chunks:
            return [None] * len(shadows)
        logits = self._runner.run(chunks)
        rows = {chunk.sequence: row for chunk, row in zip(chunks, logits, strict=True)}
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
        return [
            shadow.sampler.propose(rows[shadow][: self._num_tokens], shadow.token_ids, with_odds=_with_odds(shadow))
            if shadow in rows
            else None
            for shadow in shadows
        ]

    def _catch_up(self, shadow: Sequence) -> None:
        """Compute all but the last token where there are many."""
        if shadow.num_uncomputed <= _LATE:
            return
        begin = time.perf_counter()
        while shadow.num_uncomputed > 1:
            count = min(PREFILL_CHUNK, shadow.num_uncomputed - 1)
            if not self._grow(shadow, count):
                break
            self._runner.run([ScheduledChunk(shadow, count)])
            shadow.num_computed += count
        self.prefill_s += time.perf_counter() - begin

    def _grow(self, shadow: Sequence, count: int) -> bool:
        assert shadow.pages is not None
        step = shadow.pages, shadow.num_computed, shadow.num_computed + count
        if not self._blocks.can_grow(*step):
            return False
        self._blocks.grow(*step)
        return True

    def forget(self, sequence: Sequence) -> None:
        """As `Drafter.forget`."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is not None and shadow.sequence.pages is not None:
            self._blocks.release(shadow.sequence.pages)

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""
        self._model.ops.interrupt()


def _with_odds(sequence: Sequence) -> bool:
    """Whether proposals for it carry their odds."""
    return sequence.params.seed is None and not sequence.params.is_greedy

"""Scheduler: whose tokens run in the next step.

Sequences that only need one token (decode) come first; what is left of the step's budget goes to prompts, in chunks, in
order of arrival. A sequence begins with what the cache still has of its text. When pages run out the youngest running sequence
gives its pages back and is computed again later.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.engine.sequence import Sequence


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens num_computed … num_computed + num_tokens − 1 of a sequence, the last `num_drafted` of them of its draft."""

    sequence: Sequence
    num_tokens: int
    num_drafted: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The chunk's tokens."""
        own = self.sequence.token_ids[self.begin : self.end]
        return own + [proposal.token_id for proposal in self.sequence.draft[: self.num_drafted]]

    @property
    def begin(self) -> int:
        """The first token's position."""
        return self.sequence.num_computed

    @property
    def end(self) -> int:
        """The position after the last token's."""
        return self.sequence.num_computed + self.num_tokens

    @property
    def is_last(self) -> bool:
        """True when the chunk reaches the end of the sequence, so a token can be sampled after it."""
        return self.num_tokens - self.num_drafted == self.sequence.num_uncomputed


class Scheduler:
    """Waiting and running sequences over one pool of pages."""

    def __init__(self, blocks: BlockManager, max_num_seqs: int, prefill_chunk: int) -> None:
        self.blocks = blocks
        self.max_num_seqs, self.prefill_chunk = max_num_seqs, prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """True while any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.append(sequence)

    def join(self, sequence: Sequence) -> bool:
        """Run a sequence that has its pages already beside the others; False if there are as many as can be."""
        if len(self.running) >= self.max_num_seqs:
            return False
        self.running.append(sequence)
        return True

    def schedule(self, max_tokens: int | None = None) -> list[ScheduledChunk]:
        """The next step's chunks, with pages for them taken: at most prefill_chunk tokens, and at most max_tokens if given.
        Never empty while there is work."""
        self._admit()
        chunks: list[ScheduledChunk] = []
        budget = self.prefill_chunk if max_tokens is None else min(max_tokens, self.prefill_chunk)
        # One-token sequences first; sorting is stable, so arrival order decides the rest.
        for sequence in sorted(self.running, key=lambda s: s.num_uncomputed > 1):
            if sequence not in self.running or budget == 0:  # preempted by an earlier one, or no room
                continue
            num_tokens = sequence.most_in_step(budget)
            if self._reserve(sequence, sequence.num_computed + num_tokens, chunks):
                num_drafted = self._add_draft(sequence, num_tokens, budget - num_tokens)
                chunks.append(ScheduledChunk(sequence, num_tokens + num_drafted, num_drafted))
                budget -= chunks[-1].num_tokens
        return chunks

    def _admit(self) -> None:
        """Start waiting sequences while their prompts fit beside the running ones."""
        while self.waiting and len(self.running) < self.max_num_seqs:
            if not self._begin(self.waiting[0]):
                return
            self.running.append(self.waiting.popleft())

    def _begin(self, sequence: Sequence) -> bool:
        """Give a sequence what the cache has of its text; False if there is no room for the rest beside those that run."""
        pages = sequence.pages = self.blocks.new_pages()
        found = self.blocks.find_prefix(pages, sequence.reusable)
        found += self.blocks.find_rest(pages, sequence.reusable)
        if self.running and not self.blocks.can_admit(pages, len(sequence.token_ids) + 1):
            self.blocks.release(pages)
            return False
        if not sequence.was_begun:
            sequence.was_begun, sequence.num_cached_tokens = True, found
            self.blocks.count_lookup(sequence.num_prompt_tokens, found)
        sequence.num_computed = found
        return True

    def _reserve(self, sequence: Sequence, num_tokens: int, chunks: list[ScheduledChunk]) -> bool:
        """Take pages for a sequence, preempting the youngest others; False if it had to give way itself."""
        taken = {chunk.sequence for chunk in chunks}
        while not self.blocks.can_grow(sequence.pages, sequence.num_computed, num_tokens):
            victim = next(s for s in reversed(self.running) if s not in taken)
            self._preempt(victim)
            if victim is sequence:
                return False
        self.blocks.grow(sequence.pages, sequence.num_computed, num_tokens)
        return True

    def make_room_to_compress(self, sequence: Sequence) -> None:
        """Free the pages that are needed to compress a sequence, preempting the youngest others."""
        assert sequence.pages is not None
        assert sequence.compression is not None
        while not self.blocks.can_compress(sequence.pages, sequence.compression.num_kept):
            self._preempt(next(s for s in reversed(self.running) if s is not sequence))

    def _add_draft(self, sequence: Sequence, num_tokens: int, budget: int) -> int:
        """Take pages for as much of a sequence's draft as there is budget for, and drop the rest; all of it where that would
        cost another sequence its pages."""
        count = min(len(sequence.draft), budget)
        end = sequence.num_computed + num_tokens + count
        if count and self.blocks.can_grow(sequence.pages, sequence.num_computed, end):
            self.blocks.grow(sequence.pages, sequence.num_computed, end)
        else:
            count = 0
        sequence.draft = sequence.draft[:count]
        return count

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.forget_computed()
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished or aborted sequence and give its pages back."""
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.pages is not None:
            self.blocks.release(sequence.pages)
        sequence.pages = None

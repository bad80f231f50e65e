"""What drafts the next tokens: the contract of all drafters, and the one that looks for the text's end earlier in the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.sampling.rejection import Proposal

LONGEST_MATCH = 4


@dataclass(frozen=True)
class Wish:
    """A sequence whose last token the target has not computed yet, and the most tokens to draft for it.

    worth: where the chance that all drafted tokens hold falls below this, the next one is not worth its cost. It is not for
    proposals with odds: to leave out the unlikely ones would bend the odds of what is drawn.
    """

    sequence: Sequence
    count: int
    worth: float = 0.0


class Drafter(Protocol):
    """Proposes what comes next.

    name: for people. cost: what a drafted token is taken to cost before it was measured, in plain steps of the target; 0 where
    that is next to nothing. prefill_s: seconds spent on prompts, and on text that was written while drafting paused.
    """

    name: str
    cost: float
    prefill_s: float

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """Tokens for each sequence, in order; fewer or none where nothing comes to mind. chance: of being taken, by the
        proposal's confidence. May raise StepInterrupted."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""


class NgramDrafter:
    """Prompt lookup: what came after the text's last tokens when they stood in it before, token by token.

    Saxena, "Prompt Lookup Decoding", 2023. The longest run counts, of 4 tokens down to 1, and its latest place. How sure it is
    follows from the run's length and from whether the same token came after it each time.
    """

    name, cost = "ngram", 0.0

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self._indexes: dict[Sequence, _Index] = {}

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """As `Drafter.propose`."""
        return [self._continue(wish.sequence, wish.count) for wish in wishes]

    def _continue(self, sequence: Sequence, count: int) -> list[Proposal]:
        if (index := self._indexes.get(sequence)) is None:
            index = self._indexes[sequence] = self._begin(sequence)
        index.read(sequence.token_ids)
        proposals: list[Proposal] = []
        recent = sequence.token_ids[-LONGEST_MATCH:]
        while len(proposals) < count and (proposal := index.after(recent)) is not None:
            proposals.append(proposal)
            recent = [*recent[1 - LONGEST_MATCH :], proposal.token_id]
        return proposals

    def _begin(self, sequence: Sequence) -> _Index:
        """The index of a text that was not seen before."""
        index, begin = _Index(), time.perf_counter()
        index.read(sequence.token_ids)
        self.prefill_s += time.perf_counter() - begin
        return index

    def forget(self, sequence: Sequence) -> None:
        """As `Drafter.forget`."""
        self._indexes.pop(sequence, None)

    def interrupt(self) -> None:
        """There is nothing to end."""


_CONFIDENCE = ((0.2, 0.35, 0.6, 0.65), (0.3, 0.55, 0.65, 0.75), (0.35, 0.65, 0.9, 0.95), (0.4, 0.85, 0.95, 0.98))
"""How often a continuation holds, measured on answers of a small model: by the run's length, and by how often it came in a row
(0: another one came the time before, then once, twice, more)."""
_MANY = len(_CONFIDENCE[0]) - 1


class _Index:
    """What follows every short run of tokens of a growing text.

    For each length of run: run → the token that came last, and how often in a row, in one number each (a long text has many).
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{} for _ in range(LONGEST_MATCH)]
        self._known = 1  # tokens that are entered as what follows a run; nothing precedes the first

    def read(self, ids: list[int]) -> None:
        """Take in what is new at the end of a text."""
        for end in range(self._known, len(ids)):
            self._enter(ids[max(0, end - LONGEST_MATCH) : end], ids[end])
        self._known = max(self._known, len(ids))

    def _enter(self, before: list[int], token_id: int) -> None:
        for table, run in zip(self._next, _runs(before), strict=False):
            last, times = divmod(table.get(run, -1), _MANY + 1)
            table[run] = token_id * (_MANY + 1) + (1 if last < 0 else min(times + 1, _MANY) if last == token_id else 0)

    def after(self, before: list[int]) -> Proposal | None:
        """What came after the longest run that ends there; None if its last token never stood in the text."""
        found = None
        for table, run, sure in zip(self._next, _runs(before), _CONFIDENCE, strict=False):
            if run not in table:
                break  # then no longer one stood there either
            token_id, times = divmod(table[run], _MANY + 1)
            found = Proposal(token_id, confidence=sure[times])
        return found


def _runs(before: list[int]) -> Iterator[int]:
    """The runs of 1, 2 … tokens that end there, each as one number."""
    run = 0
    for token_id in reversed(before):
        run = run << 32 | token_id + 1
        yield run

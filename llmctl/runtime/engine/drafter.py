"""What drafts the next tokens: the contract of all drafters, and the one that looks for the text's end earlier in the text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.sampling.rejection import Proposal

LONGEST_MATCH, SHORTEST_MATCH = 4, 2


@dataclass(frozen=True)
class Wish:
    """A sequence whose last token the target has not computed yet, and the most tokens to draft for it.

    worth: where the chance that all drafted tokens hold falls below this, the next one is not worth its cost.
    """

    sequence: Sequence
    count: int
    worth: float = 0.0


class Drafter(Protocol):
    """Proposes what comes next.

    name: for people. cost: what a drafted token is taken to cost before it was measured, in plain steps of the target.
    has_confidence: its proposals say how sure it is of them. prefill_s: seconds spent on prompts, and on text that was written
    while drafting paused.
    """

    name: str
    cost: float
    has_confidence: bool
    prefill_s: float

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """Tokens for each sequence, in order; fewer or none where nothing comes to mind. chance: of being taken, by the
        proposal's confidence. May raise StepInterrupted."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""


class NgramDrafter:
    """Prompt lookup: the longest run of tokens that ends the text and stood in it before, continued as it was then.

    Saxena, "Prompt Lookup Decoding", 2023. Runs are of 4 down to 2 tokens; the latest place counts.
    """

    name, cost, has_confidence, prefill_s = "ngram", 0.0, False, 0.0

    def __init__(self) -> None:
        self._places: dict[Sequence, _Places] = {}

    def propose(self, wishes: list[Wish], chance: Callable[[float], float]) -> list[list[Proposal]]:
        """As `Drafter.propose`."""
        return [self._continue(wish.sequence, wish.count) for wish in wishes]

    def _continue(self, sequence: Sequence, count: int) -> list[Proposal]:
        places = self._places.setdefault(sequence, _Places())
        ids = sequence.token_ids
        begin = places.find(ids)
        return [] if begin is None else [Proposal(token_id) for token_id in ids[begin : begin + count]]

    def forget(self, sequence: Sequence) -> None:
        """As `Drafter.forget`."""
        self._places.pop(sequence, None)

    def interrupt(self) -> None:
        """There is nothing to end."""


class _Places:
    """Where every short run of tokens of a growing text was last followed by something."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0  # tokens that are entered as what follows a run

    def find(self, ids: list[int]) -> int | None:
        """The place after the last earlier occurrence of the longest run that ends the text."""
        for end in range(max(self._known, 1), len(ids)):
            for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1):
                if end >= length:
                    self._after[tuple(ids[end - length : end])] = end
        self._known = len(ids)
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            if len(ids) >= length and (place := self._after.get(tuple(ids[-length:]))) is not None:
                return place
        return None

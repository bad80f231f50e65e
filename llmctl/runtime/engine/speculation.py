"""Speculation: an engine's drafter, when it is asked, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from llmctl.runtime.engine.draft_length import Calibration, Costs, DraftLength, StepTimes
from llmctl.runtime.engine.drafter import Drafter, Wish
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.sampling.rejection import Proposal

LONGEST_DRAFT = 8
_PREDICTED_TOKEN = 0.06  # see draft_length: for draws that must not depend on the clock


@dataclass
class SpeculationStats:
    """Counts and seconds since the start.

    rounds: steps of the target that judged drafted tokens, which brought `round_tokens` tokens; plain_steps: those of sequences
    that had none. verify_s, plain_s: the target's seconds in them; draft_s: the draft's, without prefill_s. Steps in which some
    sequences had drafted tokens and others not count as rounds.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    round_tokens: int = 0
    plain_steps: int = 0
    verify_s: float = 0.0
    plain_s: float = 0.0
    draft_s: float = 0.0
    prefill_s: float = 0.0

    def since(self, before: SpeculationStats) -> SpeculationStats:
        """What was added to an earlier copy."""
        names = [each.name for each in fields(self)]
        return SpeculationStats(**{name: getattr(self, name) - getattr(before, name) for name in names})

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted share of the drafted tokens; None where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def speedup(self) -> float | None:
        """Tokens a second against plain decoding, by the plain steps measured beside the rounds; None where there were none."""
        seconds = self.verify_s + self.plain_s + self.draft_s
        if not self.plain_steps or not self.plain_s or not seconds:
            return None
        return (self.round_tokens + self.plain_steps) * (self.plain_s / self.plain_steps) / seconds


class Speculation:
    """Drafts tokens for the sequences of one engine.

    longest: tokens drafted for a sequence at most. fixed: always as many, whatever comes of it; otherwise the number follows
    what was accepted and what it cost, down to none. What is drafted never changes the odds of any token. Greedy text is that
    of plain decoding. A draw with a seed also depends on how many tokens are drafted, so there this number follows
    from what was accepted alone, not from the clock.
    """

    def __init__(self, drafter: Drafter, *, longest: int = LONGEST_DRAFT, fixed: bool = False) -> None:
        self.drafter, self.longest, self._fixed = drafter, longest, fixed
        self.stats = SpeculationStats()
        self._lengths: dict[Sequence, DraftLength] = {}
        self._target_times, self._draft_seconds, self._calibration = StepTimes(), StepTimes(), Calibration()

    def draft(self, sequences: list[tuple[Sequence, int]]) -> None:
        """Set the `draft` of sequences that need one token each. With each: how many tokens it has room for at most."""
        wishes = []
        for sequence, room in sequences:
            costs, length = self._costs(sequence, len(sequences)), self._length(sequence)
            if self._by_clock(sequence) and self._target_times.of(len(sequences)) is None:
                continue  # the first steps are plain ones: they are what drafting is measured by
            count = length.choose(costs)
            if min(room, count) > 0 and self.drafter.has_confidence and sequence.params.is_greedy:
                wishes.append(Wish(sequence, min(room, self.longest), length.worth(costs, count)))
            elif min(room, count) > 0:
                wishes.append(Wish(sequence, min(room, count)))
        if wishes:
            self._propose(wishes)

    def _propose(self, wishes: list[Wish]) -> None:
        begin, prefill = time.perf_counter(), self.drafter.prefill_s
        drafts = self.drafter.propose(wishes, self._calibration.chance)
        prefill = self.drafter.prefill_s - prefill
        seconds = time.perf_counter() - begin - prefill
        self.stats.draft_s += seconds
        self.stats.prefill_s += prefill
        if longest := max(map(len, drafts)):
            self._draft_seconds.add(len(wishes), seconds / longest)
        for wish, draft in zip(wishes, drafts, strict=True):
            wish.sequence.draft = draft

    def _length(self, sequence: Sequence) -> DraftLength:
        if sequence not in self._lengths:
            self._lengths[sequence] = DraftLength(self.longest, self._fixed)
        return self._lengths[sequence]

    def _costs(self, sequence: Sequence, num_sequences: int) -> Costs:
        """Of drafting for a sequence beside so many others."""
        plain, drafted = self._target_times.of(num_sequences), self._draft_seconds.of(num_sequences)
        if not self._by_clock(sequence) or plain is None:
            return Costs(self.drafter.cost, _PREDICTED_TOKEN)
        wide = self._target_times.of(4 * num_sequences)
        token = max(0.0, (wide - plain) / (3 * plain)) if wide is not None else _PREDICTED_TOKEN
        return Costs(self.drafter.cost if drafted is None else drafted / plain, token)

    def _by_clock(self, sequence: Sequence) -> bool:
        return not self._fixed and (sequence.params.is_greedy or sequence.params.seed is None)

    def record_step(self, num_tokens: int, seconds: float, num_drafted: int) -> None:
        """A step of the target in which no prompt was computed."""
        self._target_times.add(num_tokens, seconds)
        if num_drafted:
            self.stats.rounds += 1
            self.stats.verify_s += seconds
        else:
            self.stats.plain_steps += 1
            self.stats.plain_s += seconds

    def record(self, sequence: Sequence, draft: list[Proposal], num_accepted: int, num_tokens: int) -> None:
        """What became of a sequence's draft: so many tokens of it were accepted, the step brought `num_tokens`."""
        self._length(sequence).record(len(draft), num_accepted)
        for place, proposal in enumerate(draft[: num_accepted + 1]):
            self._calibration.record(proposal.confidence, place < num_accepted)
        self.stats.drafted += len(draft)
        self.stats.accepted += num_accepted
        self.stats.round_tokens += num_tokens

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._lengths.pop(sequence, None)
        self.drafter.forget(sequence)

"""Speculation: an engine's drafter, when it is asked, and what came of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

from llmctl.runtime.engine.draft_length import Calibration, Costs, DraftLength, StepTimes, best_length
from llmctl.runtime.engine.drafter import Drafter, Wish
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.sampling.rejection import Proposal

LONGEST_DRAFT = 7  # with the token before it eight, which kernels for few tokens are made for
_PLAIN_EVERY = 64  # rounds between two plain steps, by which drafting is measured


@dataclass
class SpeculationStats:
    """Counts and seconds since the start.

    drafted, accepted: tokens. rounds: steps of the target that judged drafted tokens, of any sequence, which brought
    `round_tokens` tokens; plain_steps: the others, which brought `plain_tokens`. verify_s, plain_s: the target's seconds in
    them; draft_s: the draft's, without prefill_s. undrafted_s: what the tokens of the rounds would have taken without a draft,
    by the plain steps as measured.
    """

    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    round_tokens: int = 0
    plain_steps: int = 0
    plain_tokens: int = 0
    verify_s: float = 0.0
    plain_s: float = 0.0
    draft_s: float = 0.0
    prefill_s: float = 0.0
    undrafted_s: float = 0.0

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
        """Tokens a second against plain decoding, the draft's prefill left out; None where no step was measured."""
        seconds = self.verify_s + self.plain_s + self.draft_s
        return (self.undrafted_s + self.plain_s) / seconds if seconds else None


class Speculation:
    """Drafts tokens for the sequences of one engine.

    longest: tokens drafted for a sequence at most. fixed: always as many, whatever comes of it; otherwise the number follows
    what was accepted and what it cost, down to none. What is drafted never changes the odds of any token. Greedy text and text
    drawn with a seed is that of plain decoding.
    """

    def __init__(self, drafter: Drafter, *, longest: int = LONGEST_DRAFT, fixed: bool = False) -> None:
        self.drafter, self.longest, self._fixed = drafter, longest, fixed
        self.stats = SpeculationStats()
        self._sequences: dict[Sequence, DraftLength] = {}
        self._last_round: dict[Sequence, tuple[int, int]] = {}  # accepted and all tokens
        self._target_times, self._draft_seconds, self._calibration = StepTimes(), StepTimes(), Calibration()
        self._num_decoding, self._since_plain = 1, _PLAIN_EVERY
        self._slowness = 1.0  # of the last step, against others of its size: what disturbed it would have disturbed a plain one

    def draft(self, sequences: list[tuple[Sequence, int]]) -> None:
        """Set the `draft` of sequences that need one token each. With each: how many tokens it has room for at most."""
        self._num_decoding = max(1, len(sequences))
        for sequence, _ in sequences:
            self._of(sequence).pace.arrive(len(sequence.token_ids))
        if not sequences or self._since_plain >= _PLAIN_EVERY:
            return  # the first step is a plain one, and some later: they are what drafting is measured by
        costs = self._costs()
        wishes = [wish for sequence, room in sequences if (wish := self._wish(sequence, room, costs)) is not None]
        if wishes:
            self._propose(wishes, costs)

    def _wish(self, sequence: Sequence, room: int, costs: Costs) -> Wish | None:
        """What to ask the drafter for."""
        length = self._of(sequence)
        if not length.goes_on(costs) or room <= 0:
            return None
        count = length.choose(costs) if self.drafter.cost else self.longest
        return Wish(sequence, min(room, count), length.worth(costs, count))

    def _propose(self, wishes: list[Wish], costs: Costs) -> None:
        begin, prefill = time.perf_counter(), self.drafter.prefill_s
        drafts = self.drafter.propose(wishes, self._calibration.chance)
        prefill = self.drafter.prefill_s - prefill
        seconds = time.perf_counter() - begin - prefill
        self.stats.draft_s += seconds
        self.stats.prefill_s += prefill
        if longest := max(map(len, drafts)):
            self._draft_seconds.add(len(wishes), seconds / longest)
        for wish, draft in zip(wishes, drafts, strict=True):
            wish.sequence.draft = draft[: self._num_worth(wish.sequence, draft, costs)]
            self._of(wish.sequence).pace.leave(costs.steps[len(wish.sequence.draft)] + costs.draft * max(1, len(draft)))

    def _num_worth(self, sequence: Sequence, draft: list[Proposal], costs: Costs) -> int:
        """How many of the drafted tokens to have judged. All where they have odds: see `Wish`."""
        if self._fixed or not draft or draft[0].ids is not None:
            return len(draft)
        chances = [self._calibration.chance(proposal.confidence) for proposal in draft]
        count = best_length(chances, costs, self._of(sequence).pace.rate)
        if count == 0:
            self._calibration.skip(draft[0].confidence)
        return count

    def _of(self, sequence: Sequence) -> DraftLength:
        if sequence not in self._sequences:
            self._sequences[sequence] = DraftLength(self.longest, self._fixed)
        return self._sequences[sequence]

    def _costs(self) -> Costs:
        """Of drafting for every sequence that is decoding."""
        count = self._num_decoding
        plain, drafted = self._target_times.of(count), self._draft_seconds.of(count)
        if not plain:
            return Costs.even(self.drafter.cost, self.longest)
        steps = [self._target_times.of(count * (1 + number)) / plain for number in range(self.longest + 1)]
        return Costs(self.drafter.cost if drafted is None else drafted / plain, steps)

    def record_step(self, drafted: list[int], seconds: float | None) -> None:
        """A step of the target. drafted: of every sequence, the number of drafted tokens judged; seconds: None where a prompt
        was computed as well, so that they say nothing."""
        self._slowness, self._last_round, width = 0.0, {}, len(drafted) + sum(drafted)
        if seconds is not None:
            self._target_times.add(width, seconds)
            self._slowness = seconds / (self._target_times.of(width) or 1.0)
        if any(drafted):
            self._since_plain += 1
            self.stats.rounds += 1
            self.stats.verify_s += seconds or 0.0
            self._count(0, drafted.count(0))
        elif seconds is not None:
            self._since_plain = 0
            self.stats.plain_steps += 1
            self.stats.plain_tokens += len(drafted)
            self.stats.plain_s += seconds

    def record(self, sequence: Sequence, draft: list[Proposal], num_accepted: int, num_tokens: int) -> None:
        """What became of a sequence's draft: so many tokens of it were accepted, the step brought `num_tokens`."""
        self._of(sequence).record(len(draft), num_accepted)
        self._last_round[sequence] = num_accepted, num_tokens
        for place, proposal in enumerate(draft[: num_accepted + 1]):
            self._calibration.record(proposal.confidence, place < num_accepted)
        self.stats.drafted += len(draft)
        self._count(num_accepted, num_tokens)

    def _count(self, num_accepted: int, num_tokens: int) -> None:
        """Tokens that a round brought; fewer than none where they are taken back."""
        self.stats.accepted += num_accepted
        self.stats.round_tokens += num_tokens
        plain = self._target_times.of(self._num_decoding) or 0.0
        self.stats.undrafted_s += num_tokens * plain * self._slowness / self._num_decoding

    def take_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Of the last step's tokens of a sequence so many are of no use: its answer had ended before them."""
        accepted, gained = self._last_round.pop(sequence, (0, 0))
        kept = max(0, gained - num_tokens)
        self._count(min(accepted, kept) - accepted, kept - gained)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        self._sequences.pop(sequence, None)
        self.drafter.forget(sequence)

"""How many tokens are worth drafting: what they cost, and how many of them were taken so far.

Speedup = E / (γ·c + v): c is one drafted token, v verifying γ + 1 tokens at once, both in plain steps of the target; E, the
tokens a round is expected to bring, follows from the share that was accepted. See rejection.py for the papers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

_FADING = 0.85  # what a round is worth after the next one
_PRIOR_ACCEPTED, _PRIOR_JUDGED = 3.0, 4.0
_FIRST_PAUSE, _PAUSE_GROWTH = 32, 8
_FIRST_TRIAL, _NEXT_TRIAL = 5.0, 2.5  # plain steps that drafting may lose before it pauses: at first, and after a pause
_PROVEN = 1.1  # a pace above this, tokens in the time of a plain step, and the draft is trusted as at first
_EARNED = 5.0  # plain steps that a draft may be ahead: it may lose so many more
_FREE = 0.03  # plain steps
_TOKEN_SHARE = 0.06  # of a plain step, what one token more is taken to cost before it was measured
_REMEMBERED = 512  # steps after which a time that was not measured again is forgotten


@dataclass
class StepTimes:
    """Seconds of a step by the number of tokens in it: a fading mean of those measured, lines between and beyond them.

    The lines are a guess: some kernels take longer for 3 tokens than for 4. So every number of tokens is measured by itself.
    """

    _sizes: list[int] = field(default_factory=list)
    _means: dict[int, float] = field(default_factory=dict)
    _measured: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step. What disturbs one (another program had the processor) only ever makes it longer: so a longer
        one counts for less, and as twice what was expected at most."""
        expected, self._count = self.of(num_tokens), self._count + 1
        seconds = seconds if expected is None else min(seconds, 2 * expected)
        if (mean := self._means.get(num_tokens)) is None:
            insort(self._sizes, num_tokens)
        else:
            seconds = mean + (0.5 if seconds < mean else 0.2) * (seconds - mean)
        self._means[num_tokens], self._measured[num_tokens] = seconds, self._count
        for size in [n for n, at in self._measured.items() if at < self._count - _REMEMBERED]:
            self._sizes.remove(size)
            del self._means[size], self._measured[size]

    def of(self, num_tokens: int) -> float | None:
        """What a step of so many tokens would take; None if nothing was measured yet."""
        if not self._sizes or num_tokens in self._means:
            return self._means.get(num_tokens)
        first, place = self._sizes[0], bisect_left(self._sizes, num_tokens)
        if place in (0, len(self._sizes)):
            nearest = self._sizes[max(0, place - 1)]
            return self._means[nearest] + _TOKEN_SHARE * self._means[first] / max(1, first) * (num_tokens - nearest)
        below, above = self._sizes[place - 1], self._sizes[place]
        share = (num_tokens - below) / (above - below)
        return (1 - share) * self._means[below] + share * self._means[above]


@dataclass(frozen=True)
class Costs:
    """In plain steps of the target. draft: one drafted token; steps: judging 0, 1, 2 … drafted tokens."""

    draft: float
    steps: Sequence[float]

    @classmethod
    def even(cls, draft: float, longest: int, token: float = _TOKEN_SHARE) -> Costs:
        """Every token more costs the same."""
        return cls(draft, [1.0 + n * token for n in range(longest + 1)])

    def of_round(self, num_drafted: int) -> float:
        """γ·c + v."""
        return self.steps[num_drafted] + num_drafted * self.draft


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """1 + α + … + α^γ: what a round brings when every drafted token is accepted with probability α."""
    if acceptance >= 1.0:
        return 1.0 + num_drafted
    return (1.0 - acceptance ** (num_drafted + 1)) / (1.0 - acceptance)


class Calibration:
    """How often drafted tokens were taken, by how sure the draft was of them: at first, as often as it says."""

    _PARTS, _PRIOR = 10, 2.0
    _FADING, _FORGETTING = 0.98, 0.995  # of what is known, for every token judged and for every one left out

    def __init__(self) -> None:
        self._accepted, self._judged = [0.0] * self._PARTS, [0.0] * self._PARTS

    def chance(self, confidence: float) -> float:
        """That a token will be taken."""
        part = self._part(confidence)
        expected = self._PRIOR * (part + 0.5) / self._PARTS
        return (self._accepted[part] + expected) / (self._judged[part] + self._PRIOR)

    def record(self, confidence: float, accepted: bool) -> None:
        """A token was judged."""
        self._fade(confidence, self._FADING)
        self._accepted[self._part(confidence)] += accepted
        self._judged[self._part(confidence)] += 1.0

    def skip(self, confidence: float) -> None:
        """A token was not worth its cost. What is known of its like fades, so that it is tried again some time."""
        self._fade(confidence, self._FORGETTING)

    def _fade(self, confidence: float, share: float) -> None:
        part = self._part(confidence)
        self._accepted[part] *= share
        self._judged[part] *= share

    def _part(self, confidence: float) -> int:
        return min(int(confidence * self._PARTS), self._PARTS - 1)


@dataclass
class Pace:
    """Tokens that a sequence gains in the time of a plain step, lately: what one more drafted token must beat.

    lost: plain steps by which the text lies behind plain decoding since it was furthest ahead, less a few that were earned (a
    CUSUM, Page 1954). One that gains more than it loses hardly ever gets far behind; one that loses does, however little it is
    at a time.
    """

    lost: float = 0.0
    _tokens: float = 4.0
    _spent: float = 4.0
    _length: int | None = None
    _cost: float = 1.0

    @property
    def rate(self) -> float:
        """1 is plain decoding; it is never said to be slower, since that is always to be had."""
        return max(1.0, self._tokens / self._spent)

    def arrive(self, length: int) -> None:
        """The text has so many tokens now."""
        if self._length is not None:
            gained = length - self._length
            self._tokens, self._spent = 0.9 * self._tokens + gained, 0.9 * self._spent + self._cost
            self.lost = max(-_EARNED, self.lost + self._cost - gained)
        self._length, self._cost = length, 1.0

    def leave(self, cost: float) -> None:
        """What the step after that costs, if it is not a plain one."""
        self._cost = cost


def best_length(chances: Sequence[float], costs: Costs, rate: float) -> int:
    """How many of the drafted tokens to have judged: each is taken with its chance if all before it were. `rate`: of `Pace`."""
    best, most, expected, held = 0, -rate * costs.steps[0], 0.0, 1.0
    for number, chance in enumerate(chances, 1):
        held *= chance
        expected += held
        gain = expected - rate * costs.steps[number]
        if gain > most:
            best, most = number, gain
    return best


@dataclass
class DraftLength:
    """One sequence's decision. longest: tokens drafted at most; is_fixed: always so many."""

    longest: int
    is_fixed: bool = False
    pace: Pace = field(default_factory=Pace)
    _accepted: float = _PRIOR_ACCEPTED
    _judged: float = _PRIOR_JUDGED
    _pause: int = 0
    _next_pause: int = _FIRST_PAUSE
    _may_lose: float = _FIRST_TRIAL

    @property
    def acceptance(self) -> float:
        """The share of judged tokens that were taken, lately."""
        return self._accepted / self._judged

    @property
    def is_paused(self) -> bool:
        """Drafting has been switched off for a while."""
        return self._pause > 0

    def goes_on(self, costs: Costs) -> bool:
        """Whether to draft now; not while that is known to lose. Each False stands for one plain step. A draft that costs next
        to nothing goes on: whether its tokens are judged is decided by themselves."""
        if self.is_fixed:
            return True
        if self._pause:
            self._pause -= 1
            return False
        if self.pace.lost < self._may_lose or costs.draft * self.longest < _FREE:
            return True
        self._begin_pause()
        return False

    def _begin_pause(self) -> None:
        """What was lost is written off, so that the next trial is one."""
        self._pause, self._next_pause = self._next_pause - 1, self._next_pause * _PAUSE_GROWTH
        self._accepted, self._judged = _PRIOR_ACCEPTED, _PRIOR_JUDGED
        self.pace.lost, self._may_lose = 0.0, _NEXT_TRIAL

    def choose(self, costs: Costs) -> int:
        """Tokens to draft, were all as likely to be taken: at least one, or nothing would be learnt."""
        if self.is_fixed:
            return self.longest
        return max(range(1, self.longest + 1), key=lambda n: expected_tokens(self.acceptance, n) / costs.of_round(n))

    def worth(self, costs: Costs, count: int) -> float:
        """The chance that all drafted tokens up to there are taken, below which one more is not worth what it costs. At most 1:
        the first is drafted in any case."""
        if self.is_fixed or not count:
            return 0.0
        speedup = expected_tokens(self.acceptance, count) / costs.of_round(count)
        token = (costs.of_round(count) - costs.steps[0]) / count
        return min(1.0, token * max(1.0, speedup) / max(self.acceptance, 0.1))

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """A round of so many drafted tokens, of which the first so many were taken."""
        if num_drafted == 0:
            return
        self._accepted = _FADING * self._accepted + num_accepted
        self._judged = _FADING * self._judged + num_accepted + (num_accepted < num_drafted)
        if self.pace.rate > _PROVEN:
            self._next_pause, self._may_lose = _FIRST_PAUSE, _FIRST_TRIAL

"""How many tokens are worth drafting: what they cost, and how many of them were taken so far.

Speedup = E / (γ·c + v): c is one drafted token, v verifying γ + 1 tokens at once, both in plain steps of the target; E, the
tokens a round is expected to bring, follows from the share that was accepted. See rejection.py for the papers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_FADING = 0.85  # what a round is worth after the next one
_PRIOR_ACCEPTED, _PRIOR_JUDGED = 1.5, 2.0
_FIRST_PAUSE, _PAUSE_GROWTH = 32, 8
_MARGIN = 1.02  # a speedup below this is no reason to draft
_TOKEN_SHARE = 0.06  # of a plain step, what one token more is taken to cost before it was measured


@dataclass
class StepTimes:
    """Seconds of a step by the number of tokens in it: a fading mean of those measured, lines between and beyond them."""

    _means: dict[int, float] = field(default_factory=dict)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Take note of a step. A single outlier (another program had the processor) counts as twice what was expected."""
        mean = self._means.get(num_tokens)
        self._means[num_tokens] = seconds if mean is None else mean + 0.2 * (min(seconds, 2 * mean) - mean)

    def of(self, num_tokens: int) -> float | None:
        """What a step of so many tokens would take; None if nothing was measured yet."""
        known = sorted(self._means)
        if not known:
            return None
        below = max((n for n in known if n <= num_tokens), default=None)
        above = min((n for n in known if n >= num_tokens), default=None)
        if below is None or above is None:
            nearest = known[0] if below is None else below
            slope = _TOKEN_SHARE * self._means[known[0]] / max(1, known[0])
            return self._means[nearest] + slope * (num_tokens - nearest)
        if below == above:
            return self._means[below]
        share = (num_tokens - below) / (above - below)
        return (1 - share) * self._means[below] + share * self._means[above]


@dataclass(frozen=True)
class Costs:
    """In plain steps of the target: one drafted token, and every token more that is verified."""

    draft: float
    token: float

    def of_round(self, num_drafted: int) -> float:
        """γ·c + v."""
        return 1.0 + num_drafted * (self.draft + self.token)


def expected_tokens(acceptance: float, num_drafted: int) -> float:
    """1 + α + … + α^γ: what a round brings when every drafted token is accepted with probability α."""
    if acceptance >= 1.0:
        return 1.0 + num_drafted
    return (1.0 - acceptance ** (num_drafted + 1)) / (1.0 - acceptance)


class Calibration:
    """How often drafted tokens were taken, by how sure the draft was of them."""

    _LIMITS = (0.3, 0.5, 0.7, 0.9)

    def __init__(self) -> None:
        self._accepted = [1.0, 1.2, 1.4, 1.6, 1.9]
        self._judged = [2.0] * 5

    def chance(self, confidence: float) -> float:
        """That a token will be taken."""
        place = sum(confidence >= limit for limit in self._LIMITS)
        return self._accepted[place] / self._judged[place]

    def record(self, confidence: float, accepted: bool) -> None:
        """A token was judged."""
        place = sum(confidence >= limit for limit in self._LIMITS)
        self._accepted[place] = 0.98 * self._accepted[place] + accepted
        self._judged[place] = 0.98 * self._judged[place] + 1.0


@dataclass
class DraftLength:
    """One sequence's decision. longest: tokens drafted at most; is_fixed: always so many."""

    longest: int
    is_fixed: bool = False
    _accepted: float = _PRIOR_ACCEPTED
    _judged: float = _PRIOR_JUDGED
    _pause: int = 0
    _next_pause: int = _FIRST_PAUSE
    _rounds_since_pause: int = 0

    @property
    def acceptance(self) -> float:
        """The share of judged tokens that were taken, lately."""
        return self._accepted / self._judged

    @property
    def is_paused(self) -> bool:
        """Drafting has been switched off for a while."""
        return self._pause > 0

    def choose(self, costs: Costs) -> int:
        """Tokens to draft now, were all as likely to be taken; 0 while drafting loses. Each call that says 0 stands for one plain
        step."""
        if self.is_fixed:
            return self.longest
        if self._pause:
            self._pause -= 1
            if self._pause == 0:
                self._accepted, self._judged, self._rounds_since_pause = _PRIOR_ACCEPTED / 2, _PRIOR_JUDGED / 2, 0
            return 0
        speedups = [expected_tokens(self.acceptance, n) / costs.of_round(n) for n in range(self.longest + 1)]
        best = max(range(self.longest + 1), key=speedups.__getitem__)
        if speedups[best] >= _MARGIN:
            return best
        self._pause, self._next_pause = self._next_pause - 1, self._next_pause * _PAUSE_GROWTH
        return 0

    def worth(self, costs: Costs, count: int) -> float:
        """The chance that all drafted tokens up to there are taken, below which one more is not worth what it costs."""
        if self.is_fixed:
            return 0.0
        speedup = expected_tokens(self.acceptance, count) / costs.of_round(count)
        return (costs.draft + costs.token) * max(1.0, speedup) / max(self.acceptance, 0.1)

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """A round of so many drafted tokens, of which the first so many were taken."""
        if num_drafted == 0:
            return
        self._accepted = _FADING * self._accepted + num_accepted
        self._judged = _FADING * self._judged + num_accepted + (num_accepted < num_drafted)
        self._rounds_since_pause += 1
        if self._rounds_since_pause > 4 and self.acceptance > 0.5:
            self._next_pause = _FIRST_PAUSE

"""How many tokens are drafted, and which ones n-grams draft: what was seen before, what steps cost, what is forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from llmctl.runtime.engine.draft_length import Calibration, Costs, DraftLength, Pace, StepTimes, best_length
from llmctl.runtime.engine.drafter import NgramDrafter, Wish
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

STAIRS = Costs(0.0, [1.0, 1.05, 1.5, 1.1, 1.5, 1.5, 1.6, 1.3])
"""Of kernels that are made for 1, 2, 4 and 8 tokens: three take longer than four."""


@pytest.mark.parametrize(
    ("chances", "rate", "best"),
    [
        ([0.9] * 7, 2.0, 7),
        ([0.7] * 7, 4.0, 3),
        ([0.9] * 2, 2.0, 1),  # two would cost more than seven
        ([0.9] * 6, 5.0, 3),
        ([0.03], 1.0, 0),
        ([], 1.0, 0),
    ],
)
def test_no_more_is_judged_than_pays(chances: list[float], rate: float, best: int) -> None:
    assert best_length(chances, STAIRS, rate) == best


def test_the_faster_things_go_the_more_a_drafted_token_must_bring() -> None:
    even = Costs.even(0.0, 7, token=0.1)
    lengths = [best_length([0.8] * 7, even, rate) for rate in (1.0, 2.0, 3.0, 5.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 7
    assert lengths[-1] < 4


def test_times_between_those_measured_lie_on_lines() -> None:
    times = StepTimes()
    assert times.of(3) is None
    times.add(1, 10.0)
    assert times.of(4) == pytest.approx(10.0 * (1 + 3 * 0.06))
    times.add(5, 14.0)
    assert [times.of(n) for n in (1, 3, 5)] == pytest.approx([10.0, 12.0, 14.0])


def test_what_disturbs_a_step_counts_for_little() -> None:
    times = StepTimes()
    for seconds in (10.0, 10.0, 500.0):
        times.add(1, seconds)
    assert times.of(1) == pytest.approx(12.0)
    times.add(4, 500.0)  # the first of its size: twice what was to be expected
    assert times.of(4) <= 2.5 * 12.0
    for _ in range(10):
        times.add(1, 10.0)
    assert times.of(1) == pytest.approx(10.0, rel=0.01)


def test_a_time_that_is_not_measured_again_is_forgotten() -> None:
    times = StepTimes()
    times.add(1, 10.0)
    times.add(4, 19.0)
    for _ in range(600):
        times.add(1, 10.0)
    assert times.of(4) == pytest.approx(10.0 * (1 + 3 * 0.06))


def test_confidence_is_believed_until_it_was_tried_and_again_long_after() -> None:
    known = Calibration()
    assert known.chance(0.05) < 0.1 < 0.8 < known.chance(0.85)
    for _ in range(20):
        known.record(0.85, accepted=False)
    assert known.chance(0.85) < 0.1
    assert known.chance(0.95) > 0.9
    for _ in range(1000):
        known.skip(0.85)
    assert known.chance(0.85) > 0.7


def test_the_pace_follows_what_steps_brought() -> None:
    pace = Pace()
    assert pace.rate == 1.0
    for length in range(10, 200, 3):
        pace.arrive(length)
        pace.leave(1.5)
    assert pace.rate == pytest.approx(2.0, rel=0.05)
    for length in range(200, 260):
        pace.arrive(length)  # plain steps
    assert pace.rate == pytest.approx(1.0, rel=0.05)


MODEL = Costs.even(0.4, 7)


class Text:
    """One text, written with a draft that costs what MODEL does. spent: plain steps; tokens: written in them."""

    def __init__(self) -> None:
        self.length, self.spent, self.tokens = DraftLength(7), 0.0, 0

    def write(self, taken: Iterable[int], num_steps: int = 1) -> None:
        """So many steps. taken: of each that drafts, how many tokens hold."""
        for would_hold in itertools.islice(itertools.cycle(taken), num_steps):
            self.length.pace.arrive(self.tokens)
            drafts = self.length.goes_on(MODEL)
            count = self.length.choose(MODEL) if drafts else 0
            accepted = min(would_hold, count)
            self.length.record(count, accepted)
            self.length.pace.leave(MODEL.of_round(count))
            self.spent += MODEL.of_round(count)
            self.tokens += 1 + accepted


def test_a_few_rounds_in_vain_do_not_end_drafting() -> None:
    text = Text()
    text.write([0], 4)
    text.write([3], 8)
    assert not text.length.is_paused
    assert text.length.choose(MODEL) > 1


def test_drafting_that_loses_pauses_and_is_tried_again_ever_later() -> None:
    text, trials, was_paused = Text(), [], True
    for step in range(1200):
        text.write([0])
        if was_paused and not text.length.is_paused:
            trials.append(step)
        was_paused = text.length.is_paused
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert len(gaps) == 2
    assert gaps[1] > 4 * gaps[0]


def test_a_draft_that_brings_nothing_costs_little() -> None:
    text = Text()
    text.write([0], 512)
    assert text.tokens == 512
    assert 1.0 < text.spent / text.tokens < 1.03


def test_a_draft_that_pays_after_a_pause_is_trusted_again() -> None:
    text = Text()
    while not text.length.is_paused:
        text.write([0])
    text.write([5], 60)
    text.write([0], 2)  # more than a trial may lose
    assert not text.length.is_paused


def test_a_free_draft_never_pauses() -> None:
    length, free = DraftLength(7), Costs.even(0.001, 7)
    length.pace.lost = 100.0
    assert length.goes_on(free)


def drafted(ids: list[int], count: int = 4, drafter: NgramDrafter | None = None) -> list[tuple[int, float]]:
    params = SamplingParams()
    sequence = Sequence(ids, params, Sampler(params))
    (proposals,) = (drafter or NgramDrafter()).propose([Wish(sequence, count)], lambda confidence: confidence)
    return [(proposal.token_id, proposal.confidence) for proposal in proposals]


@pytest.mark.parametrize(
    ("ids", "tokens"),
    [
        ([], []),
        ([7], []),
        ([1, 2, 3, 4], []),  # the last token never stood there
        ([5, 6, 7, 8, 9, 5, 6], [7, 8, 9, 5]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9]),  # the latest place counts
        ([3, 1, 2, 8, 4, 1, 2, 9, 3, 1, 2], [8, 4, 1, 2]),  # but a longer run before that
        ([5, 5, 5], [5, 5, 5, 5]),
    ],
)
def test_ngrams_go_on_as_the_longest_run_did(ids: list[int], tokens: list[int]) -> None:
    assert [token_id for token_id, _ in drafted(ids)] == tokens


def test_ngrams_are_surer_of_longer_runs_and_of_what_came_each_time() -> None:
    short, long = drafted([1, 2, 3, 9, 3], 1), drafted([1, 2, 3, 4, 9, 1, 2, 3, 4], 1)
    often, changed = drafted([3, 9, 3, 9, 3, 9, 3], 1), drafted([3, 9, 3, 9, 3, 8, 3], 1)
    assert short[0][1] < long[0][1]
    assert changed[0][0] == 8
    assert changed[0][1] < short[0][1] < often[0][1]


def test_a_growing_text_is_read_on_from_where_it_was() -> None:
    params, drafter = SamplingParams(), NgramDrafter()
    sequence = Sequence([1, 2], params, Sampler(params))
    for token_id in (3, 4, 1, 2, 3, 9, 2, 3):
        sequence.token_ids.append(token_id)
        ((*proposals,),) = drafter.propose([Wish(sequence, 3)], lambda confidence: confidence)
        fresh = drafted(sequence.token_ids, 3)
        assert [(each.token_id, each.confidence) for each in proposals] == fresh
    drafter.forget(sequence)
    assert not drafter._indexes

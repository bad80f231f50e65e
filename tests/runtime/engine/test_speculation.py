"""Drafted tokens: the text of plain decoding, the odds of plain sampling, both caches exact after every round, and time won or
at least not lost. The models' logits are written by the tests; the stub's cache checks every position that is read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from stub_loop import VOCAB, completion, drain, mixed

from llmctl.kernels.ops import StepInterrupted
from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.engine import Engine
from llmctl.runtime.engine import engine as engine_module
from llmctl.runtime.engine import speculation as speculation_module
from llmctl.runtime.engine.drafter import NgramDrafter
from llmctl.runtime.engine.model_drafter import ModelDrafter
from llmctl.runtime.engine.speculation import Speculation
from llmctl.runtime.sampling import sampler as sampler_module
from llmctl.runtime.sampling.params import SamplingParams

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def wrong(ids: list[int]) -> np.ndarray:
    """Never the most likely token of `mixed`."""
    return -mixed(ids)


def right_sometimes(ids: list[int]) -> np.ndarray:
    return mixed(ids) if len(ids) % 3 else wrong(ids)


def speculative(stub_model, draft, target=mixed, *, longest=3, fixed=True, sequences=1, engine=None, **choices) -> Engine:
    """An engine over stubs. draft: logits of the draft model, or a drafter. choices: of both models."""
    model = stub_model(target, **choices)
    if isinstance(draft, Callable):
        draft_model = stub_model(draft, **choices)
        draft = ModelDrafter(draft_model, num_tokens=VOCAB, cost=0.1, longest=longest, max_num_seqs=sequences)
    speculation = Speculation(draft, longest=longest, fixed=fixed)
    return Engine(model, speculation=speculation, max_num_seqs=sequences, **(engine or {}))


def plain(stub_model, params: SamplingParams = GREEDY, prompt: list[int] = PROMPT, **choices) -> list[int]:
    return completion(Engine(stub_model(mixed, **choices)), prompt, params)


DRAFTS = {"right": mixed, "wrong": wrong, "sometimes": right_sometimes, "ngram": NgramDrafter()}


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("longest", [1, 3, 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_greedy_text_is_that_of_plain_decoding(stub_model, draft: str, longest: int, fixed: bool) -> None:
    engine = speculative(stub_model, DRAFTS[draft], longest=longest, fixed=fixed)
    assert completion(engine, PROMPT, GREEDY) == plain(stub_model)


def test_what_came_of_the_drafts_is_counted(stub_model) -> None:
    # 39 tokens follow the first; the step after it is a plain one. Right: nine rounds of 3 + 1, then one with room for 1 + 1.
    # Wrong: a token a round; the last three have room for 2, 1 and no drafted tokens.
    for draft, counts in {"right": (28, 28, 10, 38, 1), "wrong": (35 * 3 + 2 + 1, 0, 37, 37, 2)}.items():
        engine = speculative(stub_model, DRAFTS[draft])
        completion(engine, PROMPT, GREEDY)
        stats = engine.speculation.stats
        assert (stats.drafted, stats.accepted, stats.rounds, stats.round_tokens, stats.plain_steps) == counts, draft
        assert stats.acceptance_rate == counts[1] / counts[0]


def test_a_draft_that_says_nothing_costs_no_round(stub_model) -> None:
    engine = speculative(stub_model, NgramDrafter(), target=lambda ids: np.eye(VOCAB)[len(ids) % VOCAB])
    completion(engine, [1, 2], SamplingParams(temperature=0, max_tokens=20))
    stats = engine.speculation.stats
    assert (stats.drafted, stats.rounds, stats.acceptance_rate, stats.plain_steps) == (0, 0, None, 19)


@pytest.mark.parametrize("longest", [1, 3])
def test_windows_forget_nothing_that_a_rejected_draft_gives_back(stub_model, longest: int) -> None:
    layers = (LayerShape(1, 1), LayerShape(1, 1, sliding_window=8))
    params = SamplingParams(temperature=0, max_tokens=150)
    engine = speculative(stub_model, right_sometimes, longest=longest, layers=layers)
    assert completion(engine, PROMPT, params) == plain(stub_model, params, layers=layers)
    windows = (LayerShape(1, 1, sliding_window=8),)
    drafter = ModelDrafter(stub_model(wrong, layers=windows), num_tokens=VOCAB, cost=0.1, longest=longest)
    assert completion(speculative(stub_model, drafter, longest=longest), PROMPT, params) == plain(stub_model, params)


def test_an_end_token_inside_a_draft_is_the_end(stub_model) -> None:
    text = plain(stub_model)
    end = text[9]
    first = text.index(end)
    engine = speculative(stub_model, mixed, longest=8, eos_token_ids=(end,))
    sequence = engine.add(PROMPT, GREEDY)
    drain(engine)
    assert (sequence.completion_token_ids, sequence.finish_reason) == (text[: first + 1], "stop")


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
def test_no_more_tokens_than_asked_for(stub_model, limit: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=limit)
    assert completion(speculative(stub_model, mixed, longest=8), PROMPT, params) == plain(stub_model)[:limit]


def test_the_context_may_be_filled_to_its_end(stub_model) -> None:
    params = SamplingParams(temperature=0)
    engine = speculative(stub_model, right_sometimes, longest=8, context_length=32)
    assert completion(engine, PROMPT, params) == plain(stub_model, params, context_length=32)


@pytest.mark.parametrize("fixed", [True, False])
def test_a_batch_with_drafts_is_every_sequence_alone(stub_model, fixed: bool) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9]]
    engine = speculative(stub_model, right_sometimes, fixed=fixed, sequences=3)
    sequences = [engine.add(prompt, GREEDY) for prompt in prompts]
    drain(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.completion_token_ids == plain(stub_model, prompt=prompt)


def test_where_pages_are_short_drafts_give_way_and_texts_stay(stub_model) -> None:
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    engine = speculative(stub_model, mixed, longest=8, sequences=3, context_length=64, engine={"num_blocks": 5})
    sequences = [engine.add(prompt, GREEDY) for prompt in prompts]
    drain(engine)
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.completion_token_ids == plain(stub_model, prompt=prompt)


def test_sequences_forked_from_one_prompt_draft_as_well(stub_model) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    engine = speculative(stub_model, right_sometimes, sequences=3)
    sequences = engine.add_several(PROMPT, params, 3)
    drain(engine)
    assert all(s.completion_token_ids == plain(stub_model)[:20] for s in sequences)


def test_every_page_is_free_after_an_end_and_after_an_abort_in_the_middle(stub_model) -> None:
    engine = speculative(stub_model, right_sometimes)
    drafter = engine.speculation.drafter
    before = engine._blocks.num_free, drafter._blocks.num_free
    completion(engine, PROMPT, GREEDY)
    assert (engine._blocks.num_free, drafter._blocks.num_free) == before
    sequence = engine.add(PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    engine.abort(sequence)
    assert (engine._blocks.num_free, drafter._blocks.num_free) == before
    assert completion(engine, PROMPT, GREEDY) == plain(stub_model)


@pytest.mark.parametrize("interrupted", ["target", "draft"])
def test_a_step_that_is_interrupted_counts_for_nothing(stub_model, interrupted: str) -> None:
    calls = {"target": 0, "draft": 0}

    def now_and_then(who: str, logits):
        def next_logits(ids: list[int]) -> np.ndarray:
            calls[who] += 1
            if who == interrupted and calls[who] % 7 == 0:
                raise StepInterrupted
            return logits(ids)

        return next_logits

    engine = speculative(stub_model, now_and_then("draft", right_sometimes), target=now_and_then("target", mixed))
    assert completion(engine, PROMPT, GREEDY) == plain(stub_model)


def test_the_draft_is_not_asked_about_texts_longer_than_its_context(stub_model) -> None:
    drafter = ModelDrafter(stub_model(mixed, context_length=16), num_tokens=VOCAB, cost=0.1, longest=3)
    engine = speculative(stub_model, drafter)
    assert completion(engine, PROMPT, GREEDY) == plain(stub_model)
    assert 0 < engine.speculation.stats.drafted <= 16


def test_tokens_that_nobody_took_do_not_count(stub_model) -> None:
    """Three drafted tokens hold, and the stop string is complete after the first of four; also where the engine ended there."""
    for limit in (40, 6):
        engine = speculative(stub_model, mixed)
        sequence = engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=limit))
        while len(sequence.completion_token_ids) < 6:
            outputs = engine.step()
        assert (len(outputs), engine.speculation.stats.accepted) == (4, 3)
        engine.abort(sequence, 3)
        stats = engine.speculation.stats
        assert (stats.drafted, stats.accepted, stats.round_tokens, stats.plain_tokens) == (3, 1, 1, 1)
        engine.abort(sequence)
        assert engine.speculation.stats == stats


class NoMore:
    """Allows so many tokens."""

    is_complete = False

    def __init__(self, count: int) -> None:
        self._count = count

    def forbid(self, logits: np.ndarray) -> None:
        if not self._count:
            logits[:] = -np.inf

    def accept(self, token_id: int) -> None:
        self._count -= 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_sequence_without_an_allowed_token_ends_alone(stub_model, draft: str) -> None:
    engine = speculative(stub_model, DRAFTS[draft], sequences=3)
    free = engine._blocks.num_free
    stuck = dataclasses.replace(GREEDY, constraints=(lambda: NoMore(10),))
    sequences = [engine.add(PROMPT, params) for params in (GREEDY, stuck, GREEDY)]
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    (failed,) = (output for output in outputs if output.error)
    assert (failed.sequence, failed.token, failed.finish_reason) == (sequences[1], None, "error")
    assert "no token may follow" in str(failed.error)
    assert [sequence.completion_token_ids for sequence in sequences] == [
        plain(stub_model, params) for params in (GREEDY, SamplingParams(temperature=0, max_tokens=10), GREEDY)
    ]
    assert engine._blocks.num_free == free


# --- draws ------------------------------------------------------------------------------------------------------------

SOFT = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -9.0, -9.0])


def soft(ids: list[int]) -> np.ndarray:
    """Eight tokens of which six matter, the odds turned by the last token."""
    return np.roll(SOFT, ids[-1])


def other_odds(ids: list[int]) -> np.ndarray:
    return np.roll(SOFT, ids[-1] + 1) / 2


def odds_of_pairs(params: SamplingParams) -> np.ndarray:
    """Exact probabilities [8, 8] of a token after each other one."""
    return np.stack([shaped(soft([first]), params) for first in range(8)])


def shaped(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scaled = np.exp(logits / params.temperature)
    if params.top_k:
        scaled[np.argsort(-logits, kind="stable")[params.top_k :]] = 0
    return scaled / scaled.sum()


@pytest.fixture
def numbered_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers without a seed draw the same numbers in every run of the test, and each others than the last."""
    numbers = itertools.count(1)
    monkeypatch.setattr(sampler_module, "fresh_seed", lambda: next(numbers))


@pytest.mark.usefixtures("numbered_seeds")
@pytest.mark.parametrize("top_k", [0, 4])
@pytest.mark.parametrize("draft", ["model", "same", "ngram"])
def test_draws_have_the_odds_of_the_target(stub_model, draft: str, top_k: int) -> None:
    """Chi-square over what follows each token, in texts drawn with a draft and no seed: 8 rows of 8 cells."""
    drafts = {"model": other_odds, "same": soft, "ngram": NgramDrafter()}
    params = {"temperature": 0.9, "top_k": top_k, "top_p": 1.0, "min_p": 0.0}
    engine = speculative(stub_model, drafts[draft], target=soft, vocab_size=8, longest=3)
    counts = np.zeros((8, 8))
    for _ in range(20):
        ids = completion(engine, [0, 1], SamplingParams(max_tokens=150, **params))
        np.add.at(counts, (ids[:-1], ids[1:]), 1)
    assert engine.speculation.stats.accepted > 300
    expected = odds_of_pairs(SamplingParams(**params)) * counts.sum(1, keepdims=True)
    assert (counts[expected == 0] == 0).all()
    cells = expected >= 5
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 8
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)  # four standard deviations


@pytest.mark.usefixtures("numbered_seeds")
def test_the_first_draws_of_many_answers_have_the_odds_of_the_target(stub_model) -> None:
    """A draft that drew by the very numbers its proposals are judged by would be found out here."""
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 3}
    engine = speculative(stub_model, other_odds, target=soft, vocab_size=8, longest=3)
    counts = np.zeros((8, 8))
    for _ in range(600):
        ids = completion(engine, [0, 1], SamplingParams(**params))
        counts[ids[0], ids[1]] += 1
    expected = odds_of_pairs(SamplingParams(**params)) * counts.sum(1, keepdims=True)
    cells = expected >= 5
    statistic, freedom = ((counts - expected)[cells] ** 2 / expected[cells]).sum(), cells.sum() - 8
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


SEEDED = {
    "all": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "cut": {"top_k": 8},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"mirostat_tau": 3.0},
}


@pytest.mark.parametrize("shape", SEEDED)
@pytest.mark.parametrize("draft", DRAFTS)
def test_text_with_a_seed_is_that_of_plain_decoding(stub_model, draft: str, shape: str) -> None:
    """Whatever is drafted, beside others, and where neither pages nor the step have room for all of it."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=60, **SEEDED[shape])
    expected = plain(stub_model, params)
    for others, limits in (0, {}), (3, {}), (3, {"num_blocks": 7, "prefill_chunk": 5}):
        engine = speculative(stub_model, DRAFTS[draft], longest=7, sequences=4, engine=limits)
        sequence = engine.add(PROMPT, params)
        for other in range(others):
            engine.add([other + 1], SamplingParams(seed=other, max_tokens=50))
        drain(engine)
        assert sequence.completion_token_ids == expected
        assert engine.speculation.stats.drafted > 0 or draft == "ngram"


def test_a_draft_that_is_the_model_draws_what_the_model_does(stub_model) -> None:
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=60)
    engine = speculative(stub_model, mixed)
    completion(engine, PROMPT, params)
    assert engine.speculation.stats.acceptance_rate == 1.0


# --- time, by a clock the models advance ------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (engine_module, speculation_module):
        monkeypatch.setattr(module, "time", made)
    return made


def timed(clock: Clock, model, step: float, token: float):
    """The model with a clock: a step takes `step`, and `token` for every token after the first."""
    forward = model.decoder.forward

    def slow(batch, cache, rows):
        clock.now += step + token * (len(batch.token_ids) - 1)
        return forward(batch, cache, rows)

    model.decoder.forward = slow
    return model


def seconds(stub_model, clock: Clock, draft, count: int, *, cost: float = 0.1, fixed: bool = False) -> tuple[float, Engine]:
    """Simulated seconds of `count` tokens; a plain step takes one."""
    target = timed(clock, stub_model(mixed, context_length=count + 64, max_cache_bytes=1 << 26), 1.0, 0.02)
    small = timed(clock, stub_model(draft, context_length=count + 64, max_cache_bytes=1 << 26), cost, cost / 50)
    drafter = ModelDrafter(small, num_tokens=VOCAB, cost=0.5, longest=8)
    engine = Engine(target, speculation=Speculation(drafter, longest=4 if fixed else 8, fixed=fixed))
    completion(engine, PROMPT, SamplingParams(temperature=0, max_tokens=1))  # the prompt is no part of it
    begin = clock.now
    completion(engine, PROMPT, SamplingParams(temperature=0, max_tokens=count))
    return clock.now - begin, engine


def test_a_pair_of_acceptance_08_and_cost_01_is_two_to_three_times_as_fast(stub_model, clock: Clock) -> None:
    random = np.random.default_rng(0)

    def mostly_right(ids: list[int]) -> np.ndarray:
        return mixed(ids) if random.random() < 0.8 else wrong(ids)

    taken, engine = seconds(stub_model, clock, mostly_right, 400)
    assert engine.speculation.stats.acceptance_rate > 0.5
    assert 2.0 < 400 / taken < 3.0


def test_a_useless_draft_costs_little_and_is_tried_again_ever_later(stub_model, clock: Clock) -> None:
    taken, engine = seconds(stub_model, clock, wrong, 512, cost=0.34)
    stats = engine.speculation.stats
    assert taken - stats.prefill_s < 512 * 1.03
    assert stats.plain_steps > 480
    assert stats.rounds >= 3


STAIRS = (1.0, 1.02, 1.35, 1.1, 1.35, 1.4, 1.6, 1.2)


class Wrong(NgramDrafter):
    """Finds what others find, and says something else."""

    def propose(self, wishes, chance):
        drafts = super().propose(wishes, chance)
        return [[dataclasses.replace(each, token_id=(each.token_id + 1) % VOCAB) for each in draft] for draft in drafts]


@pytest.mark.parametrize(("drafter", "least", "most"), [(NgramDrafter, 4.0, 6.7), (Wrong, 0.97, 1.0)])
def test_ngrams_pay_where_a_text_repeats_itself_and_cost_little_where_they_are_wrong(
    stub_model, clock: Clock, drafter: type[NgramDrafter], least: float, most: float
) -> None:
    """A text of 40 tokens again and again, on kernels that are slower for three tokens than for four."""
    text = np.random.default_rng(3).integers(0, VOCAB, 40).tolist()
    target = stub_model(lambda ids: np.eye(VOCAB)[text[len(ids) % 40]], context_length=700, max_cache_bytes=1 << 26)
    forward = target.decoder.forward

    def timed_forward(batch, cache, rows):
        clock.now += STAIRS[min(len(batch.token_ids), 8) - 1]
        return forward(batch, cache, rows)

    target.decoder.forward = timed_forward
    engine = Engine(target, speculation=Speculation(drafter()))
    engine.add(text * 2, SamplingParams(temperature=0, max_tokens=513))
    engine.step()
    begin = clock.now
    drain(engine)
    assert least <= 512 / (clock.now - begin) <= most
    assert engine.speculation.stats.speedup == pytest.approx(512 / (clock.now - begin), rel=0.01)


def test_ngrams_are_not_asked_where_asking_takes_longer_than_it_brings(stub_model, clock: Clock) -> None:
    class Slow(NgramDrafter):
        def propose(self, wishes, chance):
            clock.now += 0.3
            return super().propose(wishes, chance)

    target = timed(clock, stub_model(mixed, context_length=700, max_cache_bytes=1 << 26), 1.0, 0.02)
    engine = Engine(target, speculation=Speculation(Slow()))
    completion(engine, PROMPT, SamplingParams(temperature=0, max_tokens=513))
    stats = engine.speculation.stats
    assert 0 < stats.draft_s < 512 * 0.03


def test_a_draft_that_turns_good_is_taken_up_again(stub_model, clock: Clock) -> None:
    def late(ids: list[int]) -> np.ndarray:
        return wrong(ids) if len(ids) < 30 else mixed(ids)

    taken, engine = seconds(stub_model, clock, late, 400)
    assert engine.speculation.stats.accepted > 200
    assert taken < 250


def test_what_drafting_brings_to_a_batch_is_measured_by_its_own_plain_steps(stub_model, clock: Clock) -> None:
    """Three sequences in a plain step of 1.04; drafts of no cost that are right: a round of four tokens each takes 1.22."""
    target = timed(clock, stub_model(mixed), 1.0, 0.02)
    drafter = ModelDrafter(stub_model(mixed), num_tokens=VOCAB, cost=0.0, longest=3, max_num_seqs=3)
    engine = Engine(target, max_num_seqs=3, speculation=Speculation(drafter, longest=3, fixed=True))
    sequences = [engine.add([start, 1], SamplingParams(temperature=0, max_tokens=42)) for start in (3, 5, 7)]
    drain(engine)
    assert [len(sequence.completion_token_ids) for sequence in sequences] == [42] * 3
    stats = engine.speculation.stats
    assert (stats.plain_steps, stats.plain_tokens, stats.rounds, stats.round_tokens) == (1, 3, 10, 3 * 40)
    assert stats.undrafted_s == pytest.approx(40 * 1.04)
    assert stats.speedup == pytest.approx(41 * 1.04 / (1.04 + 10 * 1.22))


def test_pages_of_a_text_with_drafts_are_found_again(stub_model) -> None:
    engine = speculative(stub_model, right_sometimes)
    text = completion(engine, PROMPT, GREEDY)
    sequence = engine.add(PROMPT + text, GREEDY)
    drain(engine)
    assert sequence.num_cached_tokens == len(PROMPT) + len(text) - 1
    assert sequence.completion_token_ids == plain(stub_model, prompt=PROMPT + text)

"""Sampling against distributions computed by hand."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.errors import LlmctlError, UsageError
from llmctl.kernels import sample
from llmctl.kernels.sample import _numpy
from llmctl.runtime.sampling import ranking, sampler
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.penalties import apply_penalties
from llmctl.runtime.sampling.ranking import draw_from_all
from llmctl.runtime.sampling.sampler import Sampler

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def candidates(row: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logits that may be drawn, most likely first."""
    pool = Sampler(params).candidates(row, [])
    return list(pool.ranked())[-1]


def penalized(row: np.ndarray, params: SamplingParams, token_ids: list[int]) -> list[float]:
    apply_penalties(row, params, token_ids)
    return row.tolist()


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    return weights / weights.sum()


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32))


@pytest.mark.parametrize("temperature", [0, 1e-8])
def test_temperature_zero_and_nearly_zero_are_greedy(temperature: float) -> None:
    sampler = Sampler(SamplingParams(temperature=temperature, num_logprobs=3))
    for _ in range(20):
        token = sampler.sample(logits(0.5, 3.1, 2.7), [])
        assert token.token_id == 1
        assert all(math.isfinite(value) for value in token.top_logprobs.values())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", 10**400),
        ("top_k", 10**400),
        ("top_k", -1),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0),
        ("repetition_window", -2),
        ("max_tokens", -1),
        ("seed", -1),
        ("presence_penalty", math.inf),
    ],
)
def test_senseless_values_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


def test_nan_bias_is_refused() -> None:
    with pytest.raises(UsageError, match="token 3"):
        SamplingParams(logit_bias={3: math.nan})


def test_top_k_keeps_the_largest_and_breaks_ties_by_id() -> None:
    ids, _ = candidates(logits(1, 5, 5, 5, 0), SamplingParams(**{**OFF, "top_k": 2}))
    assert ids.tolist() == [1, 2]


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    values = logs(0.5, 0.3, 0.15, 0.05)
    assert candidates(values, SamplingParams(**{**OFF, "top_p": 0.79}))[0].tolist() == [0, 1]
    assert candidates(values, SamplingParams(**{**OFF, "top_p": 0.81}))[0].tolist() == [0, 1, 2]
    assert candidates(values, SamplingParams(**{**OFF, "top_p": 0.0}))[0].tolist() == [0]


def test_min_p_is_relative_to_the_best() -> None:
    ids, _ = candidates(logs(0.6, 0.3, 0.07, 0.03), SamplingParams(**{**OFF, "min_p": 0.1}))
    assert ids.tolist() == [0, 1, 2]


def test_top_p_comes_after_top_k() -> None:
    """Among the two best, 0.4 / 0.7 of the mass is already above 0.55, so one is left; top-p first would keep two."""
    ids, _ = candidates(logs(0.4, 0.3, 0.2, 0.1), SamplingParams(**{**OFF, "top_k": 2, "top_p": 0.55}))
    assert ids.tolist() == [0]


def test_temperature_is_applied_last() -> None:
    """A high temperature must not let tokens through that top-p has cut."""
    sampler = Sampler(SamplingParams(temperature=100.0, top_k=0, top_p=0.5, min_p=0.0, seed=1))
    assert {sampler.sample(logs(0.9, 0.05, 0.05), []).token_id for _ in range(50)} == {0}


def test_repetition_penalty_pushes_down_on_both_sides_of_zero() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    assert penalized(logits(4, -4, 4), params, [0, 1]) == [2, -8, 4]


def test_presence_and_frequency_count_the_window_only() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_window=3)
    assert penalized(logits(0, 0, 0), params, [2, 2, 0, 1, 1]) == [-1.5, -2.0, 0]


def test_window_zero_is_off_and_minus_one_is_everything() -> None:
    none, everything = (SamplingParams(presence_penalty=1.0, repetition_window=w) for w in (0, -1))
    assert penalized(logits(0, 0), none, [0, 1]) == [0, 0]
    assert penalized(logits(0, 0), everything, [0, *[1] * 200]) == [-1, -1]


def test_logit_bias_can_force_and_forbid() -> None:
    force = Sampler(SamplingParams(temperature=0, logit_bias={2: 100.0, 999: 5.0}))
    forbid = Sampler(SamplingParams(**OFF, logit_bias={0: -math.inf}, seed=3))
    assert force.sample(logits(5, 1, 0), []).token_id == 2
    assert 0 not in {forbid.sample(logits(50, 1, 0), []).token_id for _ in range(50)}


def test_sampling_leaves_the_logits_alone() -> None:
    values = logits(1, 2, 3)
    Sampler(SamplingParams(repetition_penalty=3.0, logit_bias={0: 9.0})).sample(values, [0, 1, 2])
    assert values.tolist() == [1, 2, 3]


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 draws from four tokens; the 99.9 % point at 3 degrees of freedom is 16.27."""
    expected = np.array([0.5, 0.3, 0.15, 0.05])
    sampler = Sampler(SamplingParams(**OFF, seed=11))
    counts = Counter(sampler.sample(logs(*expected), []).token_id for _ in range(20_000))
    observed = np.array([counts[i] for i in range(4)])
    assert ((observed - 20_000 * expected) ** 2 / (20_000 * expected)).sum() < 16.27


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    values = np.zeros(1000, dtype=np.float32)

    def draw(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(**OFF, seed=seed))
        return [sampler.sample(values, []).token_id for _ in range(8)]

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
    assert draw(None) != draw(None)


def test_logprobs_are_of_the_untouched_distribution() -> None:
    sampler = Sampler(SamplingParams(temperature=0, logit_bias={2: 50.0}, num_logprobs=2))
    token = sampler.sample(logs(0.7, 0.2, 0.1), [])
    assert token.token_id == 2
    assert token.logprob == pytest.approx(math.log(0.1), abs=1e-5)
    assert list(token.top_logprobs) == [0, 1]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_there_is_always_a_token_and_it_is_a_candidate(
    values: list[float], top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    row = logits(*values)
    ids, kept = candidates(row, params)
    assert len(ids) >= 1
    assert kept[0] == row.max()
    assert Sampler(params).sample(row, []).token_id in ids
    assert softmax(kept).sum() == pytest.approx(1.0)


def sorted_whole(row: np.ndarray, top_p: float, min_p: float) -> list[int]:
    """The candidates without top-k by their definition, over the whole vocabulary sorted."""
    order = np.argsort(-row, kind="stable")
    order = order[row[order] > -np.inf]
    relative = np.exp(row[order].astype(np.float64) - float(row.max()))
    before = np.concatenate([[0.0], relative.cumsum()[:-1]]) / relative.sum()
    by_top_p = before < top_p if top_p < 1 else np.ones(len(order), bool)
    by_min_p = relative >= min_p * (1 - 1e-9)
    return order[: max(1, int(min(by_top_p.sum(), by_min_p.sum())))].tolist()


@pytest.mark.parametrize("ranks", [(1, 2), (7, 3), (256, 8)], ids=str)
@pytest.mark.parametrize("top_k", [sample.top_k, _numpy.top_k], ids=["native", "numpy"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_candidates_without_top_k_are_those_of_the_whole_vocabulary(
    monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, int], top_k: object, spread: float
) -> None:
    monkeypatch.setattr(ranking, "_FIRST_RANKS", ranks[0])
    monkeypatch.setattr(ranking, "_MORE_RANKS", ranks[1])
    monkeypatch.setattr(ranking, "top_k", top_k)
    random = np.random.default_rng(4)
    row = (random.normal(size=3001) * spread).astype(np.float32)
    row[random.integers(0, 3001, 500)] = row[7]  # many are equal
    row[random.integers(0, 3001, 200)] = -np.inf
    for top_p, min_p in [(0.1, 0), (0.5, 0), (0.95, 0), (0.999, 0), (1, 0.5), (1, 1e-3), (1, 1e-30), (0.9, 0.05), (1, 0)]:
        params = SamplingParams(top_k=0, top_p=top_p, min_p=min_p, temperature=1.0)
        ids, kept = candidates(row, params)
        assert ids.tolist() == sorted_whole(row, top_p, min_p), (top_p, min_p)
        assert kept.tolist() == row[ids].tolist()


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=60), st.floats(0, 1, exclude_max=True))
def test_a_draw_from_all_is_that_of_the_sorted_vocabulary(values: list[float], uniform: float) -> None:
    row = logits(*values)
    order = np.argsort(-row, kind="stable")
    cumulative = softmax(row[order]).cumsum()
    rank = min(int(cumulative.searchsorted(uniform * cumulative[-1], side="right")), len(order) - 1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranking, "_FIRST_RANKS", 1)
        drawn = order.tolist().index(draw_from_all(row, uniform))
    # Sums in another order differ in their last bits: at the very border of two tokens either may be drawn.
    assert drawn == rank or abs(cumulative[min(drawn, rank)] / cumulative[-1] - uniform) < 1e-12


def test_minus_infinity_everywhere_but_one_is_no_trouble() -> None:
    row = logits(-math.inf, -math.inf, 0.5, -math.inf)
    for params in (SamplingParams(seed=1), SamplingParams(temperature=0), SamplingParams(**OFF, seed=1)):
        assert Sampler(params).sample(row, []).token_id == 2


def test_not_a_number_is_an_error_not_a_token() -> None:
    with pytest.raises(LlmctlError, match="not numbers"):
        Sampler(SamplingParams(temperature=0)).sample(logits(1, math.nan), [])


@pytest.mark.parametrize("row", [[1, math.nan], [math.nan, 1], [5, 1, math.nan, 0]])
@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 2}, {"logit_bias": {0: 1.0}}])
def test_not_a_number_is_an_error_for_every_kind_of_draw(row: list[float], params: dict[str, object]) -> None:
    with pytest.raises(LlmctlError, match="not numbers"):
        Sampler(SamplingParams(**params)).sample(logits(*row), [])


def test_the_token_has_the_same_logprob_in_both_places() -> None:
    token = Sampler(SamplingParams(temperature=0, num_logprobs=1)).sample(logits(0.1, 0.7, 0.3), [])
    assert token.top_logprobs == {1: token.logprob}
    assert Sampler(SamplingParams(temperature=0, num_logprobs=0)).sample(logits(0.1), []).top_logprobs == {}


def plain_draw(row: np.ndarray, params: SamplingParams, random: np.random.Generator) -> int:
    """A draw that sorts and weighs the whole vocabulary, by the definitions of the parameters."""
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    order = [i for i in order if row[i] > -math.inf]
    order = order[: params.top_k or len(order)]
    weights = np.exp(row[order].astype(np.float64) - float(row.max()))
    before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
    order = order[: max(1, int((before < params.top_p).sum()))] if params.top_p < 1 else order
    floor = row[order[0]] + math.log(params.min_p) if params.min_p else -math.inf
    order = [i for i in order if row[i] >= floor]
    weights = np.exp((row[order] / np.float32(params.temperature)).astype(np.float64))
    cumulative = np.cumsum(weights / weights.sum())
    return order[int(np.searchsorted(cumulative, random.random() * cumulative[-1], side="right"))]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("params", [{}, {"top_k": 0}, {"top_k": 7, "top_p": 1.0}, {"top_k": 500, "min_p": 0.0}, {"top_p": 0.3}])
def test_draws_are_those_of_a_plain_computation(native: bool, params: dict[str, object], monkeypatch) -> None:
    if not native:
        for module, names in ((ranking, ("argmax", "top_k")), (sampler, ("top_k",))):
            for name in names:
                monkeypatch.setattr(module, name, getattr(_numpy, name))
    chosen = SamplingParams(seed=4, **params)
    drawing, random = Sampler(chosen), np.random.Generator(np.random.PCG64(4))
    source = np.random.default_rng(1)
    for _ in range(60):
        row = source.normal(0, 3, 2000).astype(np.float32)
        row[source.integers(0, 2000, 50)] = -np.inf
        assert drawing.sample(row, []).token_id == plain_draw(row, chosen, random)

"""Each step against its definition, written out over the whole vocabulary; then their order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from llmctl.errors import LlmctlError, UsageError
from llmctl.runtime.sampling import ranking
from llmctl.runtime.sampling.params import STEPS, SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def logs(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, dtype=np.float32))


def left(row: np.ndarray, token_ids: list[int] = [], **values: object) -> dict[int, float]:  # noqa: B006 (only read)
    """Id → probability of what may be drawn, most likely first."""
    pool = Sampler(SamplingParams(**{**OFF, "seed": 1, **values})).candidates(row, token_ids)
    ids = np.arange(len(row)) if pool.ids is None else pool.ids
    weights = np.exp(pool.logits.astype(np.float64) - float(pool.logits.max()))
    order = np.lexsort((ids, -weights))
    return {int(ids[i]): float(weights[i] / weights.sum()) for i in order if weights[i] > 0}


# --- typical, by hand and by definition -------------------------------------------------------------------------------


def test_typical_leaves_what_surprises_as_much_as_expected() -> None:
    """Entropy of (0.5, 0.25, 0.125, 0.125) is 1.75 bits: the surprise of 2 bits is nearest, then 1, then 3."""
    row = logs(0.5, 0.25, 0.125, 0.125)
    assert list(left(row, typical_p=0.2)) == [1]
    assert list(left(row, typical_p=0.3)) == [0, 1]
    assert list(left(row, typical_p=0.8)) == [0, 1, 2]


def typical_by_definition(row: np.ndarray, p: float) -> list[int]:
    probabilities = np.exp(row.astype(np.float64) - float(row.max()))
    probabilities /= probabilities.sum()
    surprise = np.array([-math.log(x) if x > 0 else math.inf for x in probabilities])
    entropy = sum(x * s for x, s in zip(probabilities, surprise, strict=True) if x > 0)
    order = sorted((i for i in range(len(row)) if probabilities[i] > 0), key=lambda i: abs(surprise[i] - entropy))
    chosen, mass = [], 0.0
    for i in order:
        chosen.append(i)
        mass += probabilities[i]
        if mass >= p:
            break
    return sorted(chosen, key=lambda i: (-row[i], i))


@pytest.mark.parametrize("first_ranks", [1, 256])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_typical_is_its_definition(monkeypatch: pytest.MonkeyPatch, first_ranks: int, p: float, spread: float) -> None:
    monkeypatch.setattr(ranking, "_FIRST_RANKS", first_ranks)
    row = (np.random.default_rng(3).normal(size=700) * spread).astype(np.float32)
    row[::9] = -np.inf
    assert list(left(row, typical_p=p)) == typical_by_definition(row, p)


# --- XTC --------------------------------------------------------------------------------------------------------------


def test_xtc_drops_the_top_but_for_the_last_above_the_threshold() -> None:
    row = logs(0.4, 0.3, 0.2, 0.06, 0.04)
    assert list(left(row, xtc_probability=1.0, xtc_threshold=0.1)) == [2, 3, 4]
    assert list(left(row, xtc_probability=1.0, xtc_threshold=0.35)) == [0, 1, 2, 3, 4]  # one alone is no choice
    assert list(left(row, xtc_probability=1.0, xtc_threshold=0.25, top_k=4)) == [1, 2, 3]
    assert left(row, xtc_probability=1.0, xtc_threshold=0.1)[2] == pytest.approx(0.2 / 0.3)


def test_xtc_strikes_as_often_as_it_is_told() -> None:
    sampler = Sampler(SamplingParams(**OFF, xtc_probability=0.3, xtc_threshold=0.1, seed=2))
    row = logs(0.5, 0.5)  # where it strikes, token 0 cannot come
    sizes = [int(np.isfinite(sampler.candidates(row, []).logits).sum()) for _ in range(4000)]
    assert sizes.count(1) / 4000 == pytest.approx(0.3, abs=0.03)


def test_temperature_zero_takes_the_likeliest_that_xtc_left() -> None:
    params = SamplingParams(temperature=0, xtc_probability=1.0, xtc_threshold=0.1)
    assert not params.is_greedy
    assert Sampler(params).sample(logs(0.5, 0.3, 0.2), []).token_id == 2


# --- mirostat ---------------------------------------------------------------------------------------------------------


def mirostat_by_definition(rows: list[np.ndarray], tau: float, eta: float, seed: int) -> list[int]:
    """Algorithm 2 of the paper, drawing as the sampler does."""
    random, limit, drawn = np.random.Generator(np.random.PCG64(seed)), 2 * tau, []
    for row in rows:
        order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
        probabilities = np.exp(row[order].astype(np.float64))
        probabilities /= probabilities.sum()
        keep = max(1, sum(-math.log2(p) <= limit for p in probabilities))
        kept = probabilities[:keep] / probabilities[:keep].sum()
        chosen = min(int(np.searchsorted(kept.cumsum(), random.random(), side="right")), keep - 1)
        limit -= eta * (-math.log2(kept[chosen]) - tau)
        drawn.append(order[chosen])
    return drawn


@pytest.mark.parametrize("tau", [0.0, 2.0, 5.0])
def test_mirostat_is_its_definition(tau: float) -> None:
    source = np.random.default_rng(5)
    rows = [(source.normal(size=400) * 2).astype(np.float32) for _ in range(80)]
    sampler = Sampler(SamplingParams(temperature=1.0, mirostat_tau=tau, mirostat_eta=0.2, seed=9))
    assert [sampler.sample(row, []).token_id for row in rows] == mirostat_by_definition(rows, tau, 0.2, 9)


def test_mirostat_makes_its_own_cut() -> None:
    assert SamplingParams(mirostat_tau=5.0, top_k=1).steps == ("temperature", "mirostat")


# --- DRY --------------------------------------------------------------------------------------------------------------


def dry_by_definition(token_ids: list[int], params: SamplingParams) -> dict[int, float]:
    """Penalty of every token: for each earlier place followed by it, how long the text before it and the end agree."""
    recent = token_ids if params.dry_window < 0 else token_ids[len(token_ids) - min(params.dry_window, len(token_ids)) :]
    longest: dict[int, int] = {}
    for end in range(len(recent) - 1):
        length = 0
        while length <= end and recent[end - length] == recent[-1 - length] and recent[-1 - length] not in params.dry_breakers:
            length += 1
        if recent[end + 1] not in params.dry_breakers:
            longest[recent[end + 1]] = max(length, longest.get(recent[end + 1], 0))
    allowed = params.dry_allowed_length
    return {i: params.dry_multiplier * params.dry_base ** (n - allowed) for i, n in longest.items() if n >= allowed}


def dry(token_ids: list[int], **values: object) -> dict[int, float]:
    row = np.zeros(12, np.float32)
    params = SamplingParams(**{**OFF, "dry_multiplier": 0.8, **values})
    pool = Sampler(params).candidates(row, token_ids)
    return {i: -float(value) for i, value in enumerate(pool.logits) if value != 0}


def test_dry_penalizes_the_token_that_would_repeat() -> None:
    assert dry([1, 2, 3, 4, 1, 2, 3]) == {4: pytest.approx(0.8 * 1.75)}  # three tokens, two allowed
    assert dry([1, 2, 3, 4, 9, 2, 3]) == {4: pytest.approx(0.8)}
    assert dry([1, 2, 3, 4, 9, 9, 3]) == {}
    assert dry([1, 2, 3, 4, 1, 2, 3], dry_breakers=frozenset([2])) == {}
    assert dry([1, 2, 3, 4, 1, 2, 3], dry_breakers=frozenset([4])) == {}
    assert dry([1, 2, 3, 4, 1, 2, 3], dry_breakers=frozenset([3])) == {}
    assert dry([1, 2, 3, 4, 1, 2, 3], dry_window=3) == {}
    assert dry([1, 2, 3, 4, 1, 2, 3], dry_window=0) == {}
    assert dry([5]) == dry([]) == {}


@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_dry_is_its_definition(window: int, allowed: int) -> None:
    source = np.random.default_rng(7)
    for _ in range(40):
        token_ids = source.integers(0, 3, source.integers(1, 60)).tolist()
        breakers = frozenset(source.integers(0, 12, 1).tolist())
        values = {"dry_window": window, "dry_allowed_length": allowed, "dry_breakers": breakers, "dry_base": 1.3}
        expected = dry_by_definition(token_ids, SamplingParams(dry_multiplier=0.8, **values))
        assert dry(token_ids, **values) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("base", [1.0, 1.75, 1e6])
def test_dry_of_a_loop_stays_finite(base: float) -> None:
    (penalty,) = dry([1] * 5000, dry_base=base).values()
    assert math.isfinite(penalty)
    assert penalty == pytest.approx(0.8) if base == 1.0 else penalty > 1e5


# --- order ------------------------------------------------------------------------------------------------------------


def by_definition(row: np.ndarray, names: tuple[str, ...], params: SamplingParams) -> dict[int, float]:
    """Every step over all tokens that are left, sorted anew before each."""
    kept = {i: float(x) for i, x in enumerate(row)}
    for name in names:
        kept = dict(sorted(kept.items(), key=lambda item: (-item[1], item[0])))
        ids, weights = list(kept), np.exp(np.array(list(kept.values())) - max(kept.values()))
        weights /= weights.sum()
        if name == "top_k":
            ids = ids[: params.top_k]
        elif name == "top_p":
            ids = [i for i, before in zip(ids, weights.cumsum() - weights, strict=True) if before < params.top_p - 1e-12]
        elif name == "min_p":
            ids = [i for i, weight in zip(ids, weights, strict=True) if weight >= params.min_p * weights[0]]
        elif name == "xtc":
            ids = ids[max(0, sum(weights >= params.xtc_threshold) - 1) :]
        elif name == "temperature":
            kept = {i: x / params.temperature for i, x in kept.items()}
        elif name == "penalties":
            kept = {i: x - params.presence_penalty * (i in SEEN) for i, x in kept.items()}
        kept = {i: kept[i] for i in ids}
    values = np.exp(np.array(list(kept.values())) - max(kept.values()))
    return dict(zip(kept, (values / values.sum()).tolist(), strict=True))


SEEN = [0, 3, 4, 17, 25]
NAMES = ("penalties", "top_k", "top_p", "min_p", "xtc", "temperature")


@pytest.mark.parametrize("seed", range(40))
def test_steps_are_taken_in_the_order_given(seed: int) -> None:
    source = np.random.default_rng(seed)
    names = tuple(source.permutation(NAMES)[: source.integers(1, 7)].tolist())
    row = (source.normal(size=60) * 2).astype(np.float32)
    params = SamplingParams(
        temperature=1.7,
        top_k=12,
        top_p=0.83,
        min_p=0.07,
        presence_penalty=2.5,
        xtc_probability=1.0,
        xtc_threshold=0.08,
        samplers=names,
    )
    pool = Sampler(params).candidates(row, SEEN)
    ids = np.arange(len(row)) if pool.ids is None else pool.ids
    weights = np.exp(pool.logits.astype(np.float64) - float(pool.logits.max()))
    got = {int(i): float(w / weights.sum()) for i, w in zip(ids, weights, strict=True) if w > 0}
    assert got == pytest.approx(by_definition(row, names, params), rel=1e-4)


def test_a_step_that_is_left_out_is_off() -> None:
    row = logs(0.6, 0.3, 0.1)
    assert list(left(row, top_k=1, samplers=())) == [0, 1, 2]
    assert not SamplingParams(temperature=0, samplers=("top_p",)).is_greedy
    assert SamplingParams(temperature=0, samplers=("top_p", "temperature")).is_greedy


def test_greedy_with_penalties_after_a_cut_keeps_the_order() -> None:
    row = logs(0.5, 0.4, 0.1)
    values = {"top_k": 1, "presence_penalty": 5.0, "temperature": 0.0}
    first = SamplingParams(**values, samplers=("penalties", "top_k", "temperature"))
    last = SamplingParams(**values, samplers=("top_k", "penalties", "temperature"))
    assert Sampler(first).sample(row, [0]).token_id == 1
    assert Sampler(last).sample(row, [0]).token_id == 0


@pytest.mark.parametrize(
    ("samplers", "words"),
    [(("top_k", "heat"), "no step 'heat'; there are: penalties, dry"), (("top_k", "min_p", "top_k"), "top_k is named twice")],
)
def test_an_order_that_cannot_be(samplers: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SamplingParams(samplers=samplers)


def test_the_order_is_the_documented_one() -> None:
    assert STEPS == ("penalties", "dry", "top_k", "typical", "top_p", "min_p", "xtc", "temperature")
    assert SamplingParams().steps == ("top_k", "top_p", "min_p", "temperature")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("typical_p", 1.5),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 2),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 0),
        ("dry_window", -2),
        ("mirostat_tau", -1),
        ("mirostat_eta", 1.5),
    ],
)
def test_values_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        SamplingParams(**{name: value})


# --- constraints ------------------------------------------------------------------------------------------------------


class Only:
    """Allows these tokens, and remembers what came."""

    def __init__(self, *allowed: int) -> None:
        self.allowed, self.seen, self.is_complete = list(allowed), [], True

    def forbid(self, logits: np.ndarray) -> None:
        others = np.ones(len(logits), bool)
        others[self.allowed] = False
        logits[others] = -np.inf

    def accept(self, token_id: int) -> None:
        self.seen.append(token_id)


def only(*allowed: int) -> tuple[list[Only], Callable[[], Only]]:
    made: list[Only] = []

    def make() -> Only:
        made.append(Only(*allowed))
        return made[-1]

    return made, make


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {}, {"top_k": 0}, {"top_k": 1}, {"mirostat_tau": 3.0}, {"typical_p": 0.5}]
)
def test_a_constraint_holds_for_every_kind_of_draw(values: dict[str, object]) -> None:
    made, make = only(3, 5)
    sampler = Sampler(SamplingParams(constraints=(make,), logit_bias={7: 50.0}, seed=1, num_logprobs=1, **values))
    row = np.arange(10, dtype=np.float32)
    drawn = [sampler.sample(row, []) for _ in range(20)]
    assert {token.token_id for token in drawn} <= {3, 5}
    assert [token.token_id for token in drawn] == made[0].seen
    assert list(drawn[0].top_logprobs) == [9]  # the model's own opinion
    assert row.tolist() == list(range(10))


def test_every_sequence_has_its_own_constraint() -> None:
    made, make = only(1)
    params = SamplingParams(constraints=(make,))
    assert (
        Sampler(params).sample(np.zeros(4, np.float32), []).token_id
        == Sampler(params).sample(np.zeros(4, np.float32), []).token_id
    )
    assert [constraint.seen for constraint in made] == [[1], [1]]


def test_constraints_that_exclude_each_other_are_an_error() -> None:
    params = SamplingParams(constraints=(only(1)[1], only(2)[1]))
    with pytest.raises(LlmctlError, match="exclude each other"):
        Sampler(params).sample(np.zeros(4, np.float32), [])

"""Types within a budget: the best choice, real sizes, measured slopes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from llmctl.errors import UsageError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.budget import Group, Option, Probe, assign, measure_slopes, slopes

TYPES = ["Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def group(name: str, elements: int, slope: float) -> Group:
    """The loss falls fourfold with every bit."""
    forms = [FORMATS[name] for name in TYPES]
    options = [Option(form, form.row_bytes(elements), slope * 4.0**-form.bits_per_weight) for form in forms]
    return Group((name,), tuple(options))


def least_cost(groups: list[Group], budget: int) -> float:
    """By trying everything."""
    every = itertools.product(*(group.options for group in groups))
    return min(sum(o.cost for o in picked) for picked in every if sum(o.nbytes for o in picked) <= budget)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.9, 1.0])
def test_no_other_choice_that_fits_costs_less(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    groups = [group(str(i), 256 * int(rng.integers(1, 400)), float(rng.lognormal(0, 2))) for i in range(6)]
    sizes = [[o.nbytes for o in group.options] for group in groups]
    smallest, largest = sum(map(min, sizes)), sum(map(max, sizes))
    budget = smallest + int(share * (largest - smallest))
    found = assign(groups, budget)
    assert found.nbytes <= budget
    assert found.cost == pytest.approx(least_cost(groups, budget), rel=1e-9)


def test_bits_go_where_the_slope_is() -> None:
    quiet, loud = group("quiet", 2560, 1.0), group("loud", 2560, 100.0)
    middle = 2 * FORMATS["Q4_K"].row_bytes(2560)
    formats = assign([quiet, loud], middle).formats
    assert FORMATS["Q3_K"] == formats["quiet"]
    assert FORMATS["Q5_K"].bits_per_weight <= formats["loud"].bits_per_weight


def test_matrices_of_a_group_have_one_type() -> None:
    fused = Group(("q", "k", "v"), group("q", 2560, 1.0).options)
    formats = assign([fused, group("o", 2560, 50.0)], 3600).formats
    assert formats["q"] == formats["k"] == formats["v"]
    assert set(formats) == {"q", "k", "v", "o"}


def test_a_larger_type_that_costs_more_is_never_taken() -> None:
    odd = Group(("odd",), (Option(FORMATS["Q4_0"], 100, 1.0), Option(FORMATS["Q5_0"], 120, 2.0)))
    assert assign([odd], 1000).formats["odd"] == FORMATS["Q4_0"]


def test_many_groups_and_a_budget_to_the_byte() -> None:
    rng = np.random.default_rng(0)
    groups = [group(str(i), 256 * int(rng.integers(1, 90000)), float(rng.lognormal(0, 2))) for i in range(200)]
    exact = assign(groups, sum(g.options[1].nbytes for g in groups))
    uniform = sum(g.options[1].cost for g in groups)
    assert exact.nbytes <= sum(g.options[1].nbytes for g in groups)
    assert exact.nbytes > 0.9995 * sum(g.options[1].nbytes for g in groups)
    assert exact.cost < 0.8 * uniform


def test_a_budget_that_nothing_fits_is_refused_with_both_figures() -> None:
    with pytest.raises(UsageError, match=r"need 1100 bytes in their smallest types, and only 1099"):
        assign([group("a", 2560, 1.0)], 1099)


def test_slopes_are_divergence_above_the_noise_by_loss() -> None:
    probes = {"a": Probe(2.0, 0.5), "b": Probe(4.0, 0.3), "c": Probe(1.0, 0.05), "d": Probe(0.0, 0.2)}
    found = slopes(probes, floor=0.1)
    assert found["a"] == pytest.approx(0.2)
    assert found["b"] == pytest.approx(0.05)
    assert found["c"] == found["d"] == pytest.approx(0.125)  # the median


def test_measured_slopes_tell_a_sensitive_group_from_a_dull_one() -> None:
    weights = {"sharp": np.ones(4, np.float32), "dull": np.ones(4, np.float32)}

    def divergence(changed) -> float:
        return 0.01 + sum(
            (10.0 if name == "sharp" else 0.1) * float(((w - weights[name]) ** 2).sum()) for name, w in changed.items()
        )

    def rounding(name: str, by: float):
        return lambda: (4 * by * by, {name: weights[name] + np.float32(by)})

    found = measure_slopes({"sharp": rounding("sharp", 0.1), "dull": rounding("dull", 0.5)}, divergence)
    assert found["sharp"] == pytest.approx(10, rel=1e-5)
    assert found["dull"] == pytest.approx(0.1, rel=1e-5)

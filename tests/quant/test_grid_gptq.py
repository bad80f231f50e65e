"""GPTQ on GGUF's grids: never worse than rounding to nearest, bytes that say what was searched, and awkward input."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.descent import Descent
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.grids import GRIDS
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import grid_gptq
from llmctl.quant.grid_gptq import loss, solve

ROWS, COLUMNS = 40, 512
each_grid = pytest.mark.parametrize("name", list(GRIDS))


def weight(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((rows, COLUMNS)).astype(np.float32)


def hessian(seed: int = 1, tokens: int = 900) -> np.ndarray:
    """Of inputs with a few loud channels, each like its neighbour."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((tokens, COLUMNS)).astype(np.float32) * rng.lognormal(0, 1, COLUMNS).astype(np.float32)
    inputs[:, 1:] += np.float32(0.7) * inputs[:, :-1]
    return inputs.T @ inputs / np.float32(tokens)


def rounded_loss(name: str, importance: np.ndarray | None) -> float:
    return loss(weight(), dequantize(quantize(weight(), FORMATS[name], importance)), hessian())


@each_grid
@pytest.mark.parametrize("weighted", [True, False])
def test_the_loss_is_far_below_that_of_rounding_to_nearest(name: str, weighted: bool) -> None:
    importance = np.diagonal(hessian()).copy() if weighted else None
    found = loss(weight(), dequantize(solve(weight(), hessian(), FORMATS[name], importance)), hessian())
    assert found < 0.6 * rounded_loss(name, importance)


@each_grid
def test_no_row_is_worse_than_rounded_to_nearest_even_with_a_hessian_of_few_tokens(name: str) -> None:
    few = hessian(tokens=40)  # far from full rank
    nearest, found = (dequantize(tensor) for tensor in (quantize(weight(), FORMATS[name]), solve(weight(), few, FORMATS[name])))
    for row in range(ROWS):
        one = slice(row, row + 1)
        assert loss(weight()[one], found[one], few) <= loss(weight()[one], nearest[one], few) * (1 + 1e-5)


@each_grid
def test_the_bytes_are_the_weights_that_were_searched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    descend = Descent.descend

    def watched(self, wanted, hessian, levels, grid, passes):
        descend(self, wanted, hessian, levels, grid, passes)
        searched.append(grid.values(levels).T)

    monkeypatch.setattr(Descent, "descend", watched)
    found = dequantize(solve(weight(), hessian(), FORMATS[name]))
    same = (found == searched[0]).all(axis=1)
    assert same.mean() > 0.9  # the rest are rows where rounding to nearest was better
    nearest = dequantize(quantize(weight(), FORMATS[name]))
    assert np.array_equal(found[~same], nearest[~same])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K"])
def test_each_stage_of_the_search_helps(name: str) -> None:
    losses = [
        loss(weight(), dequantize(solve(weight(), hessian(), FORMATS[name], passes=passes)), hessian()) for passes in (0, 1, 6)
    ]
    assert losses[1] < 0.97 * losses[0]
    assert losses[2] < 0.995 * losses[1]


def test_threads_and_row_ranges_do_not_change_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = solve(weight(), hessian(), FORMATS["Q4_K"], threads=2).blocks
    monkeypatch.setattr(grid_gptq, "_ELEMENTS", 16 * COLUMNS)
    assert (solve(weight(), hessian(), FORMATS["Q4_K"]).blocks == whole).mean() > 0.999  # products may add in another order


def test_columns_without_input_stay_close_to_the_weight() -> None:
    silent = hessian()
    silent[:, 32:64] = silent[32:64] = 0
    found = dequantize(solve(weight(), silent, FORMATS["Q4_0"])) - weight()
    nearest = dequantize(quantize(weight(), FORMATS["Q4_0"])) - weight()
    assert np.linalg.norm(found[:, 32:64]) <= np.linalg.norm(nearest[:, 32:64])
    assert np.linalg.norm(found[:, :32]) > np.linalg.norm(nearest[:, :32])  # others give way to each other


@pytest.mark.parametrize("useless", [np.zeros((COLUMNS, COLUMNS)), np.full((COLUMNS, COLUMNS), np.nan)])
def test_a_hessian_that_says_nothing_gives_rounding_to_nearest(useless: np.ndarray) -> None:
    found = solve(weight(), useless.astype(np.float32), FORMATS["Q4_K"])
    assert np.array_equal(found.blocks, quantize(weight(), FORMATS["Q4_K"]).blocks)


def test_a_hessian_that_is_not_positive_is_damped_until_it_is() -> None:
    bent = hessian()
    values, vectors = np.linalg.eigh(bent.astype(np.float64))
    values[:5] = -0.05 * values.mean()  # more than the first damping lifts
    bent = (vectors * values @ vectors.T).astype(np.float32)
    assert not np.array_equal(solve(weight(), bent, FORMATS["Q4_0"]).blocks, quantize(weight(), FORMATS["Q4_0"]).blocks)


def test_the_weight_is_left_as_it_was_and_may_be_any_view() -> None:
    stored = np.asfortranarray(weight())
    before = stored.copy()
    found = solve(stored, hessian(), FORMATS["Q4_0"])
    assert np.array_equal(stored, before)
    assert np.array_equal(found.blocks, solve(weight(), hessian(), FORMATS["Q4_0"]).blocks)


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="MXFP4 has no grid"):
        solve(weight(), hessian(), FORMATS["MXFP4"])
    bad = weight()
    bad[3, 5] = np.inf
    with pytest.raises(FormatError, match=r"row 3"):
        solve(bad, hessian(), FORMATS["Q4_0"])


def test_zero_rows_stay_zero() -> None:
    some = weight()
    some[7] = 0
    assert not dequantize(solve(some, hessian(), FORMATS["Q4_K"]))[7].any()


@each_grid
def test_groups_that_no_input_reached_are_rounded_too(name: str) -> None:
    silent = hessian()
    silent[:, :256] = silent[:256] = 0
    for reached in (silent, np.zeros_like(silent)):
        found = dequantize(solve(weight(), reached, FORMATS[name], np.diagonal(reached).copy()))
        error = np.linalg.norm((found - weight())[:, :256], axis=0)
        assert (error < 0.6 * np.linalg.norm(weight()[:, :256], axis=0)).all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (3, 160), (17, 288)])
def test_any_shape_of_whole_blocks(rows: int, columns: int) -> None:
    one, inputs = weight(rows)[:, :columns], np.random.default_rng(4).standard_normal((500, columns)).astype(np.float32)
    own = inputs.T @ inputs / np.float32(500)
    found = dequantize(solve(one, own, FORMATS["Q5_0"]))
    assert loss(one, found, own) <= loss(one, dequantize(quantize(np.ascontiguousarray(one), FORMATS["Q5_0"])), own) * (1 + 1e-5)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(FormatError, match="multiple of 32"):
        solve(weight()[:, :40], np.eye(40, dtype=np.float32), FORMATS["Q5_0"])

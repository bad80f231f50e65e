"""GPTQ and the grids it rounds to, matrix by matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.errors import FormatError
from llmctl.quant import gptq
from llmctl.quant.integer_grid import IntegerGrid, find_scales, round_to_grid, round_whole_tensor

GRIDS = [IntegerGrid(bits, size, symmetric) for bits in (2, 3, 4, 8) for size in (32, -1) for symmetric in (True, False)]


def correlated(columns: int = 160, tokens: int = 700, seed: int = 0) -> torch.Tensor:
    """A Hessian as activations have it: channels of very different sizes that go with each other."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(-1, 1, columns)
    x = torch.randn(tokens, columns, generator=generator) @ mixing
    return x.T @ x / tokens


def weights(rows: int = 70, columns: int = 160, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_errors_are_made_up_for(grid: IntegerGrid) -> None:
    hessian, weight = correlated(), weights()
    nearest = round_to_grid(weight, grid, hessian.diagonal())
    solved = gptq.solve(weight, grid, gptq.factorize(hessian, damping=0.01), hessian.diagonal(), threads=2)
    before, after = (gptq.loss(weight, one.values, hessian).sum() for one in (nearest, solved))
    assert after < 0.6 * before


def test_it_is_gptq_as_published() -> None:
    """Column after column with the Cholesky factor of the inverse, in float64."""
    grid, damping = IntegerGrid(3, 32, False), 0.01
    hessian, weight = correlated(64), weights(20, 64)
    scales, zeros = (part.T for part in find_scales(weight.T.contiguous(), grid, None, "range"))
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    damped = hessian.double()[order][:, order]
    damped.diagonal().add_(damping * damped.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    work, expected = weight.double()[:, order].clone(), torch.empty(20, 64)
    for k in range(64):
        scale, zero = scales[:, order[k] // 32].double(), zeros[:, order[k] // 32].double()
        codes = (work[:, k] / scale + zero).round().clamp(0, grid.largest)
        error = (work[:, k] - (codes - zero) * scale) / upper[k, k]
        work[:, k:] -= error[:, None] * upper[k, k:]
        expected[:, order[k]] = codes.float()
    factor = gptq.factorize(hessian, damping=damping)
    found = gptq.compensate(weight.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), grid, factor).T
    assert (found != expected).float().mean() < 0.003  # float32 may fall on the other side of a half


def test_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    grid, hessian, weight = IntegerGrid(4, 32, True), correlated(), weights()
    factor = gptq.factorize(hessian)
    whole = gptq.solve(weight, grid, factor, None).codes
    monkeypatch.setattr(gptq, "BLOCK", 24)
    assert (gptq.solve(weight, grid, factor, None).codes != whole).float().mean() < 0.003


def test_rows_do_not_depend_on_each_other() -> None:
    grid, hessian, weight = IntegerGrid(4, 32, False), correlated(), weights()
    factor = gptq.factorize(hessian)
    together, alone = gptq.solve(weight, grid, factor, None), gptq.solve(weight[40:], grid, factor, None)
    assert torch.equal(together.rows(40, 70).values, alone.values)


def test_two_equal_columns_and_two_tokens() -> None:
    """A Hessian of rank 2: there is a factor with more damping, and every value is finite."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    x[:, 5] = x[:, 2]
    factor = gptq.factorize(x.T @ x / 2, damping=1e-9)
    assert factor is not None
    assert factor.note is not None
    assert torch.isfinite(gptq.solve(weights(8, 8), IntegerGrid(4, -1, True), factor, None).values).all()


def test_an_indefinite_hessian_gets_a_floor() -> None:
    hessian = correlated(32)
    hessian[3, 4] = hessian[4, 3] = 50 * float(hessian.diagonal().max())
    factor = gptq.factorize(hessian)
    assert factor is not None
    assert factor.note == "eigenvalues raised to a floor"
    assert torch.isfinite(factor.upper).all()


@pytest.mark.parametrize("hessian", [torch.zeros(32, 32), torch.full((32, 32), torch.nan)], ids=["zeros", "nan"])
def test_there_is_no_factor_of_nothing(hessian: torch.Tensor) -> None:
    assert gptq.factorize(hessian) is None


def test_columns_that_nothing_is_multiplied_by_are_rounded() -> None:
    hessian, weight, grid = correlated(), weights(), IntegerGrid(4, 32, False)
    hessian[7], hessian[:, 7] = 0, 0
    solved = gptq.solve(weight, grid, gptq.factorize(hessian), None)
    nearest = round_to_grid(weight, grid)
    assert torch.equal(solved.codes[:, 7], nearest.codes[:, 7])
    assert not torch.equal(solved.codes, nearest.codes)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_zeros_stay_zeros(grid: IntegerGrid) -> None:
    weight, hessian = weights(), correlated()
    weight[3], weight[5, 32:64] = 0, 0
    for found in (round_to_grid(weight, grid), gptq.solve(weight, grid, gptq.factorize(hessian), hessian.diagonal())):
        assert torch.isfinite(found.scales).all()
        assert not found.values[3].any()
        if grid.group_size == 32:
            assert not found.values[5, 32:64].any()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_search_is_never_worse_and_scales_are_stored_exactly(grid: IntegerGrid) -> None:
    weight, importance = weights(), torch.rand(160, generator=torch.Generator().manual_seed(5)) ** 3
    importance[:9] = 0
    plain, searched = (round_to_grid(weight, grid, importance, search) for search in ("range", "error"))
    before, after = ((((found.values - weight) ** 2) * importance).sum() for found in (plain, searched))
    assert after < before
    assert torch.equal(searched.scales.half().float(), searched.scales)
    assert int(searched.codes.max()) <= grid.largest
    expected = (searched.codes.view(70, -1, grid.columns_per_group(160)) - searched.zeros[..., None]) * searched.scales[..., None]
    assert torch.equal(expected.view(70, 160), searched.values)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid.group_size == 32], ids=str)
def test_products_find_scales_that_spare_the_outputs(grid: IntegerGrid) -> None:
    """What each group adds to the outputs is off by less than with the diagonal alone."""
    hessian, weight = correlated(), weights()
    hessian = torch.where(torch.arange(160)[:, None] // 32 == torch.arange(160) // 32, hessian, 0)  # groups on their own
    diagonal, full = (
        round_to_grid(weight, grid, hessian.diagonal(), products=products, threads=2) for products in (None, hessian)
    )
    before, after = (gptq.loss(weight, found.values, hessian).sum() for found in (diagonal, full))
    assert after < (1.0 if grid.bits == 8 else 0.99) * before
    assert torch.equal(full.scales.half().float(), full.scales)


def test_products_of_nothing_are_no_preference() -> None:
    grid, weight = IntegerGrid(4, 32, True), weights()
    found = round_to_grid(weight, grid, products=torch.zeros(160, 160))
    assert torch.equal(found.values, round_to_grid(weight, grid).values)


def test_the_full_range_of_symmetric_codes_is_used() -> None:
    """The largest weight falls on the code without a counterpart, whatever its sign."""
    for sign in (1, -1):
        found = round_to_grid(torch.tensor([[0.8, -0.7, 0.1, 0.0]]) * sign, IntegerGrid(4, -1, True), None, "range")
        assert found.codes[0, 0] == 0
        assert found.values[0, 0] * sign == pytest.approx(0.8, rel=1e-3)


def test_one_scale_for_the_whole_matrix() -> None:
    assert len(round_whole_tensor(weights(), IntegerGrid(4, 32, False), None, "error").scales.unique()) == 1
    found = round_whole_tensor(weights(), IntegerGrid(8, -1, True), None, "range")
    assert (found.values - weights()).abs().max() <= 0.51 * found.scales.abs().max()


def test_weights_beyond_float16_are_refused() -> None:
    with pytest.raises(FormatError, match=r"does not fit float16: the weights are too large"):
        round_to_grid(torch.full((2, 32), 1e8), IntegerGrid(4, 32, True))
    with pytest.raises(FormatError, match=r"rows of 48 columns cannot be cut into groups of 32"):
        round_to_grid(torch.ones(2, 48), IntegerGrid(4, 32, True))


def test_chunks_of_rows_and_threads_change_nothing() -> None:
    weight = weights(2100, 32)
    found = [round_to_grid(weight, IntegerGrid(4, 32, False), threads=threads).values for threads in (1, 3)]
    assert torch.equal(*found)
    assert np.array_equal(found[0][1500], round_to_grid(weight[1500:1501], IntegerGrid(4, 32, False)).values[0])

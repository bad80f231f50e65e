"""Scales, zeros and codes of packed integers improved in turn: always closer, always something that a file can hold."""

from __future__ import annotations

import pytest
import torch

from llmctl.quant import gptq
from llmctl.quant.integer_grid import GridValues, IntegerGrid
from llmctl.quant.module_solver import Method, solve_group
from llmctl.quant.statistics import Statistics

GRIDS = [IntegerGrid(bits, size, symmetric) for bits in (2, 3, 4, 8) for size in (32, -1) for symmetric in (True, False)]


def inputs(columns: int = 96, tokens: int = 500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    mixing = torch.randn(columns, columns, generator=generator) * torch.logspace(-1, 1, columns)
    return torch.randn(tokens, columns, generator=generator) @ mixing


def solved(weight: torch.Tensor, x: torch.Tensor, grid: IntegerGrid) -> GridValues:
    statistics = Statistics(x.shape[1])
    statistics.add(x)
    statistics.finish()
    found = solve_group({"one": weight}, {"one": grid}, statistics, Method("gptq"), 1)["one"]
    assert found.facts["method"] == "gptq"
    assert isinstance(found.stored, GridValues)
    assert torch.equal(found.values, found.stored.values)
    return found.stored


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_it_is_closer_than_gptq_alone_and_can_be_stored(grid: IntegerGrid) -> None:
    x = inputs()
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(4)) * 0.05
    hessian = x.T @ x / len(x)
    alone = gptq.solve(weight, grid, gptq.factorize(hessian), hessian.diagonal())
    found = solved(weight, x, grid)
    with gptq.damped(hessian, gptq.factorize(hessian).ridge) as damped:
        before, after = (float(gptq.loss(weight, one.values, damped).sum()) for one in (alone, found))
    assert after < (0.99 if grid.bits == 8 or grid.group_size == -1 else 0.97) * before
    assert torch.equal(found.scales.half().float(), found.scales)
    assert found.zeros.min() >= 0
    assert found.zeros.max() <= grid.largest
    assert torch.equal(found.zeros, found.zeros.round())
    assert int(found.codes.max()) <= grid.largest
    if grid.symmetric:
        assert (found.zeros == grid.middle).all()


def test_the_damped_hessian_is_the_one_that_was_factored() -> None:
    x = inputs(32)
    x[:, 5] = 0
    hessian = x.T @ x / len(x)
    factor = gptq.factorize(hessian, damping=0.02)
    before, order = hessian.clone(), factor.order
    with gptq.damped(hessian, factor.ridge) as damped:
        reordered = damped.double()[order[:, None], order]
    assert torch.equal(hessian, before)
    upper = factor.upper.double()
    inner = torch.linalg.solve(upper, torch.linalg.solve(upper, reordered).T)  # diagonal where U·D·Uᵀ is the matrix
    assert (inner - torch.diag(inner.diagonal())).abs().max() < 1e-3 * inner.diagonal().max()


@pytest.mark.parametrize("symmetric", [True, False])
def test_zeros_and_dead_columns_survive(symmetric: bool) -> None:
    """Groups of zeros keep the scale 0; a column that nothing is multiplied by is the nearest on its group's final grid."""
    x, weight = inputs(), torch.randn(20, 96, generator=torch.Generator().manual_seed(4)) * 0.05
    x[:, 7], weight[3], weight[5, 32:64] = 0, 0, 0
    found = solved(weight, x, IntegerGrid(4, 32, symmetric))
    assert not found.values[3].any()
    assert not found.values[5, 32:64].any()
    assert torch.isfinite(found.scales).all()
    error = (found.values[:, 7] - weight[:, 7]).abs()
    inside = (found.codes[:, 7] > 0) & (found.codes[:, 7] < 15)
    assert inside.sum() > 10
    assert (error <= 0.5001 * found.scales[:, 0].abs() + 1e-7)[inside].all()

"""Columns rounded in turn: every instruction set against the definition, and what each pass promises."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels import feedback
from llmctl.kernels.descent import Descent, define
from llmctl.kernels.feedback import Feedback
from llmctl.kernels.formats.codecs import quantize
from llmctl.kernels.formats.grids import GRIDS, BlockGrid
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native import _native as native

ROWS, COLUMNS = 37, 512  # no whole number of vectors


class Case:
    """A weight, an input whose neighbours are alike, and where rounding starts from."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(3)
        self.weight = rng.standard_normal((COLUMNS, ROWS)).astype(np.float32)
        inputs = rng.standard_normal((700, COLUMNS)).astype(np.float32)
        inputs[:, 1:] += np.float32(0.7) * inputs[:, :-1]
        self.hessian = inputs.T @ inputs / np.float32(700) + np.float32(0.01) * np.eye(COLUMNS, dtype=np.float32)
        self.order = np.argsort(-np.diagonal(self.hessian))
        turned = self.hessian[np.ix_(self.order, self.order)].astype(np.float64)
        upper = np.linalg.cholesky(turned[::-1, ::-1])[::-1, ::-1]
        self.factor = (upper / np.diagonal(upper)).astype(np.float32)
        self.name = name

    def grid(self) -> BlockGrid:
        return BlockGrid.of(quantize(np.ascontiguousarray(self.weight.T), FORMATS[self.name]))

    def loss(self, grid: BlockGrid, levels: np.ndarray) -> float:
        error = grid.values(levels) - self.weight
        return float((error * (self.hessian @ error)).sum())

    def gradient(self, grid: BlockGrid, levels: np.ndarray) -> np.ndarray:
        return self.hessian @ (grid.values(levels) - self.weight)


@pytest.fixture(scope="module", params=list(GRIDS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def fed(case: Case, isa: str | None = None) -> np.ndarray:
    return Feedback(2).feed_back(case.weight, case.factor, case.order, case.grid(), isa=isa)


def test_instruction_sets_give_what_the_definition_gives(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {isa: fed(case, isa) for isa in native.available_isas()}
    assert found
    monkeypatch.setattr(feedback, "why_missing", lambda: "as if it were not built")
    defined = fed(case)
    for isa, levels in found.items():
        assert np.array_equal(levels, defined), isa


def test_feeding_errors_back_halves_the_loss(case: Case) -> None:
    grid = case.grid()
    spec, size = grid.spec, grid.spec.group_size
    steps = np.repeat(feedback.inverse(grid.steps), size, axis=0)
    offsets = np.repeat(grid.offsets, size, axis=0) if grid.offsets is not None else 0
    table = spec.table() if spec.table is not None else None
    alone = feedback.nearest_level((case.weight - offsets) * steps, spec.lowest, spec.highest, table)
    fed = Feedback().feed_back(case.weight, case.factor, case.order, grid)
    assert case.loss(grid, fed) < 0.7 * case.loss(grid, alone)


def improved(case: Case, passes: int, isa: str | None = None) -> tuple[BlockGrid, np.ndarray]:
    grid, levels = case.grid(), fed(case)
    Descent(2).descend(case.weight, case.hessian, levels, grid, passes, isa=isa)
    return grid, levels


@pytest.mark.parametrize("passes", [1, 6])
def test_descent_on_every_instruction_set_is_as_the_definition_has_it(
    case: Case, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    found = {isa: improved(case, passes, isa) for isa in native.available_isas()}
    assert found
    levels, grid = fed(case), case.grid()
    define(case.weight, case.hessian, levels, grid, passes)
    for isa, (own_grid, own_levels) in found.items():
        assert case.loss(own_grid, own_levels) == pytest.approx(case.loss(grid, levels), rel=2e-3), isa
        if passes == 1:  # later ones start from what a sum of another order may have decided otherwise
            assert (own_levels == levels).mean() > 0.99, isa
            assert np.isclose(own_grid.steps, grid.steps, rtol=1e-3).mean() > 0.99, isa


def test_every_pass_lowers_the_loss_until_nothing_moves(case: Case) -> None:
    grid, levels = case.grid(), fed(case)
    losses = [case.loss(grid, levels)]
    for _ in range(3):
        Descent().descend(case.weight, case.hessian, levels, grid, 1)
        losses.append(case.loss(grid, levels))
    assert losses[1] < 0.99 * losses[0]
    assert losses == sorted(losses, reverse=True)
    Descent().descend(case.weight, case.hessian, levels, grid, 300)
    settled, steps = levels.copy(), grid.steps.copy()
    Descent().descend(case.weight, case.hessian, levels, grid, 1)
    assert (settled == levels).mean() > 0.999
    assert np.isclose(steps, grid.steps, rtol=1e-3).mean() > 0.999


def test_what_a_file_cannot_hold_is_never_chosen() -> None:
    """A step beyond float16 is as bad as can be."""
    case = Case("Q4_1")
    case.weight *= np.float32(65000 / np.abs(case.weight).max())
    for passes in (0, 5):
        grid, levels = improved(case, passes)
        assert np.isfinite(grid.steps).all()
        assert np.isfinite(grid.offsets).all()
        grid.tensor(levels)

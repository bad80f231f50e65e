"""Columns rounded in turn: every instruction set against the definition, and what each pass promises."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels import feedback
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
        self.factor = np.linalg.cholesky(np.linalg.inv(turned)).T.astype(np.float32)
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


def both(case: Case, isa: str | None) -> tuple[np.ndarray, np.ndarray]:
    grid, runner = case.grid(), Feedback(2)
    fed = runner.feed_back(case.weight, case.factor, case.order, grid, isa=isa)
    refined = fed.copy()
    runner.refine(case.gradient(grid, fed), case.hessian, refined, grid, isa=isa)
    return fed, refined


def test_instruction_sets_give_what_the_definition_gives(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {isa: both(case, isa) for isa in native.available_isas()}
    assert found
    monkeypatch.setattr(feedback, "why_missing", lambda: "as if it were not built")
    fed, refined = both(case, None)
    for isa, (native_fed, native_refined) in found.items():
        assert np.array_equal(native_fed, fed), isa
        assert np.array_equal(native_refined, refined), isa


def test_feeding_errors_back_halves_the_loss(case: Case) -> None:
    grid = case.grid()
    spec, size = grid.spec, grid.spec.group_size
    steps = np.repeat(feedback.inverse(grid.steps), size, axis=0)
    offsets = np.repeat(grid.offsets, size, axis=0) if grid.offsets is not None else 0
    table = spec.table() if spec.table is not None else None
    alone = feedback.nearest_level((case.weight - offsets) * steps, spec.lowest, spec.highest, table)
    fed = Feedback().feed_back(case.weight, case.factor, case.order, grid)
    assert case.loss(grid, fed) < 0.7 * case.loss(grid, alone)


def test_refining_lowers_the_loss_and_keeps_the_gradient_true(case: Case) -> None:
    grid, runner = case.grid(), Feedback()
    levels = runner.feed_back(case.weight, case.factor, case.order, grid)
    before, gradient = case.loss(grid, levels), case.gradient(grid, levels)
    assert runner.refine(gradient, case.hessian, levels, grid)
    assert case.loss(grid, levels) < 0.99 * before
    assert np.allclose(gradient, case.gradient(grid, levels), atol=1e-3)
    while runner.refine(gradient, case.hessian, levels, grid):
        pass
    settled = levels.copy()
    assert not runner.refine(case.gradient(grid, levels), case.hessian, levels, grid)
    assert np.array_equal(settled, levels)

"""Steps, offsets and levels of a matrix on a grid of blocks, each moved in turn to where the loss is least while all others stay.

The loss is Σ (ŵ − w) H (ŵ − w)ᵀ over the rows. It is coordinate descent, as in QuantEase (Behdin et al. 2023, arXiv 2309.01885),
over the scales as well. The definition is numpy's; the native kernel adds up in another order, so where two choices are as good
it may take the other one. Arrays are column by row, float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from llmctl.kernels.feedback import inverse, nearest_level
from llmctl.kernels.formats.grids import GridSpec
from llmctl.kernels.native import instruction_set, why_missing

F = np.float32
_BLOCK = 128  # columns between two matrix products


class Grid(Protocol):
    """What `Descent` moves about on: see `BlockGrid`."""

    spec: GridSpec
    steps: np.ndarray
    offsets: np.ndarray | None
    block_scales: np.ndarray | None
    block_offsets: np.ndarray | None

    def values(self, levels: np.ndarray) -> np.ndarray:
        """As `BlockGrid.values`."""

    def nearest_step(self, group: int, wanted: np.ndarray) -> np.ndarray:
        """As `BlockGrid.nearest_step`."""


class Descent:
    """Runs with a pool of threads of its own, made when it is first needed."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: object | None = None

    def descend(
        self, wanted: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid, passes: int, *, isa: str | None = None
    ) -> None:
        """Improve levels (K, N) and the grid's steps and offsets in place, until nothing moves or for so many passes.

        wanted: (K, N). hessian: (K, K), symmetric. isa: instruction set instead of the best, for tests. Wide groups, and offsets
        that go with their steps, are left to numpy.
        """
        if why_missing() is not None or grid.spec.whole_offsets or grid.spec.group_size > _BLOCK:
            define(wanted, hessian, levels, grid, passes)
            return
        from llmctl.kernels.native import _native

        if self._pool is None:
            instruction_set()  # what LLMCTL_ISA says is settled now
            self._pool = _native.ThreadPool(self._threads)
        spec = grid.spec
        scales = (grid.steps, grid.offsets, grid.block_scales, grid.block_offsets, *(spec.scale_codes or (0, 0)))
        table = spec.table() if spec.table is not None else None
        pivots = F(1) / np.diagonal(hessian)
        _native.descend(self._pool, passes, hessian, pivots, wanted, levels, *scales, spec.lowest, spec.highest, table, isa)


def define(wanted: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid, passes: int) -> None:
    """What `Descent.descend` does, by numpy."""
    gradient = hessian @ (grid.values(levels) - wanted)
    for _ in range(passes):
        _refit(gradient, hessian, levels, grid)
        if not _refine(gradient, hessian, levels, grid):
            break


def _refine(gradient: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid) -> bool:
    """One pass over all columns. True if any level moved. gradient: (K, N), hessian @ (rounded − wanted), brought up to date."""
    moved = False
    for start in range(0, len(levels), _BLOCK):
        columns = slice(start, start + _BLOCK)
        changes = _refine_block(gradient[columns].copy(), hessian[columns, columns], levels[columns], grid, start)
        if changes.any():
            moved = True
            gradient += hessian[:, columns] @ changes
    return moved


def _refine_block(gradient: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid, first: int) -> np.ndarray:
    """Changes of the elements."""
    spec, changes = grid.spec, np.empty_like(gradient)
    table = spec.table() if spec.table is not None else None
    for i in range(len(levels)):
        group = (first + i) // spec.group_size
        step, offset = grid.steps[group], grid.offsets[group] if grid.offsets is not None else F(0)
        old = step * levels[i] + offset
        ideal = (old - gradient[i] / hessian[i, i] - offset) * inverse(step)
        levels[i] = nearest_level(ideal, spec.lowest, spec.highest, table)
        changes[i] = step * levels[i] + offset - old
        gradient[i + 1 :] += hessian[i, i + 1 :, None] * changes[i]
    return changes


def _refit(gradient: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid) -> None:
    """Each group's step and offset to the best that can be stored."""
    size = grid.spec.group_size
    for group in range(len(grid.steps)):
        columns = slice(group * size, (group + 1) * size)
        changes = _Refit(gradient[columns], hessian[columns, columns], levels[columns], grid, group).apply()
        if changes is not None:
            gradient += hessian[:, columns] @ changes


class _Refit:
    """One group. The loss is quadratic in step and offset: what it changes by, and where it is least."""

    def __init__(self, gradient: np.ndarray, hessian: np.ndarray, levels: np.ndarray, grid: Grid, group: int) -> None:
        self.levels, self.grid, self.group = levels, grid, group
        along = hessian @ levels
        self.slope, self.curve = (levels * gradient).sum(axis=0), (levels * along).sum(axis=0)
        self.offset_slope, self.cross = gradient.sum(axis=0), along.sum(axis=0)
        self.offset_curve = F(max(float(hessian.sum()), 1e-30))
        self.step = grid.steps[group]
        self.offset = grid.offsets[group] if grid.offsets is not None else None

    @np.errstate(invalid="ignore", over="ignore")  # of steps that cannot be stored
    def apply(self) -> np.ndarray | None:
        """Changes of the elements (group_size, N), None where there are none."""
        best, best_gain = (self.step, self.offset), np.zeros_like(self.step)
        for step, offset in self._candidates():
            gain = self._gain(step, offset)
            better = gain < best_gain
            best_gain = np.where(better, gain, best_gain)
            best = tuple(
                None if new is None else np.where(better, new, old) for new, old in zip((step, offset), best, strict=True)
            )
        if not best_gain.any():
            return None
        change = (best[0] - self.step) * self.levels
        self.grid.steps[self.group] = best[0]
        if self.offset is not None:
            change += best[1] - self.offset
            self.grid.offsets[self.group] = best[1]
        return change

    def _candidates(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        if self.grid.spec.whole_offsets:
            yield from self._with_zeros()
            return
        curve = np.maximum(self.curve, F(1e-30))
        yield self._stored(self.step - self.slope / curve, self.offset)
        if self.offset is None:
            return
        yield self._stored(self.step, self.offset - self.offset_slope / self.offset_curve)
        step = self._free_step()
        step, _ = self._stored(step, None)
        rest = self.offset_slope + (step - self.step) * self.cross  # the best offset for the step as it is stored
        yield self._stored(step, self.offset - rest / self.offset_curve)

    def _free_step(self) -> np.ndarray:
        """The best where the offset may move along."""
        curve = np.maximum(self.curve, F(1e-30))
        determinant = np.maximum(curve * self.offset_curve - self.cross**2, F(1e-6) * curve * self.offset_curve)
        return self.step - (self.slope * self.offset_curve - self.offset_slope * self.cross) / determinant

    def _with_zeros(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The best step for the zero as it is, and for the one nearest to the best offset."""
        assert self.offset is not None
        zero = np.rint(-self.offset * inverse(self.step))
        yield self._with_zero(zero)
        step = self._free_step()
        offset = self.offset - (self.offset_slope + (step - self.step) * self.cross) / self.offset_curve
        spec, usable = self.grid.spec, inverse(step) != 0
        yield self._with_zero(np.where(usable, np.clip(np.rint(-offset * inverse(step)), spec.lowest, spec.highest), zero))

    def _with_zero(self, zero: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values are step · u with u = level − zero, now they are v: the best step is (u·H·v − u·gradient) / u·H·u."""
        curve = self.curve + zero * (zero * self.offset_curve - F(2) * self.cross)
        now = self.step * (self.curve - zero * self.cross) + self.offset * (self.cross - zero * self.offset_curve)
        step = (now - self.slope + zero * self.offset_slope) / np.maximum(curve, F(1e-30))
        step = self.grid.nearest_step(self.group, step)
        return step, -step * zero

    def _stored(self, step: np.ndarray, offset: np.ndarray | None) -> tuple[np.ndarray, np.ndarray | None]:
        stored = self.grid.nearest_step(self.group, step)
        return stored, None if offset is None else self.grid.nearest_offset(self.group, offset)

    def _gain(self, step: np.ndarray, offset: np.ndarray | None) -> np.ndarray:
        """Change of the loss, (N,)."""
        moved = step - self.step
        gain = moved * (F(2) * self.slope + moved * self.curve)
        if offset is not None and self.offset is not None:
            shifted = offset - self.offset
            gain += shifted * (F(2) * (self.offset_slope + moved * self.cross) + shifted * self.offset_curve)
        return gain

"""Columns of a matrix rounded in turn, each told of the errors of those before it: GPTQ's inner loop.

Arrays are column by row, float32. What happens between the columns of one block is native where the extension is there; the
definition in numpy gives the same numbers. What a block does to all later columns is one matrix product.

GPTQ: Frantar et al. 2022, arXiv 2210.17323, in the form of Chee et al. 2023 (QuIP), see quant/gptq.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from llmctl.kernels.formats.grids import BlockGrid, GridSpec
from llmctl.kernels.native import instruction_set, why_missing

F = np.float32
_BLOCK = 128  # columns between two matrix products


class Feedback:
    """Runs with a pool of threads of its own, made when it is first needed."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: Any = None

    def feed_back(
        self, weights: np.ndarray, factor: np.ndarray, order: np.ndarray, grid: BlockGrid, *, isa: str | None = None
    ) -> np.ndarray:
        """Levels (K, N) of weights (K, N), which are left as they are.

        factor: (K, K) unit upper triangular U of the Hessian U·D·Uᵀ, columns in `order`. order: (K,), the columns as they are
        rounded. grid: steps and offsets are kept. isa: instruction set instead of the best, for tests.
        """
        rest, levels = weights[order], np.empty(weights.shape, F)
        groups = (order // grid.spec.group_size).astype(np.int32)
        scales = (grid.steps, inverse(grid.steps), grid.offsets)
        for start, stop in _blocks(len(rest)):
            part, errors = rest[start:stop], np.empty_like(rest[start:stop])
            found, inside = np.empty_like(part), np.ascontiguousarray(factor[start:stop, start:stop])
            columns = (weights[order[start:stop]], part, found, errors, inside, groups[start:stop])
            self._run(columns, scales, grid.spec, isa)
            levels[order[start:stop]] = found
            rest[stop:] -= factor[start:stop, stop:].T @ errors
        return levels

    def _run(self, columns: tuple, scales: tuple, spec: GridSpec, isa: str | None) -> None:
        """One block of columns: its levels and errors are filled in."""
        table = spec.table() if spec.table is not None else None
        if why_missing() is not None:
            _feed_back(*columns, *scales, spec.lowest, spec.highest, table)
            return
        from llmctl.kernels.native import _native

        if self._pool is None:
            instruction_set()  # what LLMCTL_ISA says is settled now
            self._pool = _native.ThreadPool(self._threads)
        _native.feed_back(self._pool, *columns, *scales, spec.lowest, spec.highest, table, isa)


def inverse(values: np.ndarray) -> np.ndarray:
    """1 / values as float32, 0 where that is not finite."""
    with np.errstate(divide="ignore", over="ignore"):
        found = F(1) / values
    return np.where(np.isfinite(found), found, F(0))


def _blocks(count: int) -> list[tuple[int, int]]:
    return [(start, min(start + _BLOCK, count)) for start in range(0, count, _BLOCK)]


def nearest_level(values: np.ndarray, lowest: float, highest: float, table: np.ndarray | None) -> np.ndarray:
    """The nearest whole numbers of lowest … highest, half to even; of a table the higher one in the middle of two."""
    if table is None:
        return np.clip(np.rint(values), F(lowest), F(highest))
    return table[np.searchsorted((table[:-1] + table[1:]) / F(2), values, side="right")]


def _feed_back(wanted, values, levels, errors, couplings, groups, steps, inverses, offsets, *grid) -> None:
    """values: used up."""
    for i, group in enumerate(groups):
        offset = offsets[group] if offsets is not None else F(0)
        levels[i] = nearest_level((values[i] - offset) * inverses[group], *grid)
        errors[i] = steps[group] * levels[i] + offset - wanted[i]
        values[i + 1 :] -= couplings[i, i + 1 :, None] * errors[i]

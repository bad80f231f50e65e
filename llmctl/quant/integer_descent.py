"""What GPTQ found on a grid of packed integers, improved: scales, zeros and codes in turn, each to where the loss is least."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.descent import Descent
from llmctl.kernels.feedback import inverse
from llmctl.kernels.formats.bits import F16_MAX
from llmctl.kernels.formats.grids import GridSpec
from llmctl.quant.integer_grid import GridValues

F = np.float32
_ELEMENTS = 1 << 22  # of rows that are improved at once: bounds the memory
PASSES = 3
"""Of scales and codes in turn: see `grid_gptq.PASSES`."""


@dataclass(eq=False)
class IntegerGroups:
    """Groups of packed integers, column by row, as `BlockGrid` has those of blocks: values are step · level + offset.

    steps: float32 (groups, N), float16 numbers. offsets: the same, whole multiples of the steps, None for symmetric codes.
    """

    spec: GridSpec
    steps: np.ndarray
    offsets: np.ndarray | None
    block_scales: None = None
    block_offsets: None = None

    @classmethod
    def of(cls, found: GridValues) -> IntegerGroups:
        """Copies: what `found` holds stays."""
        grid, middle = found.grid, found.grid.middle if found.grid.symmetric else 0
        size = grid.columns_per_group(found.codes.shape[1])
        spec = GridSpec(size, -middle, grid.largest - middle, not grid.symmetric, whole_offsets=not grid.symmetric)
        steps = np.ascontiguousarray(found.scales.numpy().T).copy()
        return cls(spec, steps, None if grid.symmetric else -steps * found.zeros.numpy().T)

    def values(self, levels: np.ndarray) -> np.ndarray:
        """float32 (K, N) of levels of that shape."""
        found = levels * np.repeat(self.steps, self.spec.group_size, axis=0)
        return found if self.offsets is None else found + np.repeat(self.offsets, self.spec.group_size, axis=0)

    def nearest_step(self, group: int, wanted: np.ndarray) -> np.ndarray:
        """As the file will hold it, float32 (N,)."""
        return np.clip(wanted, F(-F16_MAX), F(F16_MAX)).astype(np.float16).astype(F)

    @property
    def zeros(self) -> np.ndarray:
        """The levels that stand for 0, (groups, N)."""
        return np.zeros_like(self.steps) if self.offsets is None else np.rint(-self.offsets * inverse(self.steps))


def improve(found: GridValues, weight: torch.Tensor, damped: torch.Tensor, threads: int = 1) -> GridValues:
    """Values of less loss. weight: float32 [N, K]. damped: float32 [K, K], the Hessian as it was factored."""
    descent, step = Descent(threads), max(1, _ELEMENTS // weight.shape[1])
    parts = []
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        parts.append(_improve_rows(found.rows(first, first + step), weight[rows], damped, descent))
    codes, scales, zeros = (torch.cat(part) for part in zip(*((p.codes, p.scales, p.zeros) for p in parts), strict=True))
    return GridValues(found.grid, codes, scales, zeros)


def _improve_rows(found: GridValues, weight: torch.Tensor, damped: torch.Tensor, descent: Descent) -> GridValues:
    groups, zero = IntegerGroups.of(found), found.grid.middle if found.grid.symmetric else 0
    levels = np.ascontiguousarray(found.codes.numpy().T.astype(F) - F(zero))
    wanted = np.ascontiguousarray(weight.numpy().T)
    descent.descend(wanted, damped.numpy(), levels, groups, PASSES)
    codes = torch.from_numpy(np.ascontiguousarray((levels + F(zero)).astype(np.uint8).T))
    zeros = found.zeros if found.grid.symmetric else torch.from_numpy(np.ascontiguousarray(groups.zeros.T))
    return GridValues(found.grid, codes, torch.from_numpy(np.ascontiguousarray(groups.steps.T)), zeros)

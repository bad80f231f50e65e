"""Grouped integer grids: value = scale · (code − zero), and the search for the scale and zero of every group.

Pure, over torch. Scales are rounded to float16 before any code is chosen with them: what is searched is what is stored.
Work goes in chunks of rows, one on each thread, and within them by columns, so that no row is ever added up on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from llmctl.errors import FormatError
from llmctl.quant.workers import Workers

Search = Literal["range", "error"]
_SHRINKS = tuple(1.0 - 0.035 * step for step in range(16))
"""Parts of the full range that are tried, 1 first: outliers may be cut off where that makes all other steps finer."""
_CHUNK_ELEMENTS = 1 << 20  # of rows that are solved together: bounds what a thread holds, whatever the rows' length
_RIDGE = 0.05  # of the mean of a group's diagonal, added to it: as GPTQ's damping, against the noise of products


@dataclass(frozen=True)
class IntegerGrid:
    """bits: 2 to 8. group_size: columns that share a scale, −1 for the row. symmetric: the zero is 2^(bits − 1), and the scale
    may be negative, so that the largest weight of a group falls on the code that has no counterpart."""

    bits: int
    group_size: int
    symmetric: bool

    @property
    def largest(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero of symmetric codes."""
        return 1 << (self.bits - 1)

    def columns_per_group(self, columns: int) -> int:
        """Columns that share a scale in rows of this length; FormatError if groups are not whole."""
        size = columns if self.group_size == -1 else self.group_size
        if columns % size:
            raise FormatError(f"rows of {columns} columns cannot be cut into groups of {size}")
        return size


@dataclass
class GridValues:
    """A matrix on a grid. codes: uint8 [N, K]. scales: float32 [N, G], float16 numbers. zeros: float32 [N, G], whole numbers."""

    grid: IntegerGrid
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    @property
    def values(self) -> torch.Tensor:
        """float32 [N, K]."""
        rows, columns = self.codes.shape
        grouped = self.codes.view(rows, self.scales.shape[1], -1).float()
        return ((grouped - self.zeros[..., None]) * self.scales[..., None]).view(rows, columns)

    def rows(self, first: int, last: int) -> GridValues:
        """Rows first … last − 1."""
        return GridValues(self.grid, self.codes[first:last], self.scales[first:last], self.zeros[first:last])


ChunkSolver = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Columns of some rows, float32 [K, n], to codes uint8 [K, n], scales and zeros [G, n]."""


def solve_in_chunks(weight: torch.Tensor, grid: IntegerGrid, solve: ChunkSolver, threads: int = 1) -> GridValues:
    """weight: float32 [N, K], whose rows are independent of each other."""
    chunks = weight.split(max(64, _CHUNK_ELEMENTS // weight.shape[1]))
    parts = Workers(threads).in_order(lambda rows: solve(rows.T.contiguous()), chunks)
    codes, scales, zeros = (torch.cat(part, dim=1).T.contiguous() for part in zip(*parts, strict=True))
    return GridValues(grid, codes, scales, zeros)


def round_to_grid(
    weight: torch.Tensor,
    grid: IntegerGrid,
    importance: torch.Tensor | None = None,
    search: Search = "error",
    *,
    products: torch.Tensor | None = None,
    threads: int = 1,
) -> GridValues:
    """Every weight on the nearest value of its group's grid.

    weight: float32 [N, K]. importance: float32 [K], weights of the squared errors. search: "range" lets the grid span the group's
    range; "error" looks for the one with the least weighted error, or, given products, float32 [K, K], E[x xᵀ], for the one with
    the least error of what the group adds to the outputs. FormatError for scales that float16 cannot hold.
    """

    def solve(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales, zeros = find_scales(columns, grid, importance, search, products)
        return nearest_codes(columns, scales, zeros, grid), scales, zeros

    return solve_in_chunks(weight, grid, solve, threads)


def round_whole_tensor(weight: torch.Tensor, grid: IntegerGrid, importance: torch.Tensor | None, search: Search) -> GridValues:
    """One scale for all of the matrix, which every row then states."""
    weights = None if importance is None else importance.repeat(len(weight))
    whole = IntegerGrid(grid.bits, -1, grid.symmetric)
    scales, zeros = find_scales(weight.reshape(-1, 1), whole, weights, search)
    codes = nearest_codes(weight.reshape(-1, 1), scales, zeros, whole).view(weight.shape)
    every = (len(weight), weight.shape[1] // grid.columns_per_group(weight.shape[1]))
    return GridValues(grid, codes, scales.expand(every).clone(), zeros.expand(every).clone())


def nearest_codes(columns: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: IntegerGrid) -> torch.Tensor:
    """uint8 [K, n] of columns [K, n], scales and zeros [G, n]."""
    size = grid.columns_per_group(len(columns))
    grouped = _codes(columns.view(-1, size, columns.shape[1]), scales[:, None], zeros[:, None], grid)
    return grouped.view(columns.shape).to(torch.uint8)


def find_scales(
    columns: torch.Tensor,
    grid: IntegerGrid,
    importance: torch.Tensor | None,
    search: Search,
    products: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """columns: float32 [K, n] of n rows → scales (float16 numbers) and zeros, float32 [G, n]. Groups of zeros get the scale 0.
    The other arguments are those of `round_to_grid`."""
    size = grid.columns_per_group(len(columns))
    if products is None:
        weights = torch.ones(len(columns)) if importance is None else _positive(importance)
        metrics = [Weights(part) for part in weights[:, None].split(size)]
    else:
        metrics = [Products(products[start : start + size, start : start + size]) for start in range(0, len(columns), size)]
    parts = zip(columns.split(size), metrics, strict=True)
    found = [_search(group, metric, grid, search) for group, metric in parts]
    scales, zeros = (torch.stack(part) for part in zip(*found, strict=True))
    return scales, zeros


def _positive(importance: torch.Tensor) -> torch.Tensor:
    """Columns that nothing is multiplied by count a little still: some data will differ from what was measured."""
    return importance.clamp(min=1e-6 * float(importance.mean()) or 1.0)


class Weights:
    """Errors of a group count as Σ weights · error². weights: float32 [size, 1]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def times(self, values: torch.Tensor) -> torch.Tensor:
        """The metric's matrix times values [size, n]."""
        return values * self._weights


class Products:
    """Errors of a group count as errorᵀ · E[x xᵀ] · error: by what they do to the outputs. products: float32 [size, size]."""

    def __init__(self, products: torch.Tensor) -> None:
        self._products = products.clone()
        diagonal = self._products.diagonal()
        diagonal.add_(_RIDGE * float(diagonal.mean()) or 1.0)

    def times(self, values: torch.Tensor) -> torch.Tensor:
        """The metric's matrix times values [size, n]."""
        return self._products @ values


def _search(
    group: torch.Tensor, metric: Weights | Products, grid: IntegerGrid, search: Search
) -> tuple[torch.Tensor, torch.Tensor]:
    """group [size, n] → scales, zeros [n] of the least error."""
    candidates = _candidates(group, grid, search)
    scale, zero = next(candidates)
    scale = _stored(scale)
    if search == "range":
        return scale, zero
    weighted = metric.times(group)
    least, best, best_zero = torch.full_like(scale, torch.inf), scale, zero
    for trial, trial_zero in candidates:
        # With codes c, the scale b / a is best, and by b² / a less is left of the error of zeros.
        steps = _codes(group, trial, trial_zero, grid).sub_(trial_zero)
        b = torch.mul(steps, weighted).sum(0)
        a = steps.mul_(metric.times(steps)).sum(0).clamp_(min=1e-30)
        gain = torch.mul(b, b).div_(a).neg_()
        better = gain < least
        least = torch.where(better, gain, least)
        best, best_zero = torch.where(better, b / a, best), torch.where(better, trial_zero, best_zero)
    best = _stored(best)
    better = _error(group, metric, best, best_zero, grid) < _error(group, metric, scale, zero, grid)
    return torch.where(better, best, scale), torch.where(better, best_zero, zero)


def _error(
    group: torch.Tensor, metric: Weights | Products, scale: torch.Tensor, zero: torch.Tensor, grid: IntegerGrid
) -> torch.Tensor:
    error = _codes(group, scale, zero, grid).sub_(zero).mul_(scale).sub_(group)
    return error.mul_(metric.times(error)).sum(0)


def _candidates(group: torch.Tensor, grid: IntegerGrid, search: Search) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scales and zeros [n] to try; the first spans the whole range of the group."""
    low, high = group.amin(0).clamp_(max=0), group.amax(0).clamp_(min=0)
    span = high - low
    zero = torch.full_like(low, grid.middle)
    extreme = torch.where(high >= -low, high, low)

    def candidate(shrink: float) -> tuple[torch.Tensor, torch.Tensor]:
        if grid.symmetric:
            return extreme * (-shrink / grid.middle), zero
        scale = span * (shrink / grid.largest)
        return scale, (low * -shrink / torch.where(scale == 0, 1, scale)).round_().clamp_(0, grid.largest)

    yield candidate(1.0)
    for shrink in _SHRINKS:
        yield candidate(shrink)
        if grid.symmetric:
            yield extreme * (shrink / grid.middle), zero


def _stored(scale: torch.Tensor) -> torch.Tensor:
    """As the file will hold it."""
    rounded = scale.half()
    if not torch.isfinite(rounded).all():
        raise FormatError(f"a scale of {float(scale.abs().max()):.4g} does not fit float16: the weights are too large")
    return rounded.float()


def _codes(group: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, grid: IntegerGrid) -> torch.Tensor:
    """The nearest codes, as float32; the zero where the scale is 0."""
    return (group * inverse_of(scale)).add_(zero).round_().clamp_(0, grid.largest)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale; 0 where that is 0."""
    return torch.where(scale == 0, 0, 1 / scale)

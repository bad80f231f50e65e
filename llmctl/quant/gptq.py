"""GPTQ: columns are rounded one after the other, and the error of each is made up for by those still to come.

Frantar et al., "GPTQ", 2023, in the form of Chee et al., "QuIP", 2023, who show that with H = U·D·Uᵀ (U unit upper triangular)
it is the same to round column k of W − (Ŵ − W)·(U − 1). This needs no inverse of H, and one factor serves all matrices that
read the same input. Pure, over torch: groups keep the scales that were found for the original weights (static groups), so the
order in which columns are taken, that of falling activation, costs nothing when the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from llmctl.quant.integer_grid import GridValues, IntegerGrid, find_scales, inverse_of, solve_in_chunks

BLOCK = 128
"""Columns between two updates of all that follow."""
DAMPING = 0.05
"""See `grid_gptq.DAMPING`."""
_LADDER = (1, 3, 10, 30)
_PIECE = 1 << 20  # numbers that are moved at once
_LOSS_ROWS = 512  # that are multiplied at once
_FLOOR = 1e-3  # of the mean of the diagonal, for eigenvalues, where no damping of the ladder was enough


@dataclass(frozen=True)
class Factor:
    """H = U·D·Uᵀ of the columns in `order`. upper: U [K, K]. dead: columns of the weight that nothing was multiplied by.
    damping: what was added, as a part of the mean of the diagonal. note: what had to be done, None if all went well.
    ridge: float32 [K], what the diagonal got in the order of the columns."""

    order: torch.Tensor
    upper: torch.Tensor
    dead: torch.Tensor
    damping: float
    ridge: torch.Tensor
    note: str | None = None


def factorize(hessian: torch.Tensor, *, damping: float = DAMPING, activation_order: bool = True) -> Factor | None:
    """hessian: float32 [K, K], symmetric. Damping is raised in steps until there is a factor; then eigenvalues get a floor;
    None if there is none even so, as for a matrix of zeros."""
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    if bool(dead.all()) or not bool(torch.isfinite(diagonal).all()):
        return None
    order = torch.argsort(diagonal, descending=True, stable=True) if activation_order else torch.arange(len(diagonal))
    mean = float(diagonal[~dead].double().mean())
    backwards = order.flip(0)
    for step in _LADDER:
        reordered = _reordered(hessian, backwards, dead, mean)
        reordered.diagonal().add_(damping * step * mean)
        if (upper := _upper(reordered)) is not None:
            note = None if step == 1 else f"damping raised to {damping * step:g}"
            return Factor(order, upper, dead, damping * step, _ridge(dead, mean, damping * step), note)
    values, vectors = torch.linalg.eigh(_reordered(hessian, backwards, dead, mean).double())
    upper = _upper(((vectors * values.clamp(min=_FLOOR * mean)) @ vectors.T).float())
    ridge = _ridge(dead, mean, damping)  # not what made the factor, but good enough to go on with
    return None if upper is None else Factor(order, upper, dead, 0.0, ridge, "eigenvalues raised to a floor")


def _ridge(dead: torch.Tensor, mean: float, damping: float) -> torch.Tensor:
    return torch.where(dead, mean, damping * mean)


@contextmanager
def damped(hessian: torch.Tensor, ridge: torch.Tensor) -> Iterator[torch.Tensor]:
    """Within: the Hessian with its damping, in the same memory, for it may be the largest thing there is."""
    diagonal = hessian.diagonal().clone()
    hessian.diagonal().add_(ridge)
    try:
        yield hessian
    finally:
        hessian.diagonal().copy_(diagonal)


def _reordered(hessian: torch.Tensor, order: torch.Tensor, dead: torch.Tensor, mean: float) -> torch.Tensor:
    """A copy, with ones of its own size where nothing was seen: such columns are simply rounded."""
    found = hessian[order[:, None], order]
    found.diagonal()[dead[order]] = mean
    return found


def _upper(backwards: torch.Tensor) -> torch.Tensor | None:
    """U of the matrix with its rows and columns turned around, made in its place; None if that is not positive definite."""
    columns = backwards.T  # the same numbers, in the order that LAPACK works on without a copy
    lower, info = torch.linalg.cholesky_ex(columns, out=(columns, torch.empty((), dtype=torch.int32)))
    if int(info) or not bool(torch.isfinite(lower.diagonal()).all()):
        return None
    # In memory this is Lᵀ row by row: turned around from the end it is Lᵀ turned, whose own transpose is the upper factor.
    _turn_around(backwards)
    upper = backwards.T
    return upper.div_(upper.diagonal().clone())


def _turn_around(matrix: torch.Tensor) -> None:
    """The last number becomes the first."""
    flat = matrix.view(-1)
    half = len(flat) // 2
    for start in range(0, half, _PIECE):
        stop = min(start + _PIECE, half)
        front, back = flat[start:stop], flat[len(flat) - stop : len(flat) - start]
        kept = front.clone()
        front.copy_(back.flip(0))
        back.copy_(kept.flip(0))


def loss(weight: torch.Tensor, values: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Mean squared error of the outputs, by row: (ŵ − w)·H·(ŵ − w)ᵀ, float32 [N]."""
    errors = (part - own for part, own in zip(values.split(_LOSS_ROWS), weight.split(_LOSS_ROWS), strict=True))
    return torch.cat([((error @ hessian) * error).sum(dim=1) for error in errors])


def solve(
    weight: torch.Tensor, grid: IntegerGrid, factor: Factor, importance: torch.Tensor | None, *, threads: int = 1
) -> GridValues:
    """weight: float32 [N, K], of one matrix or of several that read the same input. importance: float32 [K], for the search of
    scales, E[x²]."""

    def chunk(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scales, zeros = find_scales(columns, grid, importance, "error")
        return compensate(columns, scales, zeros, grid, factor), scales, zeros

    return solve_in_chunks(weight, grid, chunk, threads)


def compensate(
    columns: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, grid: IntegerGrid, factor: Factor
) -> torch.Tensor:
    """Codes, uint8 [K, n], of columns [K, n] for given scales and zeros [G, n]."""
    groups, inverses = factor.order // grid.columns_per_group(len(columns)), inverse_of(scales)
    wanted = columns[factor.order]
    errors, codes = torch.empty_like(wanted), torch.empty(wanted.shape, dtype=torch.uint8)
    for start in range(0, len(wanted), BLOCK):
        block, own = slice(start, start + BLOCK), groups[start : start + BLOCK]
        target = wanted[block] - factor.upper[:start, block].T @ errors[:start]
        _compensate_block(
            target, wanted[block], scales[own], zeros[own], inverses[own], grid.largest,
            factor.upper[block, block], errors[block], codes[block],
        )  # fmt: skip
    result = torch.empty_like(codes)
    result[factor.order] = codes
    return result


def _compensate_block(
    target: torch.Tensor, wanted: torch.Tensor, steps: torch.Tensor, offsets: torch.Tensor, inverses: torch.Tensor,
    largest: int, upper: torch.Tensor, errors: torch.Tensor, codes: torch.Tensor,
) -> None:  # fmt: skip
    """Fill errors and codes, column by column; all [columns, N]."""
    for column in range(len(target)):
        code = torch.addcmul(offsets[column], target[column], inverses[column]).round_().clamp_(0, largest)
        codes[column] = code
        error = code.sub_(offsets[column]).mul_(steps[column]).sub_(wanted[column])
        errors[column] = error
        target[column + 1 :].addr_(upper[column, column + 1 :], error, alpha=-1)

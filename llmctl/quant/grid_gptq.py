"""GPTQ onto the grids of GGUF's block formats: errors are fed back, and the file stays a plain Q4_K that any reader runs.

Steps and offsets are searched for as always, weighted by importance. Then columns are rounded one after the other, the most
active first, each told of the errors of those before it (Frantar et al. 2022, arXiv 2210.17323). Then steps and codes are
improved in turn, each to where the loss is least while all others stay (coordinate descent as in QuantEase, Behdin et al. 2023,
arXiv 2309.01885). The loss is Σ (ŵ − w) H (ŵ − w)ᵀ over all rows: how far the outputs move on the calibration text.

Pure: (weight, Hessian, format, importance) → the rounded tensor. Nothing here knows files or names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.descent import Descent
from llmctl.kernels.encode import Encoder
from llmctl.kernels.feedback import Feedback
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.grids import BlockGrid, grid_spec
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.quant import gptq

F = np.float32
DAMPING = 0.05
"""On rows of the calibration text that are left out, the loss is within 1 % of the best of 0.01 to 0.2, at 3 bits and at 4: less
follows the noise of some ten thousand tokens, more lets errors pass."""
_FLOOR = 1e-4  # least importance, as a share of the mean
_ELEMENTS = 1 << 22  # of rows that are solved at once: bounds the memory for tall matrices such as the head
PASSES = 6
"""Of steps and codes in turn. On rows that are left out three bring nine tenths of what twelve do."""


@dataclass(frozen=True)
class Solver:
    """How to search. damping: added to the Hessian's diagonal, as a share of its mean. passes: of steps and codes, at most.

    encoder, feedback, descent: with the threads to use.
    """

    encoder: Encoder
    feedback: Feedback
    descent: Descent
    damping: float = DAMPING
    passes: int = PASSES

    @classmethod
    def on(cls, threads: int, damping: float = DAMPING, passes: int = PASSES) -> Solver:
        """On so many threads."""
        return cls(Encoder(threads), Feedback(threads), Descent(threads), damping, passes)


def solve(
    weight: np.ndarray,
    hessian: np.ndarray,
    form: Format,
    importance: np.ndarray | None = None,
    *,
    damping: float = DAMPING,
    passes: int = PASSES,
    threads: int = 1,
) -> QuantTensor:
    """The weight in blocks of `form`, with the least loss that was found; never more than that of rounding to nearest.

    weight: float32 (N, K). hessian: float32 (K, K), Σ x xᵀ / count of the inputs. form: one of grids.GRIDS. importance: float32
    (K,), weights of the squared errors for the first choice of steps; None for no preference. damping: added to the Hessian's
    diagonal, as a share of its mean. Columns that no input reached weigh as much as the mean. A Hessian that cannot be factored,
    see `gptq.factorize`, gives round to nearest. Raises FormatError and UnsupportedError as `codecs.quantize`.
    """
    assert hessian.shape == (weight.shape[1],) * 2, (hessian.shape, weight.shape)
    return solve_with(Solver.on(threads, damping, passes), weight, hessian, form, importance)


def solve_with(
    solver: Solver, weight: np.ndarray, hessian: np.ndarray, form: Format, importance: np.ndarray | None = None
) -> QuantTensor:
    """As `solve`."""
    return solve_prepared(solver, weight, prepare(hessian, solver.damping), form, importance)


def solve_prepared(
    solver: Solver, weight: np.ndarray, prepared: Prepared | None, form: Format, importance: np.ndarray | None = None
) -> QuantTensor:
    """As `solve`, with what `prepare` made of the Hessian: once for all matrices that read the same input."""
    grid_spec(form)  # others are refused even where nothing is solved
    importance = None if importance is None else _with_floor(importance)
    rounded = solver.encoder.encode(np.ascontiguousarray(weight, F), form, importance)
    assert isinstance(rounded, QuantTensor)
    if prepared is None:
        return rounded
    blocks = rounded.blocks.copy()
    for start, stop in _row_ranges(*weight.shape):
        part = QuantTensor(form, (stop - start, weight.shape[1]), blocks[start:stop])
        blocks[start:stop] = _solve_rows(solver, weight[start:stop], prepared, part).blocks
    return QuantTensor(form, rounded.shape, blocks)


def _with_floor(importance: np.ndarray) -> np.ndarray | None:
    """No column counts for nothing: a group that no text reached would be rounded to zeros, and other text may reach it."""
    mean = importance.mean()
    return np.maximum(importance, F(_FLOOR) * mean) if mean > 0 else None


def loss(weight: np.ndarray, quantized: np.ndarray, hessian: np.ndarray) -> float:
    """Σ (ŵ − w) H (ŵ − w)ᵀ over the rows of both, float32 (N, K)."""
    return float(_row_losses(np.ascontiguousarray((quantized - weight).T), np.asarray(hessian, F)).sum(dtype=np.float64))


@dataclass(frozen=True)
class Prepared:
    """A Hessian ready for use. raw: float32 (K, K). ridge: (K,), what damping adds to its diagonal. order: columns, the most
    active first. factor: float32 (K, K), the unit upper triangular one of the damped Hessian in that order."""

    raw: np.ndarray
    ridge: np.ndarray
    order: np.ndarray
    factor: np.ndarray


def prepare(hessian: np.ndarray, damping: float) -> Prepared | None:
    """None where the Hessian cannot be factored. hessian: float32 (K, K), which becomes part of the result."""
    raw = np.ascontiguousarray(hessian, F)
    if not np.isfinite(raw.sum(dtype=np.float64)):
        return None
    factor = gptq.factorize(torch.from_numpy(raw), damping=damping)
    if factor is None:
        return None
    return Prepared(raw, factor.ridge.numpy(), factor.order.numpy(), factor.upper.numpy())


def _row_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = max(1, _ELEMENTS // columns)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _solve_rows(solver: Solver, weight: np.ndarray, hessian: Prepared, rounded: QuantTensor) -> QuantTensor:
    """rounded: the weight rounded to nearest; it stays so in rows where nothing better is found."""
    wanted = np.ascontiguousarray(weight.T, F)
    grid = BlockGrid.of(rounded)
    levels = solver.feedback.feed_back(wanted, hessian.factor, hessian.order, grid)
    with gptq.damped(torch.from_numpy(hessian.raw), torch.from_numpy(hessian.ridge)) as damped:
        solver.descent.descend(wanted, damped.numpy(), levels, grid, solver.passes)
    found = grid.tensor(levels)
    before, after = (_row_losses(dequantize(tensor).T - wanted, hessian.raw) for tensor in (rounded, found))
    blocks = np.where((after <= before)[:, None], found.blocks, rounded.blocks)
    return QuantTensor(rounded.format, rounded.shape, blocks)


def _row_losses(error: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """(N,) of an error (K, N)."""
    return np.einsum("kn,kn->n", error, hessian @ error)

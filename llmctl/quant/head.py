"""The matrix that makes the logits, fitted to what it reads: the last norm's outputs.

Where it is the embedding too, one fit serves both: the logits suffer more from its errors than the first layer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from llmctl.kernels.encode import Encoder
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import Format
from llmctl.quant.error_sums import ErrorSums
from llmctl.quant.grid_gptq import PASSES, Solver, prepare, solve_prepared
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import Walk
from llmctl.runtime.checkpoint.names import take_rows
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.layers import Norm
from llmctl.runtime.models.weights import ModelWeights

_ROWS = 4096
_FINE_BITS = 8  # from here on errors are so small that only feeding them back is worth the time, with as many rows as heads have


def head_module(config: ModelConfig) -> str:
    """Whole name of the module whose matrix makes the logits."""
    return "model.embed_tokens" if config.tie_word_embeddings else "lm_head"


def head_statistics(walk: Walk) -> Statistics:
    """Of the head's inputs. walk: past the last layer."""
    norm = Norm(walk.ops, walk.weights.config, walk.weights, "model.norm")
    found = Statistics(walk.weights.config.hidden_size, device=walk.ops.device)
    for index in range(len(walk.batches)):
        found.add(norm.forward(walk.entering(index)))
    found.finish()
    return found


def solve_head(weights: ModelWeights, statistics: Statistics, form: Format, damping: float, threads: int) -> QuantTensor:
    """The head in blocks of `form`; some thousand rows are in memory at a time. The sums of the statistics are used up."""
    hessian = prepare(statistics.take_hessian().numpy(), damping)
    importance = statistics.mean_squares.numpy()
    passes = PASSES if form.bits_per_weight < _FINE_BITS else 0
    solver = Solver.on(threads, damping, passes)
    name = head_module(weights.config) + ".weight"
    parts = (solve_prepared(solver, rows, hessian, form, importance).blocks for rows in head_rows(weights))
    return _joined(form, weights.stored(name).shape, parts)


def _joined(form: Format, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> QuantTensor:
    """One after the other into their place: in a list, all would be in memory twice."""
    blocks, first = np.empty((shape[0], form.row_bytes(shape[1])), np.uint8), 0
    for part in parts:
        blocks[first : first + len(part)] = part
        first += len(part)
    return QuantTensor(form, shape, blocks)


def round_head(weights: ModelWeights, statistics: Statistics, form: Format, threads: int) -> QuantTensor:
    """The same by rounding to nearest, columns weighted by what they read."""
    importance, encoder = statistics.mean_squares.numpy(), Encoder(threads)

    def rounded(rows: np.ndarray) -> np.ndarray:
        found = encoder.encode(rows, form, importance)
        assert isinstance(found, QuantTensor)
        return found.blocks

    return _joined(form, weights.stored(head_module(weights.config) + ".weight").shape, map(rounded, head_rows(weights)))


def head_rows(weights: ModelWeights, step: int = 1) -> Iterator[np.ndarray]:
    """float32 of every step-th row of the head, some thousand at a time."""
    table = weights.read(head_module(weights.config) + ".weight")
    count = table.shape[0]
    for start in range(0, count, _ROWS * step):
        yield np.array(dequantize(take_rows(table, slice(start, min(start + _ROWS * step, count), step))), np.float32)


def head_errors(weights: ModelWeights, found: QuantTensor, products: torch.Tensor) -> dict[str, float | None]:
    """What became of the head, for the report: see `ErrorSums.facts`. products: float32 [K, K], E[x xᵀ]."""
    sums, first = ErrorSums(), 0
    for rows in head_rows(weights):
        part = QuantTensor(found.format, rows.shape, found.blocks[first : first + len(rows)])
        sums.add(torch.from_numpy(rows), torch.from_numpy(dequantize(part)), products)
        first += len(rows)
    return sums.facts()

"""Where two models part: signal to noise of what every layer hands on, the one model's against the other's."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, log10

from llmctl.errors import UsageError
from llmctl.quant.walk import Walk, one_thread_each
from llmctl.runtime.models.weights import ModelWeights

_BATCH_TOKENS = 2048


def layer_sqnr(
    model: ModelWeights,
    reference: ModelWeights,
    rows: list[list[int]],
    threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Decibels after each layer: 10·log10(Σ x² / Σ (x − x̂)²) of the residual stream over all tokens of `rows`, infinite where the
    two are equal. Both models run on the same text side by side, one layer of each in memory. UsageError if they are not of one
    shape."""
    shapes = [(one.config.num_layers, one.config.hidden_size) for one in (model, reference)]
    if shapes[0] != shapes[1]:
        raise UsageError(f"the models have {shapes[0]} and {shapes[1]} layers and channels: their layers cannot be compared")
    walks = [Walk(one, rows, batch_tokens=_BATCH_TOKENS, lanes=threads) for one in (model, reference)]
    found = []
    with one_thread_each(fast=False):
        for walk in walks:
            walk.embed()
        for index in range(shapes[0][0]):
            for walk in walks:
                walk.advance(walk.layer(index))
            found.append(_decibels(*walks))
            if progress is not None:
                progress(index + 1, shapes[0][0])
    return found


def _decibels(walk: Walk, reference: Walk) -> float:
    signal = noise = 0.0
    for batch in range(len(walk.batches)):
        x, wanted = walk.activations.read(batch).double(), reference.activations.read(batch).double()
        signal += float(wanted.square().sum())
        noise += float((x - wanted).square().sum())
    return inf if noise == 0 else 10 * log10(signal / noise)

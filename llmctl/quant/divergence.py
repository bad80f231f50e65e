"""How far a model's predictions move when some of its weights are replaced: a few rows of text through the reference layers.

The text is kept at the entrance of every layer, so that a change in a layer costs only the way from there to the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from llmctl.quant.activations import Activations
from llmctl.quant.walk import Walk
from llmctl.runtime.models.decoder import logits_of
from llmctl.runtime.models.layers import Linear, Norm
from llmctl.runtime.models.weights import ModelWeights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOKENS = 64  # whose logits are computed at once: a vocabulary may have 262144


class Divergence:
    """Of the model with replaced weights from the model as it is, KL(as it is ‖ replaced), nats a token.

    rows: token ids; all their places count.
    """

    def __init__(self, weights: ModelWeights, rows: list[list[int]], *, batch_tokens: int, lanes: int) -> None:
        self._weights, self._rows = weights, rows
        self._sizes = {"batch_tokens": batch_tokens, "lanes": lanes}
        walk = self._walk({})
        self._entrances: list[list[torch.Tensor]] = []
        for index in range(weights.config.num_layers):
            self._entrances.append(_kept(walk.activations, len(walk.batches)))
            walk.advance(walk.layer(index))
        self._wanted = _kept(walk.activations, len(walk.batches))
        walk.activations.close()

    def __call__(self, replaced: Mapping[str, np.ndarray]) -> float:
        """replaced: float32 by whole Hugging Face name; asked for one layer at a time."""
        walk = self._walk(replaced)
        config = self._weights.config
        first = min([config.num_layers, *map(_layer, replaced)])
        start = self._wanted if first == config.num_layers else self._entrances[max(0, first)]
        if first >= 0:  # else the embedding itself is another
            for index, x in enumerate(start):
                walk.activations.write(index, x)
        for index in range(max(0, first), config.num_layers):
            layer = walk.layer(index)
            layer.replaced |= {name: replaced[name] for name in replaced if _layer(name) == index}
            walk.advance(layer)
        found = _kept(walk.activations, len(walk.batches))
        walk.activations.close()
        return self._compare(walk, found, replaced)

    def _walk(self, replaced: Mapping[str, np.ndarray]) -> Walk:
        walk = Walk(self._weights, self._rows, **self._sizes)
        walk.embed(replaced.get(EMBEDDING))
        return walk

    def _compare(self, walk: Walk, found: list[torch.Tensor], replaced: Mapping[str, np.ndarray]) -> float:
        ops, config = walk.ops, self._weights.config
        tied = config.tie_word_embeddings
        name = EMBEDDING if tied else HEAD
        head = Linear.read(ops, self._weights, name.removesuffix(".weight"), (config.vocab_size, config.hidden_size))
        other = Linear(ops, ops.prepare_weight(replaced[name]), None) if name in replaced else head
        norm, total, count = Norm(ops, config, self._weights, "model.norm"), 0.0, 0
        for wanted, made in zip(self._wanted, found, strict=True):
            for start in range(0, len(wanted), _TOKENS):
                rows = slice(start, start + _TOKENS)
                left = logits_of(ops, config, head, norm.forward(wanted[rows]))
                right = logits_of(ops, config, other, norm.forward(made[rows]))
                total += _kl(left, right)
                count += len(left)
        ops.forget()
        return total / count


def _kl(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Sum over the rows of logits [T, vocab_size]."""
    left, right = (torch.log_softmax(logits.double(), dim=-1) for logits in (wanted, found))
    return float((left.exp() * (left - right)).sum())


def _kept(activations: Activations, count: int) -> list[torch.Tensor]:
    return [activations.read(index).clone() for index in range(count)]


def _layer(name: str) -> int:
    """Number of the layer, −1 for the embedding; what comes after the last layer changes nothing before it."""
    parts = name.split(".")
    if name.startswith("model.layers."):
        return int(parts[2])
    return -1 if name == EMBEDDING else 1 << 30

"""What one token passes of a model: all of it, but of a mixture of experts only the chosen ones, and of a table only its row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from llmctl.runtime.models.weights import ModelWeights

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_TABLES = ("model.embed_tokens.weight", "model.embed_positions.weight")


@dataclass(frozen=True)
class Active:
    """parameters: weights that a token is multiplied with. nbytes: of them, as they are stored: what decoding reads a token,
    the cache not counted."""

    parameters: int
    nbytes: int


def active_weights(weights: ModelWeights) -> Active:
    """The weights one token passes: attention, router, shared and chosen experts, norms, head. Reads headers only."""
    parameters = nbytes = Fraction(0)
    for name in weights.names():
        stored, share = weights.stored(name), _share(name, weights)
        parameters += share * stored.num_elements
        nbytes += share * stored.nbytes
    return Active(round(parameters), round(nbytes))


def _share(name: str, weights: ModelWeights) -> Fraction:
    """How much of the tensor a token passes."""
    config, layer = weights.config, _LAYER.match(name)
    if layer and int(layer[1]) >= config.num_layers:
        return Fraction(0)  # a layer that guesses further tokens
    if name in _TABLES and not (name == _TABLES[0] and config.tie_word_embeddings):
        return Fraction(1, max(1, prod(weights.stored(name).shape[:1])))  # whatever shape a broken file says
    if config.experts is not None and _EXPERT.search(name):
        return Fraction(config.experts.top_k, config.experts.num_experts)
    return Fraction(1)

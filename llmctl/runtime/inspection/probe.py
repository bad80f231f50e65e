"""Queries, keys and values of a text as the model's own run makes them, on any backend.

The forward pass is the decoder's, over an op-set that takes note of every attention before it passes it on. What was noted is
laid side by side and is the result of the pass, in place of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.cache.policy import FULL
from llmctl.runtime.engine.model_runner import LogitsReader
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.decoder import Decoder

_CHUNK = 128
_MOST_NUMBERS = 1 << 16
"""Of a token, in one pass: layers beyond that are looked at in another one."""


@dataclass(frozen=True)
class AttentionRule:
    """What a layer's attention does beside the textbook's, as in kernels/attention. sinks: float32 [num_heads]."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: np.ndarray | None


@dataclass(frozen=True)
class Seen:
    """Some tokens in one layer, before the cache rounds anything.

    first: the position of the first of them. queries float32 [n, num_heads, head_dim]. keys, values: [n, num_kv_heads, …]; of a
    latent cache the values are the first numbers of the keys.
    """

    layer: int
    rule: AttentionRule
    first: int
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray


@dataclass
class _Noted:
    """The arrays of one layer's attention, in the backend's form."""

    queries: Array
    keys: Array
    values: Array | None
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Array | None = None
    anchors: int = 0


class _WatchedOps:
    """An op-set that notes what every attention is given."""

    def __init__(self, ops: Ops) -> None:
        self._ops, self.noted = ops, []
        self._stored: tuple[Array, Array | None] = (None, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def store_kv(self, keys: Array, values: Array | None, pages: Array, batch: BatchDescription) -> None:
        self._stored = keys, values
        self._ops.store_kv(keys, values, pages, batch)

    def attention(self, queries: Array, pages: Array, batch: BatchDescription, *choices: Any) -> Array:
        self.noted.append(_Noted(queries, *self._stored, *choices))
        return self._ops.attention(queries, pages, batch, *choices)


def probe(model: LoadedModel, token_ids: list[int], progress: Callable[[int, int], None] | None = None) -> Iterator[Seen]:
    """Run a text and give what every layer sees, chunk by chunk: all chunks of some layers, then all chunks of the next ones.

    progress: called with (done, total) chunks. Errors: as the forward pass.
    """
    groups, done = _layer_groups(model.config), 0
    total = len(groups) * -(-len(token_ids) // _CHUNK)
    for layers in groups:
        for position, found in _run(model, token_ids, layers):
            yield from (_seen(model.config, *each, position) for each in found)
            done += 1
            if progress is not None:
                progress(done, total)


def _layer_groups(config: ModelConfig) -> list[range]:
    """Layers that are looked at in one pass."""
    most = max(1, _MOST_NUMBERS // max(sum(_sizes(config, layer)) for layer in range(config.num_layers)))
    return [range(i, min(i + most, config.num_layers)) for i in range(0, config.num_layers, most)]


def _sizes(config: ModelConfig, layer: int) -> tuple[int, ...]:
    """Numbers that a token's queries, keys and values have; latent values are none of their own."""
    shape = config.kv_layers()[layer]
    stored = shape.num_kv_heads * shape.head_dim
    return config.num_heads * shape.head_dim, stored, 0 if shape.latent else stored


def _run(
    model: LoadedModel, token_ids: list[int], layers: range
) -> Iterator[tuple[int, list[tuple[int, AttentionRule, np.ndarray]]]]:
    """Of every chunk its first position, and for each layer its rule and numbers [n, queries | keys | values]."""
    rules: dict[int, AttentionRule] = {}
    with _watched(model.decoder, layers) as watched:

        def forward(batch: BatchDescription, cache: KvCache, rows: Array) -> Array:
            watched.noted.clear()
            x = model.decoder.begin(batch)
            for layer in model.decoder.layers[: layers.stop]:
                x = layer.forward(x, batch, cache, model.decoder.tables)
            rules.update({i: _rule(model.ops, noted) for i, noted in zip(layers, watched.noted, strict=True)})
            return _side_by_side(model.ops, watched.noted, [_sizes(model.config, i) for i in layers], rows)

        whole = replace(model, kv_policy=FULL)  # what is dropped from a cache is a part of the picture
        reader = LogitsReader(whole, len(token_ids), min(_CHUNK, len(token_ids)), forward)
        position = 0
        for rows in reader.rows(token_ids):
            borders = np.cumsum([sum(_sizes(model.config, i)) for i in layers])[:-1]
            parts = np.split(np.array(rows), borders, axis=1)
            yield position, [(i, rules[i], part) for i, part in zip(layers, parts, strict=True)]
            position += len(rows)


@contextmanager
def _watched(decoder: Decoder, layers: range) -> Iterator[_WatchedOps]:
    """Within, these layers' attentions are noted."""
    modules = [decoder.layers[i].attention for i in layers]
    before = [module.ops for module in modules]
    watched = _WatchedOps(decoder.ops)
    try:
        for module in modules:
            module.ops = watched
        yield watched
    finally:
        for module, ops in zip(modules, before, strict=True):
            module.ops = ops


def _rule(ops: Ops, noted: _Noted) -> AttentionRule:
    sinks = None if noted.sinks is None else ops.read_vector(noted.sinks)
    return AttentionRule(noted.scale, noted.window, noted.softcap, sinks)


def _side_by_side(ops: Ops, noted: list[_Noted], sizes: list[tuple[int, ...]], rows: Array) -> Array:
    """All arrays of the layers in one, [rows, numbers]. Joined in pairs of pairs: each number is copied a few times only."""
    arrays = [array for each in noted for array in (each.queries, each.keys, each.values)]
    widths = [width for layer in sizes for width in layer]
    parts = [ops.reshape(array, (-1, 1, n)) for array, n in zip(arrays, widths, strict=True) if array is not None]
    while len(parts) > 1:
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        parts = [ops.join_heads(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return ops.take_rows(ops.reshape(parts[0], (-1, sum(widths))), rows)


def _seen(config: ModelConfig, layer: int, rule: AttentionRule, numbers: np.ndarray, first: int) -> Seen:
    shape = config.kv_layers()[layer]
    queries, keys, values = np.split(numbers, np.cumsum(_sizes(config, layer))[:-1], axis=1)
    keys = keys.reshape(len(keys), shape.num_kv_heads, shape.head_dim)
    values = keys[..., : shape.latent] if shape.latent else values.reshape(keys.shape)
    return Seen(layer, rule, first, queries.reshape(len(keys), config.num_heads, shape.head_dim), keys, values)

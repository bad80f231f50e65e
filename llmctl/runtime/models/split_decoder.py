"""The forward pass with its first layers on one backend and the rest on another, for models that a GPU does not hold.

The embedding and the first layers run on the host, where a table of rows is at home; the last layers, the norm and the head,
which is the largest matrix, on the device. Hidden states cross over once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array
from llmctl.kernels.split import SplitOps, ops_of_layer
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.models.decoder import Decoder, DecoderLayer, read_embeddings, read_head
from llmctl.runtime.models.layers import Norm
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.weights import ModelWeights


class SplitDecoder(Decoder):
    """A model on two backends. Every layer has one of its own; `ops` is the device's."""

    def __init__(self, split: SplitOps, weights: ModelWeights, progress: Any = None) -> None:
        """As `Decoder`."""
        config = self.config = weights.config
        assert 0 < split.num_host < config.num_layers, split.num_host
        self.ops, self.host, self.num_host = split.device_ops, split.host, split.num_host
        self.embed_tokens, self.embed_positions = read_embeddings(self.host, weights)
        self.layers = []
        for index, choices in enumerate(config.layers):
            self.layers.append(DecoderLayer(ops_of_layer(split, index), config, choices, weights, index))
            if progress:
                progress(index + 1, config.num_layers)
        self.norm = Norm(self.ops, config, weights, "model.norm")
        self.lm_head = read_head(self.ops, weights)
        self.tables, self._host_tables = RotaryTables(self.ops, config), RotaryTables(self.host, config)

    def compile(self, cache: KvCache) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        """As `Ops.compile`, of the two halves one after the other."""
        halves = [rope.rotary_dim // 2 for rope in self.tables.ropes]
        first = self.host.compile(lambda batch, rows: self._first(batch, cache, rows), halves)
        second = self.ops.compile(lambda batch, rows: self._second(batch, cache, rows), halves)

        def run(batch: BatchDescription, rows: np.ndarray) -> np.ndarray:
            hidden = first(batch, np.arange(len(batch.token_ids), dtype=np.int64))
            return second(replace(batch, hidden=hidden), rows)

        return run

    def _first(self, batch: BatchDescription, cache: KvCache, rows: Array) -> Array:
        x = self._begin(self.host, batch, self._host_tables)
        for layer in self.layers[: self.num_host]:
            x = layer.forward(x, batch, cache, self._host_tables)
        return self.host.take_rows(x, rows)

    def _second(self, batch: BatchDescription, cache: KvCache, rows: Array) -> Array:
        self.tables.prepare(batch)
        return self._end(batch.hidden, self.layers[self.num_host :], batch, cache, rows)

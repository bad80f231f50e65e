"""cos and sin of a batch's positions, made once a step for every distinct rope of the model."""

from __future__ import annotations

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies


class RotaryTables:
    """Angles of the current step; layers ask by their RopeConfig."""

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self.ops = ops
        self._ropes = {id(layer.rope): layer.rope for layer in config.layers if layer.rope is not None}
        self._static = {
            key: (ops.from_host(rope_frequencies(rope)[0]), rope_frequencies(rope)[1])
            for key, rope in self._ropes.items()
            if not rope.depends_on_length
        }
        self._angles: dict[int, tuple[Array, Array]] = {}

    def prepare(self, batch: BatchDescription) -> None:
        """Compute the angles [T, rotary_dim / 2] of every rope for this batch."""
        for key, rope in self._ropes.items():
            inv_freq, scaling = self._static.get(key) or self._by_length(rope, batch.rope_lengths)
            self._angles[key] = self.ops.rotary_angles(batch.positions, inv_freq, scaling)

    def _by_length(self, rope: RopeConfig, lengths: np.ndarray) -> tuple[Array, float]:
        """One row of frequencies a token, from the length of its sequence."""
        distinct, inverse = np.unique(lengths, return_inverse=True)
        tables = [rope_frequencies(rope, int(length)) for length in distinct]
        rows = np.stack([inv_freq for inv_freq, _ in tables])[inverse]
        return self.ops.from_host(rows), tables[0][1]

    def angles(self, rope: RopeConfig) -> tuple[Array, Array]:
        """cos and sin for a layer with this rope."""
        return self._angles[id(rope)]

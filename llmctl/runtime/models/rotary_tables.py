"""cos and sin of a batch's positions, made once a step for every distinct rope of the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies


class RotaryTables:
    """Angles of the current step; layers ask by their RopeConfig.

    ropes: the distinct ropes, in the order of `BatchDescription.inv_freqs`.
    """

    def __init__(self, ops: Ops, config: ModelConfig) -> None:
        self.ops = ops
        distinct = {id(layer.rope): layer.rope for layer in config.layers if layer.rope is not None}
        self.ropes = list(distinct.values())
        self._fixed = [rope_frequencies(rope) for rope in self.ropes]
        self._angles: dict[int, tuple[Array, Array]] = {}

    @property
    def depends_on_length(self) -> bool:
        """True if `frequencies` needs to know how long the sequences are."""
        return any(rope.depends_on_length for rope in self.ropes)

    def frequencies(self, lengths: Callable[[], np.ndarray]) -> list[np.ndarray]:
        """For every rope its inverse frequencies float32 [half], or [T, half] where they depend on a sequence's length.

        lengths: gives the length [T] each token's rope sees (Sequence.rope_length); called only if it matters.
        """
        if not self.depends_on_length:
            return [inv_freq for inv_freq, _ in self._fixed]
        distinct, inverse = np.unique(lengths(), return_inverse=True)
        return [
            np.stack([rope_frequencies(rope, int(length))[0] for length in distinct])[inverse]
            if rope.depends_on_length
            else inv_freq
            for rope, (inv_freq, _) in zip(self.ropes, self._fixed, strict=True)
        ]

    def prepare(self, batch: BatchDescription) -> None:
        """Compute the angles [T, rotary_dim / 2] of every rope for this batch."""
        for rope, inv_freq, (_, scaling) in zip(self.ropes, batch.inv_freqs, self._fixed, strict=True):
            self._angles[id(rope)] = self.ops.rotary_angles(batch.positions, inv_freq, scaling)

    def angles(self, rope: RopeConfig) -> tuple[Array, Array]:
        """cos and sin for a layer with this rope."""
        return self._angles[id(rope)]

"""What is in a sequence's cache: which tokens each layer and head still has, and how many bytes they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmctl.runtime.cache.memory import LayerShape, layer_bytes_per_token
from llmctl.runtime.cache.snapkv import Compression


@dataclass(frozen=True)
class KeptTokens:
    """Of a sequence of `num_tokens` computed tokens: what the next one can look at. Pages may hold some tokens more.

    layers: as a model's `kv_layers`, with the policy. compression: None, or what was done with the prompt.
    """

    num_tokens: int
    layers: Sequence[LayerShape]
    kv_type: str
    compression: Compression | None = None

    def positions(self, layer: int) -> np.ndarray:
        """The kept tokens' true positions, int64 [kv heads, kept], ascending."""
        shape, done = self.layers[layer], self.compression
        if done is not None and layer in done.positions:
            kept = done.positions[layer]
            later = np.arange(done.num_tokens, self.num_tokens)
            return np.concatenate([kept, np.broadcast_to(later, (len(kept), len(later)))], axis=1)
        first = 0 if shape.sliding_window is None else max(0, self.num_tokens - shape.sliding_window + 1)
        seen = np.concatenate([np.arange(min(shape.anchors, first)), np.arange(first, self.num_tokens)])
        return np.broadcast_to(seen, (shape.num_kv_heads, len(seen)))

    def num_kept(self, layer: int) -> int:
        """Tokens that each head of a layer has."""
        return self.positions(layer).shape[1]

    def num_dropped(self, layer: int) -> int:
        """Tokens that it has no more."""
        return self.num_tokens - self.num_kept(layer)

    def dropped(self, layers: Sequence[LayerShape], length: int) -> np.ndarray:
        """The share of heads that have no more of each of the first `length` tokens. layers: as they are without a policy; those
        with a window of their own do not count."""
        heads, missing = 0, np.zeros(length)
        for layer, shape in enumerate(layers):
            if shape.sliding_window is None:
                for positions in self.positions(layer):
                    missing[np.setdiff1d(np.arange(length), positions, assume_unique=True)] += 1
                    heads += 1
        return missing / max(1, heads)

    @property
    def nbytes(self) -> int:
        """Of what is kept, over all layers."""
        return sum(each * self.num_kept(i) for i, each in enumerate(self._bytes_per_token()))

    @property
    def full_bytes(self) -> int:
        """Of all tokens, over all layers."""
        return self.num_tokens * sum(self._bytes_per_token())

    def _bytes_per_token(self) -> list[int]:
        return [layer_bytes_per_token(layer, self.kv_type) or 0 for layer in self.layers]

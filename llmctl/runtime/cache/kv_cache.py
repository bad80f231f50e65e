"""The cache's tensors: pages of keys and values for every layer, on the backend's device."""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.memory import LayerShape


class KvCache:
    """`num_blocks` pages of `block_size` tokens, per layer.

    Which page belongs to whom is block_manager.py's concern; positions are never stored, only slots.
    """

    def __init__(
        self, ops: Ops, layers: Sequence[LayerShape], num_blocks: int, block_size: int, kv_type: str
    ) -> None:
        self.num_blocks, self.block_size, self.kv_type = num_blocks, block_size, kv_type
        self._layers = [
            ops.kv_pages(num_blocks, block_size, layer.num_kv_heads, layer.head_dim, kv_type, layer.latent) for layer in layers
        ]

    def layer(self, index: int) -> Array:
        """The pages of one layer, keys and values, in the backend's layout."""
        return self._layers[index]

"""The cache's tensors: pages of keys and values for every layer, on the backend's device."""

from __future__ import annotations

from collections.abc import Sequence

from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.memory import LayerShape


class KvCache:
    """Pages [num_blocks, block_size, num_kv_heads, head_dim] of keys and of values, per layer.

    Which page belongs to whom is block_manager.py's concern; positions are never stored, only slots.
    """

    def __init__(
        self, ops: Ops, layers: Sequence[LayerShape], num_blocks: int, block_size: int, kv_type: str
    ) -> None:
        self.num_blocks, self.block_size, self.kv_type = num_blocks, block_size, kv_type
        shapes = [(num_blocks, block_size, layer.num_kv_heads, layer.head_dim) for layer in layers]
        self._layers = [(ops.empty(shape, kv_type), ops.empty(shape, kv_type)) for shape in shapes]

    def layer(self, index: int) -> tuple[Array, Array]:
        """Key pages and value pages of one layer."""
        return self._layers[index]

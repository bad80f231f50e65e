"""The cache's tensors: pages of keys and values for every layer, on the backend's device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llmctl.kernels.ops import Array, Ops
from llmctl.runtime.cache.block_manager import PageCopy
from llmctl.runtime.cache.memory import BLOCK_SIZE, CachePlan, LayerShape


class KvCache:
    """The pages of a plan, layer by layer.

    Which page belongs to whom is block_manager.py's concern; positions are never stored, only slots.
    """

    def __init__(self, ops: Ops, layers: Sequence[LayerShape], plan: CachePlan, kv_type: str) -> None:
        self.plan, self.kv_type, self._ops = plan, kv_type, ops
        self._groups = {layer: number for number, group in enumerate(plan.groups) for layer in group.layers}
        self._layers = [
            ops.kv_pages(plan.num_pages[self._groups[i]], BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, kv_type, layer.latent)
            for i, layer in enumerate(layers)
        ]

    def layer(self, index: int) -> Array:
        """The pages of one layer, keys and values, in the backend's layout."""
        return self._layers[index]

    def group(self, index: int) -> int:
        """The number of the group of a layer: of its page map in a batch."""
        return self._groups[index]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages, one after the other, in every layer of their groups."""
        for copy in copies:
            for layer in self.plan.groups[copy.group].layers:
                self._ops.copy_page(self._layers[layer], copy.source, copy.target)

    def read(self, groups: list[list[int]]) -> list[list[bytes]]:
        """The bytes of the given pages of each group, for every layer of the model."""
        return [
            [self._ops.read_page(layer, page) for page in groups[self._groups[index]]] for index, layer in enumerate(self._layers)
        ]

    def write(self, groups: list[list[int]], layers: list[list[bytes]]) -> None:
        """Put bytes into the given pages of each group: the reverse of `read`. Errors: ValueError for pages of another size."""
        for index, (layer, data) in enumerate(zip(self._layers, layers, strict=True)):
            for page, each in zip(groups[self._groups[index]], data, strict=True):
                self._ops.write_page(layer, page, each)

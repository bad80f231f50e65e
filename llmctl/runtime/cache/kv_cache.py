"""The cache's tensors: pages of keys and values for every layer, on the backend's device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Array, Ops
from llmctl.kernels.split import SplitOps, ops_of_layer
from llmctl.runtime.cache.block_manager import PageCopy
from llmctl.runtime.cache.memory import BLOCK_SIZE, CachePlan, LayerShape


@dataclass(frozen=True)
class QueryStore:
    """Queries that are kept beside the cache, of the layers without a window: as many `places` at once, `num_heads` a token."""

    num_heads: int
    places: int


class KvCache:
    """The pages of a plan, layer by layer. queries: what is kept of queries, None for nothing; a batch then has one page map more
    than there are groups, whose slots are the places that its queries go to.

    Which page belongs to whom is block_manager.py's concern; positions are never stored, only slots.
    """

    def __init__(
        self, ops: Ops | SplitOps, layers: Sequence[LayerShape], plan: CachePlan, kv_type: str, queries: QueryStore | None = None
    ) -> None:
        self.plan, self.kv_type, self._shapes = plan, kv_type, layers
        self._ops = [ops_of_layer(ops, index) for index in range(len(layers))]
        self._groups = {layer: number for number, group in enumerate(plan.groups) for layer in group.layers}
        self._layers = [
            own.kv_pages(plan.num_pages[self._groups[i]], BLOCK_SIZE, layer.num_kv_heads, layer.head_dim, kv_type, layer.latent)
            for i, (layer, own) in enumerate(zip(layers, self._ops, strict=True))
        ]
        self._queries: dict[int, Array] = {}
        if queries is not None:
            pages = -(-queries.places // BLOCK_SIZE)
            for i, layer in enumerate(layers):
                if layer.sliding_window is None:  # as keys of the same width, without values
                    width = layer.head_dim
                    self._queries[i] = self._ops[i].kv_pages(pages, BLOCK_SIZE, queries.num_heads, width, "f32", width)

    def ops(self, index: int) -> Ops:
        """The backend that has a layer's pages."""
        return self._ops[index]

    def layer(self, index: int) -> Array:
        """The pages of one layer, keys and values, in the backend's layout."""
        return self._layers[index]

    def shape(self, index: int) -> LayerShape:
        """What one layer keeps."""
        return self._shapes[index]

    def group(self, index: int) -> int:
        """The number of the group of a layer: of its page map in a batch."""
        return self._groups[index]

    def keep_queries(self, index: int, queries: Array, batch: BatchDescription) -> None:
        """Put a layer's queries [T, num_heads, head_dim] to the places that the batch has for them."""
        if index in self._queries:
            self._ops[index].store_kv(queries, None, self._queries[index], batch.of_group(len(self.plan.groups)))

    def kept_queries(self, index: int, places: np.ndarray) -> np.ndarray:
        """What was put to these places: float32 [places, num_heads, head_dim]."""
        return self._ops[index].read_keys(self._queries[index], places)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages, one after the other, in every layer of their groups."""
        for copy in copies:
            for layer in self.plan.groups[copy.group].layers:
                self._ops[layer].copy_page(self._layers[layer], copy.source, copy.target)

    def read(self, groups: list[list[int]]) -> list[list[bytes]]:
        """The bytes of the given pages of each group, for every layer of the model."""
        return [
            [self._ops[index].read_page(layer, page) for page in groups[self._groups[index]]]
            for index, layer in enumerate(self._layers)
        ]

    def write(self, groups: list[list[int]], layers: list[list[bytes]]) -> None:
        """Put bytes into the given pages of each group: the reverse of `read`. Errors: ValueError for pages of another size."""
        for index, (layer, data) in enumerate(zip(self._layers, layers, strict=True)):
            for page, each in zip(groups[self._groups[index]], data, strict=True):
                self._ops[index].write_page(layer, page, each)

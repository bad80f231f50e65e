"""How many pages and bytes a KV cache takes: one set of numbers for the engine's allocation and for `inspect-kv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.kernels.kv_types import row_bytes, sides_of

BLOCK_SIZE = 16
"""Tokens in a page."""
PREFILL_CHUNK = 512
"""Tokens of prompts that run in one step, where nothing else is asked for."""


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token: num_kv_heads · head_dim elements for keys and as many for values.

    sliding_window: tokens a query can still see; None for all. latent: above zero, the values are so many of the keys' own
    elements, and nothing is kept for them. anchors: first tokens of a text that are seen beside the window, at most a page.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    latent: int = 0
    anchors: int = 0


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens, so that they share block tables. layers: their numbers in the model. anchors: first
    tokens that are kept beside the window."""

    window: int | None
    layers: tuple[int, ...]
    anchors: int = 0

    @property
    def anchor_pages(self) -> int:
        """Pages that the anchors lie in."""
        return -(-self.anchors // BLOCK_SIZE)

    def held_pages(self, num_pages: int, first: int) -> int:
        """Those of a table's `num_pages` pages that it holds when its window begins with page `first`."""
        return num_pages - first + min(self.anchor_pages, first)


def group_layers(layers: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    """The groups of a model, in order of first appearance."""
    seen = [(layer.sliding_window, layer.anchors) for layer in layers]
    return tuple(
        LayerGroup(window, tuple(i for i, each in enumerate(seen) if each == (window, anchors)), anchors)
        for window, anchors in dict.fromkeys(seen)
    )


def layer_bytes_per_token(layer: LayerShape, kv_type: str) -> int | None:
    """Bytes of keys and values one token adds to a layer; None where the type does not fit head_dim."""
    sides = sides_of(kv_type)
    rows = [row_bytes(layer.head_dim, side) for side in (sides[:1] if layer.latent else sides)]
    return None if None in rows else layer.num_kv_heads * sum(row for row in rows if row is not None)


def bytes_per_token(layers: Sequence[LayerShape], kv_type: str) -> int | None:
    """Bytes one token adds over all layers; None where the type does not fit some layer."""
    sizes = [layer_bytes_per_token(layer, kv_type) for layer in layers]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def least_bytes(layers: Sequence[LayerShape], kv_type: str, context: int, batch: int = 1) -> int | None:
    """Bytes of the tokens that the next query of each of `batch` sequences of `context` tokens can see: what no cache of this
    type can do without. None where the type does not fit some layer."""
    sizes = [layer_bytes_per_token(layer, kv_type) for layer in layers]
    if None in sizes:
        return None
    seen = (min(context, layer.anchors + (layer.sliding_window or context)) for layer in layers)
    return batch * sum(size * tokens for size, tokens in zip(sizes, seen, strict=True) if size is not None)


@dataclass(frozen=True)
class Demand:
    """What a cache is to hold: `sequences` of `context` tokens each, computed in steps of up to `prefill_chunk`.

    longest_draft: tokens that may be taken back again after they were computed.
    """

    context: int
    sequences: int = 1
    prefill_chunk: int = PREFILL_CHUNK
    longest_draft: int = 0

    def first_kept(self, window: int | None, num_computed: int, num_tokens: int) -> int:
        """The first token that a group has to keep when a step brings a sequence from `num_computed` to `num_tokens` tokens.

        Of a window that is what the step's first query sees. Beside that it keeps the window, the longest draft and one token
        more, so that the longest draft can be taken back.
        """
        if window is None:
            return 0
        return max(0, min(num_computed - window + 1, num_tokens - window - self.longest_draft - 1))

    def sequence_pages(self, window: int | None, anchor_pages: int = 0) -> int:
        """Pages of a group that one sequence holds while it generates: of a window, those that window + longest draft + 1
        tokens touch wherever the first of them lies in its page, and those of its anchors."""
        all_pages = -(-self.context // BLOCK_SIZE)
        if window is None:
            return all_pages
        return min(all_pages, anchor_pages + (window + self.longest_draft + 1 + 2 * (BLOCK_SIZE - 1)) // BLOCK_SIZE)

    def group_pages(self, group: LayerGroup) -> int:
        """Pages of a group for all sequences. Where there is a window, one more a sequence and those of a prefill step."""
        every = self.sequences * -(-self.context // BLOCK_SIZE)
        if group.window is None:
            return every
        chunk = -(-min(self.prefill_chunk, self.context) // BLOCK_SIZE)
        return min(every, self.sequences * (self.sequence_pages(group.window, group.anchor_pages) + 1) + chunk)


@dataclass(frozen=True)
class CachePlan:
    """Pages of every group of layers. nbytes: of all layers together, None where the type does not fit some layer."""

    demand: Demand
    groups: tuple[LayerGroup, ...]
    num_pages: tuple[int, ...]
    nbytes: int | None

    @property
    def capacity(self) -> int:
        """Tokens one sequence can have when it is alone."""
        full = [pages for group, pages in zip(self.groups, self.num_pages, strict=True) if group.window is None]
        return min([self.demand.context, *(pages * BLOCK_SIZE for pages in full)])


def plan_cache(
    layers: Sequence[LayerShape], kv_type: str, demand: Demand, *, most_bytes: int | None = None, most_pages: int | None = None
) -> CachePlan:
    """The pages an engine allocates. most_bytes: give fewer sequences a full context where it would be more than that, down to
    one. most_pages: of any group."""
    groups = group_layers(layers)
    sizes = [_page_bytes(layers, group, kv_type) for group in groups]
    pages = [demand.group_pages(group) for group in groups]
    if most_bytes is not None and None not in sizes:
        least = [Demand(demand.context, 1, demand.prefill_chunk, demand.longest_draft).group_pages(g) for g in groups]
        pages = _within(most_bytes, pages, least, [size or 0 for size in sizes])
    if most_pages is not None:
        counts = zip(groups, pages, strict=True)
        pages = [most_pages if group.window is None else min(count, most_pages) for group, count in counts]
    total = None if None in sizes else sum((size or 0) * count for size, count in zip(sizes, pages, strict=True))
    return CachePlan(demand, groups, tuple(pages), total)


def _page_bytes(layers: Sequence[LayerShape], group: LayerGroup, kv_type: str) -> int | None:
    """Bytes of a page over all layers of a group."""
    per_token = bytes_per_token([layers[i] for i in group.layers], kv_type)
    return None if per_token is None else per_token * BLOCK_SIZE


def _within(most_bytes: int, wanted: list[int], least: list[int], sizes: list[int]) -> list[int]:
    """Between the pages of one sequence and those wanted, as many as fit; every group gives up the same share."""

    def total(pages: list[int]) -> int:
        return sum(size * count for size, count in zip(sizes, pages, strict=True))

    spare = total(wanted) - total(least)
    share = min(1.0, max(0.0, (most_bytes - total(least)) / spare)) if spare else 1.0
    return [low + int(share * (high - low)) for low, high in zip(least, wanted, strict=True)]


def fitting_context(layers: Sequence[LayerShape], kv_type: str, most_bytes: int, most_tokens: int) -> int:
    """The longest context, up to `most_tokens`, whose cache for one sequence takes at most so many bytes; 0 if none does."""
    low, high = 0, most_tokens
    while low < high:
        middle = (low + high + 1) // 2
        needed = plan_cache(layers, kv_type, Demand(middle)).nbytes
        low, high = (middle, high) if needed is not None and needed <= most_bytes else (low, middle - 1)
    return low

"""attention(queries, key_pages, value_pages, batch, scale, sliding_window=None, softcap=None, sinks=None, anchors=0) -> y

queries                 [T, num_heads, head_dim]                           tokens of all sequences, one after the other
key_pages               [num_blocks, block_size, num_kv_heads, head_dim]   this step's keys and values already stored
value_pages             the same; of latent pages the first `latent` columns of key_pages, [..., latent]
batch                   who owns which queries and pages: `BatchDescription`
scale                   factor on the scores, usually head_dim ** -0.5
sliding_window          a query at position p sees keys p − window + 1 … p; None sees all up to p
anchors                 so many first tokens (at most a page) that every query after them sees beside its window
softcap                 scores become softcap · tanh(scores / softcap), before the mask
sinks                   [num_heads] float32: a score that every query of the head has beside those of its keys, and whose value
                        is 0, so that the weights of the keys sum to less than one; neither scaled nor capped
y                       [T, num_heads, head_dim], or [T, num_heads, latent]

Query head h reads kv head h // (num_heads // num_kv_heads): multi-head, grouped and multi-query attention are one op. So is
multi-head latent attention: its one kv head is a token's compressed latent and the rotated part of its key, side by side.
Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023;
DeepSeek-AI, "DeepSeek-V2", 2024, for the latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PageMap:
    """Where the layers of one group keep a step's tokens. Layers that keep as much (all tokens, or a window) are a group.

    slot_mapping  [T]  int64, cache slot each token is written to
    context_lens  S    Python ints: keys each sequence has once this step is stored
    block_tables  S    int64 arrays of page numbers, at least ceil(context_len / block_size) long; a page that no query of the
                       step can see may be −1

    A sequence whose cache was compressed has fewer keys here than tokens: a token's place in the table counts what is kept.
    """

    slot_mapping: Any
    context_lens: list[int]
    block_tables: list[Any]


@dataclass(frozen=True)
class BatchDescription:
    """One step of several sequences, laid end to end. Passed explicitly to every op that needs it; never global.

    token_ids     [T]   int64, ids
    positions     [T]   int64, position of each token in its sequence
    inv_freqs     for every distinct rope of the model float32 [half], or [T, half] where it depends on a sequence's length
    cu_seqlens_q  S + 1 Python ints: tokens of sequence s are cu_seqlens_q[s] … cu_seqlens_q[s + 1] − 1
    page_maps     of every group of layers
    block_size    tokens in a page
    group         whose page map slot_mapping, context_lens and block_tables are
    hidden        float32 [T, hidden_size], what other layers made before those that this step is for; None where there are none
    """

    token_ids: Any
    positions: Any
    inv_freqs: Sequence[Any]
    cu_seqlens_q: list[int]
    page_maps: Sequence[PageMap]
    block_size: int
    group: int = 0
    hidden: Any = None

    def of_group(self, group: int) -> BatchDescription:
        """The same step as the layers of another group see it."""
        return self if group == self.group else replace(self, group=group)

    @property
    def slot_mapping(self) -> Any:
        """Of the group at hand."""
        return self.page_maps[self.group].slot_mapping

    @property
    def context_lens(self) -> list[int]:
        """Of the group at hand."""
        return self.page_maps[self.group].context_lens

    @property
    def block_tables(self) -> list[Any]:
        """Of the group at hand."""
        return self.page_maps[self.group].block_tables

    def convert(self, array: Callable[[Any], Any]) -> BatchDescription:
        """The same batch with every array passed through `array`, to bring it to a device."""
        return replace(
            self,
            token_ids=array(self.token_ids),
            positions=array(self.positions),
            inv_freqs=[array(values) for values in self.inv_freqs],
            hidden=None if self.hidden is None else array(self.hidden),
            page_maps=[
                PageMap(array(m.slot_mapping), m.context_lens, [array(table) for table in m.block_tables]) for m in self.page_maps
            ],
        )

"""Paged attention in plain torch: gather a sequence's pages, then the textbook formula in float32."""

from __future__ import annotations

import torch

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.store_kv._reference import Side


def attention(
    queries: torch.Tensor,
    key_pages: Side,
    value_pages: Side,
    batch: BatchDescription,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    anchors: int = 0,
) -> torch.Tensor:
    """Causal attention of every sequence of the batch over its own pages; see the contract for shapes."""
    out = queries.new_empty(*queries.shape[:2], value_pages.width)
    for s, context_len in enumerate(batch.context_lens):
        begin, end = batch.cu_seqlens_q[s], batch.cu_seqlens_q[s + 1]
        first_key = 0 if sliding_window is None else max(0, context_len - (end - begin) - sliding_window + 1)
        tokens = torch.arange(first_key, context_len, device=queries.device)
        tokens = torch.cat([torch.arange(min(anchors, first_key), device=queries.device), tokens])
        slots = slots_of(batch.block_tables[s], tokens, batch.block_size)
        keys, values = key_pages.read(slots), value_pages.read(slots)
        mask = _mask(context_len - (end - begin), context_len, tokens, sliding_window, anchors)
        attended = _attend(queries[begin:end].float(), keys, values, mask, scale, softcap, sinks)
        out[begin:end] = attended.to(queries.dtype)
    return out


def attention_of_sequence(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last Tq tokens of one sequence over the keys and values of its last Tk: float32 [Tq, num_heads, head_dim]."""
    tokens = torch.arange(len(keys), device=queries.device)
    mask = _mask(len(keys) - len(queries), len(keys), tokens, sliding_window, 0)
    return _attend(queries, keys, values, mask, scale, softcap, sinks)


def slots_of(block_table: torch.Tensor, tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Cache slots of these tokens of a sequence."""
    return block_table[tokens // block_size] * block_size + tokens % block_size


def _mask(first_query: int, last_query: int, keys: torch.Tensor, window: int | None, anchors: int) -> torch.Tensor:
    """True where the query of row i (position first_query + i) may see the key of column j (position keys[j])."""
    rows = torch.arange(first_query, last_query, device=keys.device)[:, None]
    columns = keys[None, :]
    seen = columns <= rows
    return seen if window is None else seen & ((rows - columns < window) | (columns < anchors))


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries [Tq, H, D] over keys and values [Tk, KVH, D] under mask [Tq, Tk]: [Tq, H, D]."""
    num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0)[:, None] * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(*scores.shape[:2], 1, 1).expand(-1, -1, num_queries, 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : mask.shape[1]]
    mixed = weights @ values.permute(1, 0, 2)[:, None]
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, values.shape[-1])

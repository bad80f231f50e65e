"""attention_votes in plain torch."""

from __future__ import annotations

import torch


def attention_votes(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, softcap: float | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """queries [W, num_heads, head_dim] of the last tokens, keys [length, num_kv_heads, head_dim]: [num_kv_heads, length]."""
    num_queries, num_heads, head_dim = queries.shape
    length, num_kv_heads = keys.shape[:2]
    grouped = queries.view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.permute(1, 2, 0)[:, None] * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    tokens = torch.arange(length, device=keys.device)
    scores = scores.masked_fill(tokens[None] > tokens[length - num_queries :, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(num_kv_heads, -1, 1, 1).expand(-1, -1, num_queries, 1)], dim=-1)
    return scores.softmax(dim=-1)[..., :length].sum(dim=(1, 2))

"""moe in plain torch: every token's experts one after the other."""

from __future__ import annotations

import torch

from llmctl.kernels.moe import Routing
from llmctl.kernels.swiglu._reference import gated_activation


def route(logits: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E] → chosen experts int64 [T, top_k], best first, and their weights float32 [T, top_k]."""
    logits = logits.float()
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(dim=-1)
    worth = scores if routing.bias is None else scores + torch.from_numpy(routing.bias).to(scores.device)
    if routing.num_groups > 1:
        worth = worth.masked_fill(~_allowed(worth, routing), -torch.inf)
    chosen = worth.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_k]
    weights = scores.gather(1, chosen)
    if routing.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen, weights * routing.scale


def _allowed(worth: torch.Tensor, routing: Routing) -> torch.Tensor:
    """bool [T, E]: experts of the best groups."""
    grouped = worth.unflatten(1, (routing.num_groups, -1))
    of_group = grouped.topk(2, dim=-1).values.sum(dim=-1) if routing.group_by_top2 else grouped.amax(dim=-1)
    best = of_group.argsort(dim=-1, descending=True, stable=True)[:, : routing.top_groups]
    groups = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, best, True)
    return groups.repeat_interleave(grouped.shape[2], dim=1)


def moe(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    activation: str,
) -> torch.Tensor:
    """x [T, H], router_logits [T, E], gate and up [E, I, H], down [E, H, I] → [T, H]."""
    chosen, weights = route(router_logits, routing)
    y = torch.zeros_like(x)
    for rank in range(routing.top_k):
        for expert in chosen[:, rank].unique().tolist():
            tokens = (chosen[:, rank] == expert).nonzero()[:, 0]
            hidden = gated_activation(x[tokens] @ gate[expert].T, x[tokens] @ up[expert].T, activation)
            y[tokens] += weights[tokens, rank, None].to(x.dtype) * (hidden @ down[expert].T)
    return y

"""moe in plain torch: every token's experts one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from llmctl.kernels.moe import Experts, Routing
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


def moe(x: torch.Tensor, router_logits: torch.Tensor, experts: Experts, routing: Routing, activation: str) -> torch.Tensor:
    """x [T, H], router_logits [T, E] → [T, H]. Every expert computes the tokens that chose it."""
    chosen, weights = route(router_logits, routing)
    experts.counts[:] += chosen.flatten().bincount(minlength=routing.num_experts).cpu().numpy()
    y = torch.zeros_like(x)
    for rank in range(routing.top_k):
        for expert in chosen[:, rank].unique().tolist():
            tokens = (chosen[:, rank] == expert).nonzero()[:, 0]
            gate, up = (_product(x[tokens], side, bias, expert) for side, bias in _inputs(experts))
            hidden = gated_activation(gate, up, activation)
            out = _product(hidden, experts.down, experts.down_bias, expert)
            y[tokens] += weights[tokens, rank, None].to(x.dtype) * out
    return y


def _inputs(experts: Experts) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    return (experts.gate, experts.gate_bias), (experts.up, experts.up_bias)


def _product(x: torch.Tensor, weights: Any, biases: torch.Tensor | None, expert: int) -> torch.Tensor:
    return functional.linear(x, weights[expert], None if biases is None else biases[expert])

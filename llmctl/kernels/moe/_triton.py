"""moe in Triton, without a word to the host. Few tokens: matrix-vector products that look their expert up. More: tokens sorted by
expert, every expert's padded to whole blocks, multiplied as tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from llmctl.kernels.linear._triton import SortedRows, activations_of, as_plain, grouped_matmul, matvec, takes_matvec
from llmctl.kernels.moe import Experts, Routing
from llmctl.kernels.moe._triton_route import combine, route
from llmctl.kernels.swiglu._triton import gated_activation
from llmctl.kernels.triton_lib.launch import cdiv, power_of_two
from llmctl.kernels.triton_lib.tiles import MAX_MATMUL_ROWS
from llmctl.kernels.triton_lib.weights import TritonWeight, stack_weights

_LEAST_BLOCK = 16


@dataclass
class _Prepared:
    """Experts as the kernels take them. counts: int64 [E] on the device, what `Experts.counts` has not been told yet. bias: of
    the routing, on the device."""

    gate: TritonWeight
    up: TritonWeight
    down: TritonWeight
    counts: torch.Tensor
    bias: torch.Tensor | None


_prepared: WeakKeyDictionary[Experts, _Prepared] = WeakKeyDictionary()


def moe(x: torch.Tensor, router_logits: torch.Tensor, experts: Experts, routing: Routing, activation: str) -> torch.Tensor:
    """x [T, H], router_logits [T, E] → [T, H]. `Experts.counts` are up to date after `expert_counts`."""
    if not len(x):
        return torch.empty_like(x)
    ready = prepared_experts(experts, routing, x.device)
    chosen, weights = route(router_logits, routing, ready.bias)
    flat = chosen.flatten()
    ready.counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    groups = None if takes_matvec(ready.gate, len(x)) and takes_matvec(ready.down, len(x)) else _sorted(flat, routing)
    gate, up = _products(x, (ready.gate, ready.up), (experts.gate_bias, experts.up_bias), flat, groups, routing.top_k)
    hidden = gated_activation(gate, up, activation)
    (out,) = _products(hidden, (ready.down,), (experts.down_bias,), flat, groups, 1)
    return combine(out.view(len(x), routing.top_k, -1), weights)


def prepared_experts(experts: Experts, routing: Routing, device: torch.device) -> _Prepared:
    """Made once, best before tokens come: matrices one by one are put side by side, and the lists they came in hold views."""
    ready = _prepared.get(experts)
    if ready is None:
        parts = (_side_by_side(part) for part in (experts.gate, experts.up, experts.down))
        bias = None if routing.bias is None else torch.from_numpy(routing.bias).to(device)
        ready = _Prepared(*parts, torch.zeros(routing.num_experts, dtype=torch.int64, device=device), bias)
        _prepared[experts] = ready
    return ready


def expert_counts(experts: Experts) -> np.ndarray:
    """`Experts.counts`, after what the device counted was added."""
    ready = _prepared.get(experts)
    if ready is not None:
        experts.counts[:] += ready.counts.cpu().numpy()
        ready.counts.zero_()
    return experts.counts


def _side_by_side(weights: Any) -> TritonWeight:
    if isinstance(weights, TritonWeight):
        return weights
    if len({(each.format, each.form, each.order is None) for each in weights}) > 1:
        weights[:] = [as_plain(each) for each in weights]
    stacked = stack_weights(weights)
    weights[:] = [stacked.matrix(index) for index in range(len(weights))]
    return stacked


def _products(
    x: torch.Tensor,
    weights: tuple[TritonWeight, ...],
    biases: tuple[torch.Tensor | None, ...],
    experts: torch.Tensor,
    groups: SortedRows | None,
    x_share: int,
) -> list[torch.Tensor]:
    """x [pairs / x_share, K] times each pair's expert of every weight: [pairs, N] each."""
    rows = {}  # of x, in the order of columns that a weight needs
    results = []
    for weight, bias in zip(weights, biases, strict=True):
        own, share = (x, x_share) if weight.order is None else (_in_order(x, weight, experts, x_share), 1)
        if groups is not None:
            results.append(grouped_matmul(own, weight, len(experts), groups, bias, share))
            continue
        if weight.order is not None or share not in rows:
            rows[share] = activations_of(own, weight)
        results.append(matvec(rows[share], weight, 1, len(experts), experts, bias, share))
    return results


def _in_order(x: torch.Tensor, weight: TritonWeight, experts: torch.Tensor, x_share: int) -> torch.Tensor:
    """A row of x for every pair, its columns as the pair's expert stores them."""
    if weight.order.ndim == 1:
        return x.index_select(1, weight.order).repeat_interleave(x_share, 0)
    return x.repeat_interleave(x_share, 0).gather(1, weight.order[experts.long()])


def _sorted(experts: torch.Tensor, routing: Routing) -> SortedRows:
    """Pairs grouped by expert, without the host knowing how many each has: as many blocks as there could be."""
    pairs, count = len(experts), routing.num_experts
    block_m = min(power_of_two(cdiv(pairs, count), _LEAST_BLOCK), MAX_MATMUL_ROWS)
    most = pairs // block_m + min(pairs, count)
    order = experts.argsort(stable=True)
    numbers = torch.zeros(count, dtype=torch.int64, device=experts.device)
    numbers.scatter_add_(0, experts.long(), torch.ones_like(experts, dtype=torch.int64))
    ends = ((numbers + block_m - 1) // block_m).cumsum(0)  # in blocks
    own = experts[order].long()
    first_block, first_pair = ends - (numbers + block_m - 1) // block_m, numbers.cumsum(0) - numbers
    places = first_block[own] * block_m + torch.arange(pairs, device=experts.device) - first_pair[own]
    padded = torch.full((most * block_m,), -1, dtype=torch.int32, device=experts.device)
    padded[places] = order.int()
    blocks = torch.searchsorted(ends, torch.arange(most, device=experts.device), right=True)
    return SortedRows(padded, blocks.clamp(max=count - 1).int(), block_m)

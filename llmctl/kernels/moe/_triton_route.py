"""From router logits to experts and weights in one launch, and from the experts' results to their weighted sum in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llmctl.kernels.moe import Routing
from llmctl.kernels.triton_lib.compilation import Case
from llmctl.kernels.triton_lib.launch import cdiv, empty, power_of_two

_COMBINE_BLOCK = 512


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, E], bias float32 [E] → chosen experts int32 [T, top_k], best first, and their weights float32 [T, top_k]."""
    tokens, experts = logits.shape
    chosen = empty((tokens, routing.top_k), torch.int32, logits.device)
    weights = empty((tokens, routing.top_k), torch.float32, logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits.contiguous(), logits if bias is None else bias, chosen, weights, experts, routing.scale,
            TOP_K=routing.top_k, GROUPS=routing.num_groups, TOP_GROUPS=routing.top_groups, BY_TOP2=routing.group_by_top2,
            SIGMOID=routing.sigmoid, RENORMALIZE=routing.renormalize, HAS_BIAS=bias is not None, BLOCK=power_of_two(experts),
            num_warps=1,
        )  # fmt: skip
    return chosen, weights


def combine(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """results [T, top_k, H] times weights [T, top_k], summed in order of choice: [T, H]."""
    tokens, top_k, columns = results.shape
    y = empty((tokens, columns), results.dtype, results.device)
    grid = (tokens, cdiv(columns, _COMBINE_BLOCK))
    combine_kernel[grid](results, weights, y, columns, TOP_K=top_k, BLOCK=_COMBINE_BLOCK)
    return y


@triton.jit
def _best(worth, index):
    """(largest, where it is): of equal ones the first. A NaN counts as worth nothing, so that what is found is an expert."""
    largest = tl.max(worth, axis=0)
    return largest, tl.min(tl.where(worth == largest, index, 2147483647), axis=0)


@triton.jit
def _allowed(worth, index, experts, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TOP2: tl.constexpr):
    """Whether an expert belongs to one of the best groups."""
    group = index // (experts // GROUPS)
    value = tl.full(worth.shape, float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        own = tl.where(group == g, worth, float("-inf"))
        largest, place = _best(own, index)
        if BY_TOP2:
            largest += tl.max(tl.where(index == place, float("-inf"), own), axis=0)
        value = tl.where(group == g, largest, value)
    allowed = index < 0
    for _ in tl.static_range(TOP_GROUPS):
        largest, place = _best(value, index)
        taken = group == place // (experts // GROUPS)
        allowed = allowed | taken
        value = tl.where(taken, float("-inf"), value)
    return allowed & (index < experts)


@triton.jit
def route_kernel(
    logits,
    bias,
    chosen,
    weights,
    experts,
    factor,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TOP2: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token a program. Logits that are no numbers give weights that are none, of experts that are some."""
    token = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    seen = index < experts
    values = tl.load(logits + token * experts + index, mask=seen, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.where(seen, 1.0 / (1.0 + tl.exp(-values)), 0.0)
    else:
        powers = tl.exp(values - tl.max(values, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    worth = scores
    if HAS_BIAS:
        worth += tl.load(bias + index, mask=seen, other=0.0)
    worth = tl.where(seen & (worth == worth), worth, float("-inf"))
    if GROUPS > 1:
        worth = tl.where(_allowed(worth, index, experts, GROUPS, TOP_GROUPS, BY_TOP2), worth, float("-inf"))
    rank = tl.arange(0, triton.next_power_of_2(TOP_K))
    found = tl.zeros(rank.shape, tl.int32)
    shares = tl.zeros(rank.shape, tl.float32)
    left = seen
    for r in tl.static_range(TOP_K):
        largest = tl.max(tl.where(left, worth, float("-inf")), axis=0)
        place = tl.min(tl.where(left & (worth == largest), index, 2147483647), axis=0)
        found = tl.where(rank == r, place, found)
        shares = tl.where(rank == r, tl.sum(tl.where(index == place, scores, 0.0), axis=0), shares)
        left = left & (index != place)
    if RENORMALIZE:
        shares = shares / tl.sum(shares, axis=0)
    tl.store(chosen + token * TOP_K + rank, found, mask=rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, shares * factor, mask=rank < TOP_K)


@triton.jit
def combine_kernel(results, weights, y, columns, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (token, block of columns)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + rank)
        total += weight * tl.load(results + (token * TOP_K + rank) * columns + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=mask)


def kernel_cases() -> list[Case]:
    """Routing as Mixtral's and as DeepSeek-V3's, and the sum of eight experts' results."""
    types = {"logits": "*fp16", "bias": "*fp32", "chosen": "*i32", "weights": "*fp32", "experts": "i32", "factor": "fp32"}
    plain = {"GROUPS": 1, "TOP_GROUPS": 1, "BY_TOP2": False, "SIGMOID": False, "RENORMALIZE": True, "HAS_BIAS": False}
    grouped = {**plain, "GROUPS": 8, "TOP_GROUPS": 4, "BY_TOP2": True, "SIGMOID": True, "HAS_BIAS": True}
    aligned = ("logits", "bias", "chosen", "weights")
    sums = {"results": "*fp16", "weights": "*fp32", "y": "*fp16", "columns": "i32"}
    return [
        Case("moe.route.e8", route_kernel, types, {**plain, "TOP_K": 2, "BLOCK": 8}, aligned, num_warps=1),
        Case("moe.route.e256", route_kernel, types, {**grouped, "TOP_K": 8, "BLOCK": 256}, aligned, num_warps=1),
        Case("moe.combine", combine_kernel, sums, {"TOP_K": 8, "BLOCK": _COMBINE_BLOCK}, tuple(sums)),
    ]

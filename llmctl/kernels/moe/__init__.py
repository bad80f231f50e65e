"""moe(x, router_logits, experts, routing, activation) -> y

x              [T, H]
router_logits  [T, E]   one number an expert, from the router's own linear
experts        gate and up of (E, I, H), down of (E, H, I), biases: `Experts`
routing        how the logits become `top_k` experts a token and their weights: `Routing`
activation     as in swiglu
y              [T, H]   Σ over the token's experts e of weight_e · down_e(activation(gate_e x) · up_e x), biases on all three

The sum runs in the order of choice, so a token's result does not depend on the others of the batch.
Fedus et al., "Switch Transformers", 2021; Jiang et al., "Mixtral of Experts", 2024; DeepSeek-AI, "DeepSeek-V3", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmctl.errors import FormatError


@dataclass(frozen=True, eq=False)
class Experts:
    """The prepared experts of one layer.

    gate, up, down: what `prepare_weight` makes of the three-dimensional weight, or a list of what it makes of one matrix an
    expert. gate_bias, up_bias, down_bias: what `prepare_vector` makes of (E, rows), or None. counts: int64 [E], tokens that
    each expert had since the experts were prepared; every call of the op adds to it, at the latest when `Ops.expert_counts` asks.
    """

    gate: Any
    up: Any
    down: Any
    counts: np.ndarray
    gate_bias: Any = None
    up_bias: Any = None
    down_bias: Any = None


@dataclass(frozen=True, eq=False)
class Routing:
    """From router logits to experts and weights.

    Scores are softmax over all experts, or the sigmoid of each (`sigmoid`). The `top_k` experts of highest score + `bias` are
    chosen, best first, of equal ones the lower number. Where `num_groups` > 1 the experts are split into so many groups of
    neighbours and only those of the best `top_groups` may be chosen; a group is worth its best score + bias, or the sum of its
    two best (`group_by_top2`). An expert's weight is its score (without bias), divided by the sum of the chosen ones' if
    `renormalize`, times `scale`.

    Mixtral: renormalize. Qwen3-MoE: as `norm_topk_prob` says. DeepSeek-V2: groups, scale. DeepSeek-V3: sigmoid, bias, groups
    by their two best, renormalize, scale. gpt-oss, whose weights are the softmax of the chosen logits: renormalize.
    """

    num_experts: int
    top_k: int
    renormalize: bool = False
    sigmoid: bool = False
    bias: np.ndarray | None = None
    num_groups: int = 1
    top_groups: int = 1
    group_by_top2: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.top_groups <= self.num_groups or self.num_experts % self.num_groups:
            raise FormatError(f"{self.top_groups} of {self.num_groups} groups cannot be chosen among {self.num_experts} experts")
        per_group = self.num_experts // self.num_groups
        if not 1 <= self.top_k <= self.top_groups * per_group:
            raise FormatError(f"{self.top_k} experts a token cannot be chosen among {self.top_groups * per_group}")
        if self.group_by_top2 and per_group < 2:
            raise FormatError(f"groups of {per_group} experts have no two best")
        if self.bias is not None and (self.bias.dtype != np.float32 or self.bias.shape != (self.num_experts,)):
            raise FormatError(f"the bias must be float32 ({self.num_experts},), got {self.bias.dtype} {self.bias.shape}")

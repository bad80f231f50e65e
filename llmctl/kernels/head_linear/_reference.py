"""head_linear in plain torch."""

from __future__ import annotations

import torch


def head_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, num_heads, in_features], weight [num_heads, out_features, in_features] → [T, num_heads, out_features]."""
    return torch.einsum("thi,hoi->tho", x, weight)

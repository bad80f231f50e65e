"""linear in plain torch."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N]: [T, N]."""
    return torch.nn.functional.linear(x, weight, bias)

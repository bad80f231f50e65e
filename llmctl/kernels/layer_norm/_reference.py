"""layer_norm in plain torch."""

from __future__ import annotations

import torch


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalize the last axis of x [..., H] to mean zero and variance one, then weight and bias [H]; float32 inside."""
    if weight.ndim == 1:
        return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)
    y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=eps) * weight
    return (y if bias is None else y + bias).to(x.dtype)

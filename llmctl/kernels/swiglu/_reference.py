"""gated_activation in plain torch."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from llmctl.kernels.swiglu import CLAMPED_SWIGLU, SWIGLU_ALPHA, SWIGLU_LIMIT

_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}


def activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(x), of the same shape."""
    return _ACTIVATIONS[activation](x)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) times up, both [T, I]."""
    if activation == CLAMPED_SWIGLU:
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)
    return _ACTIVATIONS[activation](gate) * up

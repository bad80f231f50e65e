"""rotary in plain torch."""

from __future__ import annotations

import torch


def rotary_angles(
    positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, rotary_dim / 2] in float32 of positions [T] times inv_freq, [rotary_dim / 2] or one row a token."""
    angles = positions.float()[:, None] * inv_freq
    return angles.cos() * scaling, angles.sin() * scaling


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim elements of every head of x [T, heads, head_dim]."""
    half = cos.shape[-1]
    cos, sin = cos[:, None, :].to(x.dtype), sin[:, None, :].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

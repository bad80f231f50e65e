"""embedding in plain torch."""

from __future__ import annotations

import torch


def embedding(token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows of table [V, H] for token_ids [T], times scale: [T, H]."""
    rows = table[token_ids]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)

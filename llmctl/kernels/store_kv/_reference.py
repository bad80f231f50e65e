"""store_kv in plain torch."""

from __future__ import annotations

import torch


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value row into its slot of the pages; slot −1 is skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    key_pages.view(-1, *key_pages.shape[2:])[slots] = keys[kept].to(key_pages.dtype)
    if values is None:
        return
    value_pages.view(-1, *value_pages.shape[2:])[slots] = values[kept].to(value_pages.dtype)

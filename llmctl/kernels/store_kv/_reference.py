"""store_kv in plain torch."""

from __future__ import annotations

import torch

from llmctl.kernels.store_kv._reference_pages import BlockPages, PlainPages

Side = PlainPages | BlockPages


def store_kv(
    keys: torch.Tensor, values: torch.Tensor | None, key_pages: Side, value_pages: Side, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value row into its slot of the pages; slot −1 is skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    key_pages.store(slots, keys[kept])
    if values is not None:
        value_pages.store(slots, values[kept])

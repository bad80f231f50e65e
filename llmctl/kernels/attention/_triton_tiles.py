"""Tiles of the attention kernels, from the table of the GPU: those whose compiled code spills no registers and fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from llmctl.kernels.triton_lib.tiles import gpu_table

_USUAL_SEQUENCES = 8


@dataclass(frozen=True)
class Tile:
    """block_m: rows (token, query head); block_n: keys."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


@dataclass(frozen=True)
class Numbers:
    """What a tile is chosen by. width: of a key. is_float32: what is multiplied. are_codes: keys or values are (q8_0, fp8)."""

    width: int
    is_float32: bool
    are_codes: bool


def tile_of(table: dict[str, Any], kind: str, numbers: Numbers) -> Tile:
    """kind: "prefill" or "decode"."""
    own = table["attention"]
    if numbers.is_float32:
        return Tile(*own["float32"])
    by_width = own[f"{kind}_codes" if numbers.are_codes else kind]
    widths = sorted(map(int, by_width))
    return Tile(*by_width[str(next((width for width in widths if numbers.width <= width), widths[-1]))])


def prefill_tile(numbers: Numbers, device: torch.device) -> Tile:
    """From the table of a device."""
    return tile_of(gpu_table(device), "prefill", numbers)


def decode_tile(numbers: Numbers, kv_heads: int, sequences: int, device: torch.device) -> tuple[Tile, int]:
    """And in how many parts the keys are split: the same for all steps of up to 8 sequences, so that a token's numbers do not
    depend on how many there are."""
    table = gpu_table(device)
    return tile_of(table, "decode", numbers), splits_of(table, kv_heads, sequences)


def splits_of(table: dict[str, Any], kv_heads: int, sequences: int) -> int:
    """A power of two."""
    own = table["attention"]
    wanted = own["programs"] // (kv_heads * max(1, sequences // _USUAL_SEQUENCES))
    return min(1 << max(wanted.bit_length() - 1, 0), own["max_splits"])

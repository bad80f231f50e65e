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


def tile_of(table: dict[str, Any], kind: str, width: int, is_float32: bool) -> Tile:
    """kind: "prefill" or "decode". width: of a key."""
    own = table["attention"]
    if is_float32:
        return Tile(*own["float32"])
    sizes = sorted(int(size) for size in own[kind])
    return Tile(*own[kind][str(next((size for size in sizes if width <= size), sizes[-1]))])


def prefill_tile(width: int, is_float32: bool, device: torch.device) -> Tile:
    """For keys of so many numbers. is_float32: what is multiplied."""
    return tile_of(gpu_table(device), "prefill", width, is_float32)


def decode_tile(width: int, is_float32: bool, kv_heads: int, sequences: int, device: torch.device) -> tuple[Tile, int]:
    """And in how many parts the keys are split: the same for all steps of up to 8 sequences, so that a token's numbers do not
    depend on how many there are."""
    table = gpu_table(device)
    return tile_of(table, "decode", width, is_float32), splits_of(table, kv_heads, sequences)


def splits_of(table: dict[str, Any], kv_heads: int, sequences: int) -> int:
    """A power of two."""
    own = table["attention"]
    wanted = own["programs"] // (kv_heads * max(1, sequences // _USUAL_SEQUENCES))
    return min(1 << max(wanted.bit_length() - 1, 0), own["max_splits"])

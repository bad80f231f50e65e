"""Tiles of the attention kernels by head size and GPU: those whose compiled code needs no spilled registers and fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from llmctl.kernels.triton_lib.launch import interpreting, power_of_two

_PROGRAMS = 256
"""So many programs of decode keep a GPU busy."""
_USUAL_SEQUENCES = 8
_MOST_SPLITS = 64


@dataclass(frozen=True)
class Tile:
    """block_m: rows (token, query head); block_n: keys."""

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2


def prefill_tile(width: int, is_latent: bool, device: torch.device) -> Tile:
    """For values of so many numbers."""
    return Tile(16, 32) if interpreting() else Tile(64, 64)


def decode_tile(width: int, is_latent: bool, kv_heads: int, sequences: int, device: torch.device) -> tuple[Tile, int]:
    """And how many splits the keys have: the same for all steps of up to 8 sequences, so that a token's numbers do not depend on
    how many there are."""
    if interpreting():
        return Tile(16, 32), 4
    splits = _PROGRAMS // (kv_heads * max(1, sequences // _USUAL_SEQUENCES))
    return Tile(16, 32), min(max(power_of_two(splits + 1) // 2, 1), _MOST_SPLITS)

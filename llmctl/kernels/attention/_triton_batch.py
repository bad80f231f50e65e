"""A batch as the Triton kernels read it: lengths and block tables as tensors, and on the host only what sizes a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from llmctl.kernels.attention import BatchDescription, PageMap

SHORT = 8
"""Tokens up to which a sequence's queries go the way of decode, whose keys are split among programs: the same numbers whether a
token is decoded or verified with others."""


@dataclass(frozen=True)
class DevicePageMap(PageMap):
    """A page map with tensors. context_lens and block_tables are the host's, and of no concern to kernels.

    lens    [S] int32         context_lens
    tables  [S, pages] int32  block_tables, as wide as the longest
    starts  [S + 1] int32     cu_seqlens_q
    most_short, most_long     most tokens that a sequence of up to SHORT, and one of more, has in this step; 0 where there is none
    """

    lens: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    most_short: int
    most_long: int


def to_device(batch: BatchDescription, upload: Callable[[np.ndarray], torch.Tensor]) -> BatchDescription:
    """A batch of numpy arrays, its page maps as DevicePageMap."""
    starts = upload(np.asarray(batch.cu_seqlens_q, np.int32))
    short, long = most_queries(batch.cu_seqlens_q)
    maps = [
        DevicePageMap(
            upload(page_map.slot_mapping),
            page_map.context_lens,
            page_map.block_tables,
            upload(np.asarray(page_map.context_lens, np.int32)),
            upload(stack_tables(page_map.block_tables)),
            starts,
            short,
            long,
        )
        for page_map in batch.page_maps
    ]
    return replace(
        batch,
        token_ids=upload(batch.token_ids),
        positions=upload(batch.positions),
        inv_freqs=[upload(values) for values in batch.inv_freqs],
        hidden=None if batch.hidden is None else upload(batch.hidden),
        page_maps=maps,
    )


def most_queries(cu_seqlens_q: Sequence[int]) -> tuple[int, int]:
    """Most tokens of a sequence of up to SHORT, and of one of more."""
    counts = [end - begin for begin, end in pairwise(cu_seqlens_q)]
    short, long = ([n for n in counts if (n <= SHORT) == is_short] for is_short in (True, False))
    return max(short, default=0), max(long, default=0)


def stack_tables(tables: Sequence[Any], width: int = 0) -> np.ndarray:
    """Block tables side by side, int32 [S, pages], `width` pages wide or as wide as the longest: −1 where one has no page."""
    stacked = np.full((len(tables), max(width, 1, *(len(table) for table in tables))), -1, np.int32)
    for row, table in zip(stacked, tables, strict=True):
        row[: len(table)] = table
    return stacked

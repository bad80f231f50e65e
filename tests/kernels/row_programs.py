"""Native programs over rows alone, without a cache: what one operation makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from llmctl.kernels._native import NativeOps
from llmctl.kernels.attention import BatchDescription


def batch_of(ids: np.ndarray) -> BatchDescription:
    """Tokens of one sequence, at the positions their ids name, that are stored nowhere."""
    return BatchDescription(ids, ids, [], [0, len(ids)], [], 16)


def computed(
    ops: NativeOps, table: np.ndarray, function: Callable[[Any], Any], sizes: tuple[int, ...] | None = None
) -> np.ndarray:
    """function(rows of the table), recorded once. sizes: how many rows a step has; None for all in one."""
    weight = ops.prepare_weight(table)
    run = ops.compile(lambda batch, rows: ops.take_rows(function(ops.embedding(batch.token_ids, weight)), rows), [])
    parts, first = [], 0
    for size in sizes or (len(table),):
        parts.append(run(batch_of(np.arange(first, first + size)), np.arange(size)).copy())
        first += size
    return np.concatenate(parts)

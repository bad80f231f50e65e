"""How much memory calibration takes, and how it is made to fit: fewer tokens at once, one thread collecting, activations on disk.

The rule, in bytes, for float32 numbers: two copies of the layer's matrices; of the largest input of K channels a sum K × K for
every thread that collects and three copies while a factor is made; what a batch has in flight on every thread; the activations
between layers, unless they are spilled; and what the program itself takes. The embedding is read by rows and does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmctl.errors import OutOfMemoryError
from llmctl.runtime.models.config import ModelConfig

PROGRAM = 450 << 20
"""Python, torch and the solver's chunks."""
_BATCHES = (2048, 1024, 512)
_FACTOR_COPIES = 3


@dataclass(frozen=True)
class MemoryPlan:
    """batch_tokens: tokens that run at once on a thread. lanes: threads that collect. spill: activations go to the disk.
    nbytes: the most that will be needed."""

    batch_tokens: int
    lanes: int
    spill: bool
    nbytes: int = 0


@dataclass(frozen=True)
class Demand:
    """layer: elements of the largest layer's matrices. inputs: channels of the inputs that are collected at a time. tokens: of
    the calibration text; longest: of its longest row."""

    config: ModelConfig
    layer: int
    inputs: Sequence[int]
    tokens: int
    longest: int
    products: bool = True


def plan_memory(demand: Demand, threads: int, limit: int | None) -> MemoryPlan:
    """The fastest way that fits `limit` bytes (None: no limit). OutOfMemoryError names what would be needed at least."""
    batches = sorted({max(size, demand.longest) for size in _BATCHES}, reverse=True)
    plans = [
        MemoryPlan(batch, lanes, spill)
        for spill in (False, True)
        for lanes in sorted({threads, 1}, reverse=True)
        for batch in batches
    ]
    for plan in plans:
        needed = _needed(demand, plan)
        if limit is None or needed <= limit:
            return replace(plan, nbytes=needed)
    least = min(_needed(demand, plan) for plan in plans)
    assert limit is not None
    raise OutOfMemoryError(
        f"--max-ram {limit / 1e9:.2f}G: calibration needs {least / 1e9:.2f} GB at least, with activations on disk and "
        f"{batches[-1]} tokens at a time; a smaller --seq-len may help"
    )


def _needed(demand: Demand, plan: MemoryPlan) -> int:
    config = demand.config
    sums = sum(size * size for size in demand.inputs) if demand.products else 0
    largest = max(demand.inputs) ** 2 if demand.products else 0
    collecting = plan.lanes * sums
    solving = sums + (_FACTOR_COPIES - 1) * largest
    in_flight = 6 * config.hidden_size + 3 * config.intermediate_size + 3 * config.num_heads * config.head_dim
    numbers = 2 * demand.layer + max(collecting + plan.lanes * plan.batch_tokens * in_flight, solving + demand.layer)
    if not plan.spill:
        numbers += demand.tokens * config.hidden_size
    return PROGRAM + 4 * numbers

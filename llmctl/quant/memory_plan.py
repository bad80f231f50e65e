"""How much memory calibration takes, and how it is made to fit: fewer tokens at once, one thread collecting, activations on disk.

The rule, in bytes, for float32 numbers. There are always: the program itself, the matrices of a layer, a quarter of that for
their codes, and the activations between layers, unless they are spilled. While text runs, on top of that: for every input that is
looked at a sum K × K (K channels) on every thread that collects, and what a batch has in flight on every thread. While matrices
are solved: one sum for each input, one factor K × K of the largest, what solvers hold of the rows they are at, and the weights of
the group of matrices that read it, twice where there are several. AWQ holds the sums of half a layer and the codes of that half
twice more while it compares trials. A size to aim at takes the sums of up to eight inputs, the text at the entrance of each
layer, and the head twice, for it compares logits. The embedding is read by rows and does not count; a head that is quantized
counts twice by the bytes of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmctl.errors import OutOfMemoryError
from llmctl.runtime.models.config import ModelConfig

PROGRAM = 372 << 20
"""Python, torch, the tokenizer, and what the C library keeps of freed memory."""
_ROWS, _ROWS_OF_THREAD = 12 << 20, 6 << 20
"""Numbers that solvers hold of the rows they are at: see `integer_descent`, `grid_gptq` and `integer_grid`."""
_SHARE = 10  # numbers for one of the group's, where that is less
_BATCHES = (2048, 1024, 512)


@dataclass(frozen=True)
class MemoryPlan:
    """batch_tokens: tokens that run at once on a thread. lanes: threads that collect. spill: activations go to the disk.
    nbytes: the most that will be needed."""

    batch_tokens: int
    lanes: int
    spill: bool
    nbytes: int = 0


@dataclass(frozen=True)
class Group:
    """Matrices that read one input. columns: its channels. elements: of all of them. count: how many there are."""

    columns: int
    elements: int
    count: int = 1


@dataclass(frozen=True)
class Demand:
    """layer: elements of the largest layer's matrices. stages: the groups that are collected together, in turn. tokens: of the
    text. longest: of its rows. products: sums K × K are needed. trials: a stage is solved twice, as AWQ compares. head: elements
    of the head if it is quantized, else 0. aimed: numbers that aiming at a size holds beside a layer, 0 where that is not asked
    for. surveyed: the groups that it then collects together."""

    config: ModelConfig
    layer: int
    stages: Sequence[Sequence[Group]]
    tokens: int
    longest: int
    products: bool = True
    trials: bool = False
    head: int = 0
    aimed: int = 0
    surveyed: Sequence[Sequence[Group]] = ()


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
        needed = _needed(demand, plan, threads)
        if limit is None or needed <= limit:
            return replace(plan, nbytes=needed)
    least = min(_needed(demand, plan, threads) for plan in plans)
    assert limit is not None
    raise OutOfMemoryError(
        f"--max-ram {limit / 1e9:.2f}G: calibration needs {least / 1e9:.2f} GB at least, with activations on disk and "
        f"{batches[-1]} tokens at a time; a smaller --seq-len may help"
    )


def _needed(demand: Demand, plan: MemoryPlan, threads: int) -> int:
    config, layer = demand.config, demand.layer
    lanes = min(plan.lanes, -(-demand.tokens // plan.batch_tokens))
    running = min(lanes * plan.batch_tokens, demand.tokens) * _in_flight(config)
    solver = _ROWS + threads * _ROWS_OF_THREAD
    most = max(layer + layer // 4 + stage for stage in _stages(demand, lanes, running, solver))
    if demand.aimed:
        sums = max(map(_sums, demand.surveyed))
        most = max(most, layer + lanes * sums + running + demand.aimed)
    if demand.head:
        most = max(most, 2 * config.hidden_size**2 + demand.head // 2 + solver)
    if not plan.spill:
        most += demand.tokens * config.hidden_size
    return PROGRAM + 4 * most


def _stages(demand: Demand, lanes: int, running: int, solver: int) -> Iterator[int]:
    """Numbers beside the layer that a stage takes at most: while it is collected, and while each of its groups is solved."""
    for stage in demand.stages:
        sums = _sums(stage) if demand.products else 0
        codes = sum(group.elements for group in stage) // 2 if demand.trials else 0
        yield lanes * sums + running
        yield sums + codes + running
        for group in stage:
            factor = group.columns**2 if demand.products and not demand.trials else 0
            yield sums + codes + factor + group.elements * min(group.count, 2) + min(solver, _SHARE * group.elements)


def _sums(groups: Sequence[Group]) -> int:
    return sum(group.columns**2 for group in groups)


def _in_flight(config: ModelConfig) -> int:
    """Numbers a token has in a layer: in its attention, or in its MLP."""
    return 4 * config.hidden_size + max(3 * config.num_heads * config.head_dim, 3 * config.intermediate_size)

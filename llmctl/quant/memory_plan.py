"""How much memory calibration takes, and how it is made to fit: fewer tokens at once, one thread collecting, activations on disk.

The rule, in bytes, for float32 numbers. Through a layer there are: its matrices, a quarter of that for their codes, and half of
it as pages of the file; what the program itself takes; and the activations between layers, unless they are spilled. While text
runs, on top of that: for every input that is looked at a sum K × K (K channels) on every thread that collects, and what a batch
has in flight on every thread. While matrices are solved: one sum for each input, one factor K × K of the largest, and the weights
of the group of matrices that read it, twice. AWQ holds the sums of half a layer twice and the half itself three times, for its
trials. A size to aim at takes the sums of up to eight inputs, the text at the entrance of each layer, and the head twice, for it
compares logits. The embedding is read by rows and does not count; a head that is quantized counts by the bytes of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llmctl.errors import OutOfMemoryError
from llmctl.runtime.models.config import ModelConfig

PROGRAM = 550 << 20
"""Python, torch, and what solvers hold of the rows they are at: that does not grow with the model."""
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
    """Matrices that read one input. columns: its channels. elements: of all of them."""

    columns: int
    elements: int


@dataclass(frozen=True)
class Demand:
    """layer: elements of the largest layer's matrices. stages: the groups that are collected together, in turn. tokens: of the
    text. longest: of its rows. products: sums K × K are needed. trials: copies of a stage's matrices beside the first, as AWQ
    compares them, with sums for scaled inputs. head: elements of the head if it is quantized, else 0. aimed: numbers that aiming
    at a size holds beside a layer, 0 where that is not asked for. surveyed: the groups that it then collects together."""

    config: ModelConfig
    layer: int
    stages: Sequence[Sequence[Group]]
    tokens: int
    longest: int
    products: bool = True
    trials: int = 0
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
    config, layer = demand.config, demand.layer
    running = plan.lanes * plan.batch_tokens * _in_flight(config)
    most = max(layer + layer // 4 + stage for stage in _stages(demand, plan, running))
    if demand.aimed:
        sums = max(map(_sums, demand.surveyed))
        most = max(most, layer + plan.lanes * sums + running + demand.aimed)
    if demand.head:
        most = max(most, 2 * config.hidden_size**2 + demand.head // 4 + running)
    most += layer // 2  # pages of the file, mapped, in two bytes a number
    if not plan.spill:
        most += demand.tokens * config.hidden_size
    return PROGRAM + 4 * most


def _stages(demand: Demand, plan: MemoryPlan, running: int) -> Iterator[int]:
    """Numbers beside the layer that a stage takes at most: while it is collected, and while each of its groups is solved."""
    for stage in demand.stages:
        sums = _sums(stage) if demand.products else 0
        trials = demand.trials * sum(group.elements for group in stage) + (sums if demand.trials else 0)
        yield plan.lanes * sums + running + trials
        for group in stage:
            factor = group.columns**2 if demand.products else 0
            yield sums + factor + 2 * group.elements + trials


def _sums(groups: Sequence[Group]) -> int:
    return sum(group.columns**2 for group in groups)


def _in_flight(config: ModelConfig) -> int:
    """Numbers a token has in a layer."""
    return 6 * config.hidden_size + 4 * config.intermediate_size + 3 * config.num_heads * config.head_dim

"""What calibrating a model will hold in memory, as numbers for `memory_plan`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod

from llmctl.errors import OutOfMemoryError
from llmctl.quant.calibration import Calibration
from llmctl.quant.head import head_module
from llmctl.quant.memory_plan import Demand, Group, MemoryPlan, plan_memory
from llmctl.quant.module_solver import Method
from llmctl.quant.pipeline import GROUPS_AT_ONCE
from llmctl.runtime.machine import memory
from llmctl.runtime.models.topology import InputGroup, layer_topology
from llmctl.runtime.models.weights import ModelWeights


def demand_of(weights: ModelWeights, method: Method, calibration: Calibration, *, head: bool, aimed: int) -> Demand:
    """Of the layer that takes most. head: the matrix that makes the logits is quantized. aimed: see `Demand`."""
    config = weights.config
    demands = [
        Demand(
            config,
            sum(group.elements for stage in stages for group in stage),
            stages,
            calibration.num_tokens,
            max(map(len, calibration.rows)),
            products=method.needs_products or aimed > 0,
            trials=method.name == "awq",
            head=prod(weights.stored(f"{head_module(config)}.weight").shape) if head else 0,
            aimed=aimed,
            surveyed=list(_surveyed(weights, index)) if aimed else (),
        )
        for index, stages in ((index, list(_stages(weights, method, index))) for index in range(config.num_layers))
    ]
    return max(demands, key=lambda demand: demand.layer)


def _stages(weights: ModelWeights, method: Method, layer: int) -> Iterator[list[Group]]:
    """The groups whose inputs the pipeline collects together."""

    def key(group: InputGroup) -> object:
        return group.in_mlp if method.name == "awq" else group.stage

    for _, stage in itertools.groupby(layer_topology(weights.config, layer), key):
        groups = [_group(weights, layer, one) for one in stage]
        yield from _parts(groups, len(groups) if method.name == "awq" else GROUPS_AT_ONCE)


def _surveyed(weights: ModelWeights, layer: int) -> Iterator[list[Group]]:
    """The same where a size is aimed at: of all of the layer, in its order."""
    return _parts([_group(weights, layer, one) for one in layer_topology(weights.config, layer)], GROUPS_AT_ONCE)


def _parts(groups: list[Group], at_once: int) -> Iterator[list[Group]]:
    return (groups[start : start + at_once] for start in range(0, len(groups), at_once))


def _group(weights: ModelWeights, layer: int, group: InputGroup) -> Group:
    shapes = [weights.stored(f"model.layers.{layer}.{module}.weight").shape for module in group.modules]
    return Group(shapes[0][-1], sum(map(prod, shapes)), len(shapes))


def fitting_memory(demand: Demand, threads: int, limit: int | None) -> MemoryPlan:
    """A plan within `limit` bytes and within what is free; OutOfMemoryError where there is none."""
    found, available = plan_memory(demand, threads, limit), memory().available
    if available is None or found.nbytes <= available:
        return found
    try:
        return plan_memory(demand, threads, available)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{available / 1e9:.2f} GB of memory are free: {str(error).partition(': ')[2]}") from error

"""Calibrated quantization, layer by layer: collect what a layer reads, solve its matrices, put them in place, move on.

Within a layer the order is that of the forward pass: q, k and v are solved, then what o reads is collected with them in place,
and so on, so that every matrix is fitted to the inputs it will see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from llmctl.errors import LlmctlError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant import awq
from llmctl.quant.capture import CaptureOps
from llmctl.quant.integer_grid import GridValues
from llmctl.quant.module_solver import Method, Solved, Target, codes_of, round_module, solve_group
from llmctl.quant.results import Results
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk, one_thread_each
from llmctl.quant.work_folder import WorkFolder
from llmctl.runtime.checkpoint.packed_bits import pack_codes
from llmctl.runtime.models.topology import InputGroup, layer_topology
from llmctl.runtime.models.weights import ModelWeights

_CHECKED_BATCHES = 2  # outputs of a layer that are compared with and without smoothing

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """targets: by whole module name, of everything that is to be quantized. norm_format: type that norms are stored in. fast:
    multiply in bfloat16 on the way. threads: of the solvers and of the forward pass."""

    weights: ModelWeights
    method: Method
    targets: Mapping[str, Target]
    norm_format: Format = FORMATS["F32"]
    threads: int = 1
    fast: bool = False

    def results(self, work: WorkFolder) -> Results:
        """What `run` left in the work folder."""
        return Results(work, self.targets, {name: self.weights.stored(f"{name}.weight").shape for name in self.targets})


@dataclass
class LayerResult:
    """solved: by module below the layer. floats: other tensors that changed, by whole name. facts: for the report.
    statistics: by leader, of the inputs."""

    solved: dict[str, Solved] = field(default_factory=dict)
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Statistics] = field(default_factory=dict)


def run(job: Job, walk: Walk | None, work: WorkFolder, progress: Progress | None = None) -> None:
    """Solve every layer that `work` has not yet. walk: None for methods that need no text. progress: called with (done, all)
    layers. LlmctlError names the module that went wrong."""
    count = job.weights.config.num_layers
    with one_thread_each(job.fast):
        if walk is not None:
            walk.embed()
        for index in range(count):
            layer = LayerWeights(job.weights, walk.ops if walk is not None else CaptureOps(), index)
            if work.has(index):
                _restore(job, layer, work, index)
            else:
                started = time.perf_counter()
                result = solve_layer(job, walk, layer)
                result.facts["seconds"] = round(time.perf_counter() - started, 2)
                _keep(work, index, layer, result)
            if walk is not None and index + 1 < count:
                walk.advance(layer)
            if progress is not None:
                progress(index + 1, count)


def solve_layer(job: Job, walk: Walk | None, layer: LayerWeights) -> LayerResult:
    """Solve the layer's matrices; afterwards `layer` computes with them."""
    groups = [_quantized(job, layer, group) for group in layer_topology(layer.config)]
    groups = [group for group in groups if group.modules]
    result = LayerResult()
    if walk is None:
        for group in groups:
            _solve(job, layer, group, None, result)
    elif job.method.name == "gptq":
        for group in groups:
            if group.leader.startswith("mlp."):
                walk.advance_half(layer)
            found = walk.collect(layer, [group.leader])
            _solve(job, layer, group, found[group.leader], result)
            result.statistics |= dict.fromkeys(group.modules, found[group.leader])
    else:
        found = walk.collect(layer, [group.leader for group in groups], products=job.method.needs_products)
        if job.method.name == "awq":
            _solve_smoothed(job, walk, layer, groups, found, result)
        else:
            for group in groups:
                _solve(job, layer, group, found[group.leader], result)
        result.statistics |= {module: found[group.leader] for group in groups for module in group.modules}
    return result


def _quantized(job: Job, layer: LayerWeights, group: InputGroup) -> InputGroup:
    """The group without the modules that are left as they are."""
    modules = tuple(module for module in group.modules if layer.full(module) in job.targets)
    return InputGroup(modules, group.source if modules == group.modules else None)


def _solve(job: Job, layer: LayerWeights, group: InputGroup, statistics: Statistics | None, result: LayerResult) -> None:
    weights = {module: layer.matrix(module) for module in group.modules}
    targets = {module: job.targets[layer.full(module)] for module in group.modules}
    try:
        solved = solve_group(weights, targets, statistics, job.method, job.threads)
    except LlmctlError as error:
        names = ", ".join(layer.full(module) for module in group.modules)
        raise type(error)(f"{layer.checkpoint.path}: {names}: {error}") from error
    for module, one in solved.items():
        layer.replaced[layer.full(module) + ".weight"] = one.values.numpy()
    result.solved |= solved


def _solve_smoothed(
    job: Job, walk: Walk, layer: LayerWeights, groups: list[InputGroup], found: dict[str, Statistics], result: LayerResult
) -> None:
    """AWQ: with smoothing, and without where that is what brings the layer's output closer."""
    checked = range(min(_CHECKED_BATCHES, len(walk.batches)))
    wanted = walk.outputs(layer, checked)
    trials = []
    for smooth in (True, False):
        trial, attempt = LayerWeights(layer.source, layer.ops, layer.index), LayerResult()
        statistics = {leader: one.copy() for leader, one in found.items()}
        if smooth:
            _smooth(job, trial, groups, statistics, attempt)
        attempt.floats = dict(trial.replaced)
        for group in groups:
            _solve(job, trial, group, statistics[group.leader], attempt)
        made = walk.outputs(trial, checked)
        error = sum(float((a - b).square().sum()) for a, b in zip(made, wanted, strict=True))
        trials.append((error, trial, attempt))
    (with_error, *_), (without_error, *_) = trials
    _, trial, attempt = trials[0] if with_error < without_error else trials[1]
    attempt.facts |= {"output_error_smoothed": with_error, "output_error_plain": without_error}
    if with_error >= without_error:
        attempt.facts["fallback"] = "smoothing did not bring the layer's output closer: reverted"
    for name in trial.replaced:
        layer.replaced[name] = trial.replaced[name]
    solved_names = {layer.full(module) + ".weight" for module in attempt.solved}
    attempt.floats = {name: values for name, values in attempt.floats.items() if name not in solved_names}
    result.solved, result.floats, result.facts = attempt.solved, attempt.floats, attempt.facts


def _smooth(
    job: Job, layer: LayerWeights, groups: list[InputGroup], found: dict[str, Statistics], result: LayerResult
) -> None:
    """Fold the best scales of every group that has somewhere to put them; `found` becomes that of the scaled inputs."""
    powers, quick = {}, replace(job.method, search="range")
    for group in groups:
        if group.source is None:
            continue
        weights = {module: layer.matrix(module) for module in group.modules}
        statistics = found[group.leader]

        def rounder(module: str, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
            return round_module(weight, job.targets[layer.full(module)], importance, quick, job.threads).values

        hessian = statistics.copy().take_hessian()
        chosen = awq.choose_scales(weights, statistics, hessian, group.source.channels(len(hessian)), rounder)
        powers[group.leader] = {"power": chosen.power, "loss_plain": chosen.before, "loss_smoothed": chosen.after}
        if chosen.power > 0:
            factors = awq.fold(layer, group, chosen.scales, job.norm_format)
            found[group.leader] = statistics.scaled(1 / factors)
    result.facts["smoothing"] = powers


def _keep(work: WorkFolder, index: int, layer: LayerWeights, result: LayerResult) -> None:
    arrays = {f"float/{name}": values for name, values in result.floats.items()}
    for module, one in result.solved.items():
        arrays |= {f"{layer.full(module)}/{key}": array for key, array in _arrays(one.stored).items()}
    for module, statistics in result.statistics.items():
        name = layer.full(module)
        arrays |= {f"{name}/squares": statistics.squares.numpy(), f"{name}/count": np.array([statistics.count])}
    modules = {layer.full(module): one.facts for module, one in result.solved.items()}
    work.save(index, arrays, {"modules": modules, **result.facts})


def _arrays(stored: GridValues | QuantTensor) -> dict[str, np.ndarray]:
    if isinstance(stored, QuantTensor):
        return {"blocks": stored.blocks}
    codes, scales, zeros = codes_of(stored)
    found = {"words": pack_codes(codes, stored.grid.bits), "scales": scales}
    return found if zeros is None else {**found, "zeros": zeros}


def _restore(job: Job, layer: LayerWeights, work: WorkFolder, index: int) -> None:
    """The finished layer as it was when it was finished."""
    results = job.results(work)
    layer.replaced |= results.floats(index)
    layer.replaced |= {f"{module}.weight": results.values(module) for module in results.modules(index)}

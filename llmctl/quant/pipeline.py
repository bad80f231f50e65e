"""Calibrated quantization, layer by layer: collect what a layer reads, solve its matrices, put them in place, move on.

Within a layer the order is that of the forward pass: q, k and v are solved, then what o reads is collected with them in place,
and so on, so that every matrix is fitted to the inputs it will see.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from llmctl.errors import LlmctlError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.quant.capture import CaptureOps
from llmctl.quant.head import head_errors, head_module, head_statistics, round_head, solve_head
from llmctl.quant.integer_grid import GridValues
from llmctl.quant.module_solver import Method, Solved, Target, codes_of, round_module, solve_group
from llmctl.quant.results import HEAD_LAYER, Results
from llmctl.quant.smoothing import Half
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk, one_thread_each
from llmctl.quant.work_folder import WorkFolder
from llmctl.runtime.checkpoint.packed_bits import pack_codes
from llmctl.runtime.machine import return_free_memory
from llmctl.runtime.models.topology import InputGroup, layer_topology, scale_groups
from llmctl.runtime.models.weights import ModelWeights

GROUPS_AT_ONCE = 8
"""Inputs whose Σ x xᵀ is collected in one pass over the text."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """targets: by whole module name, of everything that is to be quantized. norm_format: type that norms are stored in. fast:
    multiply in bfloat16 on the way. threads: of the solvers and of the forward pass. importance: by whole module name, float32
    [K] from a file, in the place of E[x²] where errors are weighed."""

    weights: ModelWeights
    method: Method
    targets: Mapping[str, Target]
    norm_format: Format = FORMATS["F32"]
    threads: int = 1
    fast: bool = False
    importance: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def head_format(self) -> Format | None:
        """What the matrix that makes the logits is solved for, None where it is left to others."""
        found = self.targets.get(head_module(self.weights.config))
        return found if isinstance(found, Format) else None

    def results(self, work: WorkFolder) -> Results:
        """What `run` left in the work folder."""
        return Results(work, self.targets, {name: self.weights.stored(f"{name}.weight").shape for name in self.targets})


@dataclass
class LayerResult:
    """solved: by module below the layer. floats: other tensors that changed, by whole name. facts: for the report.
    squares: by module, Σ x² of its input [K] and the tokens it is of."""

    solved: dict[str, Solved] = field(default_factory=dict)
    floats: dict[str, np.ndarray] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    squares: dict[str, tuple[np.ndarray, int]] = field(default_factory=dict)

    def note(self, groups: list[InputGroup], found: dict[str, Statistics]) -> None:
        """Keep Σ x² and tokens of the groups' inputs."""
        for group in groups:
            if (seen := found.get(group.leader)) is not None:
                self.squares |= dict.fromkeys(group.modules, (seen.squares.numpy().copy(), seen.count))


def run(job: Job, walk: Walk | None, work: WorkFolder, progress: Progress | None = None) -> None:
    """Solve every layer that `work` has not yet. walk: None for methods that need no text. progress: called with (done, all)
    layers. LlmctlError names the module that went wrong."""
    count = job.weights.config.num_layers
    with one_thread_each(job.fast):
        if walk is not None:
            walk.embed()
        for index in range(count):
            _run_layer(job, walk, work, index)
            return_free_memory()
            if progress is not None:
                progress(index + 1, count)
        if job.head_format is not None and not work.has(HEAD_LAYER):
            _solve_head(job, walk, work, job.head_format)


def _run_layer(job: Job, walk: Walk | None, work: WorkFolder, index: int) -> None:
    """Solve the layer or read what was solved, and let the text through it."""
    layer = LayerWeights(job.weights, walk.ops if walk is not None else CaptureOps(), index)
    if work.has(index):
        _restore(job, layer, work, index)
    else:
        started = time.perf_counter()
        result = solve_layer(job, walk, layer)
        result.facts["seconds"] = round(time.perf_counter() - started, 2)
        _keep(work, index, layer, result)
        del result
    if walk is not None and (index + 1 < job.weights.config.num_layers or job.head_format is not None):
        walk.advance(layer)


def _solve_head(job: Job, walk: Walk | None, work: WorkFolder, form: Format) -> None:
    """The matrix that makes the logits. walk: past the last layer."""
    assert walk is not None, "heads are solved for methods that see text"
    started, name = time.perf_counter(), head_module(job.weights.config)
    statistics = head_statistics(walk)
    statistics.given, products = _given(job, [name]), statistics.products
    assert products is not None
    arrays = {f"{name}/squares": statistics.squares.numpy(), f"{name}/count": np.array([statistics.count])}
    if job.method.name == "gptq":
        solved = solve_head(job.weights, statistics, form, job.method.damping, job.threads)
    else:
        solved = round_head(job.weights, statistics, form, job.threads)
    facts = {
        "shape": list(solved.shape),
        "type": form.name,
        "bits_per_weight": form.bits_per_weight,
        "tokens": statistics.count,
        **head_errors(job.weights, solved, products),
        "method": job.method.name,
    }
    work.save(
        HEAD_LAYER,
        {**arrays, f"{name}/blocks": solved.blocks},
        {"modules": {name: facts}, "seconds": round(time.perf_counter() - started, 2)},
    )


def solve_layer(job: Job, walk: Walk | None, layer: LayerWeights) -> LayerResult:
    """Solve the layer's matrices; afterwards `layer` computes with them."""
    groups = [_quantized(job, layer, group) for group in layer_topology(layer.config, layer.index)]
    groups = [group for group in groups if group.modules]
    result = LayerResult()
    if walk is None:
        for group in groups:
            _solve(job, layer, group, {}, result)
    elif job.method.name == "awq":
        _solve_smoothed(job, walk, layer, groups, result)
    elif job.method.name == "gptq":
        for _, stage in itertools.groupby(groups, lambda group: group.stage):
            _solve_stage(job, walk, layer, list(stage), result)
    else:
        _solve_stage(job, walk, layer, groups, result)
    return result


def _solve_stage(job: Job, walk: Walk, layer: LayerWeights, groups: list[InputGroup], result: LayerResult) -> None:
    """Groups that do not depend on each other, some of them at a time: sums of products take memory."""
    if all(group.leader.startswith("mlp.") for group in groups):
        walk.advance_half(layer)
    at_once = GROUPS_AT_ONCE if job.method.needs_products else len(groups)
    for start in range(0, len(groups), at_once):
        part = groups[start : start + at_once]
        found = walk.collect(layer, _seen_at(part), products=job.method.needs_products)
        result.note(part, found)
        _give(job, layer, part, found)
        for group in part:
            _solve(job, layer, group, found, result)
        return_free_memory()


def _give(job: Job, layer: LayerWeights, groups: list[InputGroup], found: dict[str, Statistics]) -> None:
    """Importances of the file to the statistics of the groups' inputs."""
    for group in groups:
        if group.leader in found:
            found[group.leader].given = _given(job, map(layer.full, group.modules))


def _given(job: Job, modules: Iterable[str]) -> torch.Tensor | None:
    """The file's importance of the input that these modules read."""
    known = (job.importance[module] for module in modules if module in job.importance)
    values = next(known, None)
    return None if values is None else torch.from_numpy(values)


def _seen_at(groups: list[InputGroup]) -> list[str]:
    """Where what the groups read, or what stands in for it, is seen."""
    names = [group.leader for group in groups] + [group.stand_in for group in groups if group.stand_in]
    return list(dict.fromkeys(names))


def _quantized(job: Job, layer: LayerWeights, group: InputGroup) -> InputGroup:
    """The group without the modules that are left as they are."""
    return replace(group, modules=tuple(module for module in group.modules if layer.full(module) in job.targets))


def _solve(
    job: Job, layer: LayerWeights, group: InputGroup, found: dict[str, Statistics], result: LayerResult
) -> None:
    weights = {module: layer.matrix(module) for module in group.modules}
    targets = {module: job.targets[layer.full(module)] for module in group.modules}
    own, stand_in = found.get(group.leader), found.get(group.stand_in or "")
    statistics = own.copy() if own is not None and group.stand_in else own  # which another group may need again
    if own is None and stand_in is not None:
        statistics = stand_in.copy()
    try:
        solved = solve_group(weights, targets, statistics, job.method, job.threads)
    except LlmctlError as error:
        names = ", ".join(layer.full(module) for module in group.modules)
        raise type(error)(f"{layer.checkpoint.path}: {names}: {error}") from error
    for module, one in solved.items():
        layer.replaced[layer.full(module) + ".weight"] = one.values.numpy()
        if own is None and job.method.needs_text:
            one.facts["tokens"] = 0
            what = "fitted to what all tokens bring" if stand_in is not None else "fitted to its weights alone"
            one.facts["fallback"] = f"no token reached it: {what}"
    result.solved |= solved


def _solve_smoothed(
    job: Job, walk: Walk, layer: LayerWeights, groups: list[InputGroup], result: LayerResult
) -> None:
    """AWQ, one half of the layer after the other, so that the second is fitted to what the first makes once it is rounded."""
    scaled = [group for group in scale_groups(layer.config, layer.index) if _all_quantized(job, layer, group)]
    for in_mlp in (False,) if layer.config.parallel else (False, True):
        if in_mlp:
            walk.advance_half(layer)
        half, own = ([one for one in some if layer.config.parallel or one.in_mlp == in_mlp] for some in (groups, scaled))
        if half:
            _solve_half(job, walk, layer, half, own, result)


def _all_quantized(job: Job, layer: LayerWeights, group: InputGroup) -> bool:
    """Whether a scale would help every module it goes into."""
    return all(layer.full(module) in job.targets for module in group.modules)


def _solve_half(
    job: Job, walk: Walk, layer: LayerWeights, groups: list[InputGroup], scaled: list[InputGroup], result: LayerResult
) -> None:
    """With smoothing, and without where that is what brings the half's output closer."""
    found = walk.collect(layer, _seen_at([*groups, *scaled]), products=True)
    result.note(groups, found)
    _give(job, layer, [*groups, *scaled], found)
    half = Half(walk, layer)
    without_error, without = _attempt(job, half, groups, found, [])
    with_error, smoothed = _attempt(job, half, groups, found, scaled)  # the last, for it scales the sums in place
    attempt = smoothed if with_error < without_error else without
    attempt.facts |= {"output_error_smoothed": with_error, "output_error_plain": without_error}
    if scaled and with_error >= without_error:
        attempt.facts["fallback"] = "smoothing did not bring the output closer: reverted"
    layer.replaced |= attempt.floats
    layer.replaced |= {f"{layer.full(module)}.weight": one.values.numpy() for module, one in attempt.solved.items()}
    result.solved |= attempt.solved
    result.floats |= attempt.floats
    result.facts["mlp" if groups[0].in_mlp else "attention"] = attempt.facts


def _attempt(
    job: Job, half: Half, groups: list[InputGroup], found: dict[str, Statistics], scaled: list[InputGroup]
) -> tuple[float, LayerResult]:
    """The half's matrices solved, those of `scaled` groups smoothed before: how far its output then is off, and what it is, as
    a file holds it: two trials with all their values would be the largest part of the layer."""
    trial, attempt, quick = half.layer.fork(), LayerResult(), replace(job.method, search="range")

    def rounder(module: str, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        return round_module(weight, job.targets[trial.full(module)], importance, quick, job.threads).values

    statistics = {name: one.copy() for name, one in found.items()}
    attempt.facts["smoothing"] = half.smooth(trial, scaled, groups, statistics, rounder, job.norm_format)
    solved = {trial.full(module) + ".weight" for group in groups for module in group.modules}
    attempt.floats = {name: values for name, values in half.changed(trial).items() if name not in solved}
    for group in groups:
        _solve(job, trial, group, statistics, attempt)
    return half.error(trial), attempt


def _keep(work: WorkFolder, index: int, layer: LayerWeights, result: LayerResult) -> None:
    arrays = {f"float/{name}": values for name, values in result.floats.items()}
    for module, one in result.solved.items():
        arrays |= {f"{layer.full(module)}/{key}": array for key, array in _arrays(one.stored).items()}
    for module, (squares, count) in result.squares.items():
        arrays |= {f"{layer.full(module)}/squares": squares, f"{layer.full(module)}/count": np.array([count])}
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

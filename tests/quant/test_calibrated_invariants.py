"""What must hold of every calibrated quantization: the file is what was searched, and no step makes it worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model

from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import module_solver
from llmctl.quant.calibrated import CalibratedPlan, Request, TextRequest, make_calibrated_plan, solve, write_result
from llmctl.quant.integer_grid import IntegerGrid
from llmctl.quant.module_solver import Method, Solved, round_module, solve_group
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.results import Results
from llmctl.quant.smoothing import Half
from llmctl.quant.statistics import Statistics
from llmctl.quant.walk import LayerWeights, Walk
from llmctl.quant.work_folder import WorkFolder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.models.topology import layer_topology
from llmctl.runtime.models.weights import ModelWeights

GRID = IntegerGrid(3, 32, True)
ROWS = [np.random.default_rng(seed).integers(3, 250, 40).tolist() for seed in range(4)]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("invariants") / "tiny-llama"
    return make_tiny_model(folder, "llama", tokenizer="bpe", num_hidden_layers=1)


def quantized(model: Path, output: Path, method: str, form: str, symmetric: bool) -> tuple[CalibratedPlan, Results]:
    recipe = recipe_by_name("Q4_1") if form == "gguf" else None
    text = TextRequest(num_samples=4, row_length=40)
    request = Request(model, Method(method), form, symmetric=symmetric, recipe=recipe, text=text)
    plan = make_calibrated_plan(request)
    return plan, solve(plan, WorkFolder(output, plan.fingerprint, resume=False))


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("form", "symmetric"), [("gptq", True), ("gptq", False), ("awq", False), ("compressed-tensors", True), ("gguf", True)]
)
def test_the_file_decodes_to_the_weights_that_were_searched(
    tiny: Path, tmp_path: Path, method: str, form: str, symmetric: bool
) -> None:
    """Bit for bit, the norms that took a scale included."""
    output = tmp_path / ("out.gguf" if form == "gguf" else "out")
    plan, results = quantized(tiny, output, method, form, symmetric)
    write_result(plan, results, output, force=False)
    made = ModelWeights(open_checkpoint(output))
    modules = results.modules(0)
    assert len(modules) == 7
    for module in modules:
        np.testing.assert_array_equal(dequantize(made.read(module + ".weight")), results.values(module))
    for name, values in results.floats(0).items():
        np.testing.assert_array_equal(np.asarray(dequantize(made.read(name)), np.float32), values)
    assert bool(results.floats(0)) == (method == "awq")


def of_inputs(columns: int, tokens: int = 300) -> Statistics:
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(3)) * torch.logspace(-1, 1, columns)
    statistics = Statistics(columns)
    statistics.add(x)
    statistics.finish()
    return statistics


@pytest.mark.parametrize("target", [GRID, FORMATS["Q4_0"]], ids=["integers", "Q4_0"])
def test_what_gptq_makes_worse_stays_rounded(target: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that ruins one of two matrices: that one is kept as rounding has it, and the report says why."""
    weights = {name: torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(("good", "bad"))}
    targets, method = dict.fromkeys(weights, target), Method("gptq")
    honest = module_solver._compensated

    def ruined(*arguments: object) -> dict[str, Solved]:
        found = honest(*arguments)  # type: ignore[arg-type]
        opposite = round_module(-weights["bad"], target, importance, method, 1)  # type: ignore[arg-type]
        return {**found, "bad": replace(found["bad"], stored=opposite.stored)}

    importance = of_inputs(64).mean_squares
    monkeypatch.setattr(module_solver, "_compensated", ruined)
    solved = solve_group(weights, targets, of_inputs(64), method, 1)
    assert solved["good"].facts["method"] == "gptq"
    assert solved["good"].facts["loss"] <= solved["good"].facts["loss_rtn"]
    assert solved["bad"].facts["method"] == "rtn"
    assert "is above that of rounding" in solved["bad"].facts["fallback"]
    nearest = round_module(weights["bad"], target, importance, method, 1)  # type: ignore[arg-type]
    assert torch.equal(solved["bad"].values, nearest.values)


@pytest.fixture
def first_layer(tiny: Path) -> Callable[[], tuple[Walk, LayerWeights]]:
    """A walk at the first layer of the tiny model, some channels of whose norm are forty times as large as others."""

    def make() -> tuple[Walk, LayerWeights]:
        walk = Walk(ModelWeights(open_checkpoint(tiny)), ROWS, batch_tokens=80, lanes=1)
        walk.embed()
        layer = walk.layer(0)
        name = layer.full("input_layernorm.weight")
        layer.replaced[name] = np.array(layer.read(name), np.float32)
        layer.replaced[name][::16] *= 40
        return walk, layer

    return make


def chosen_power(walk: Walk, layer: LayerWeights) -> float:
    """Of the group that reads the attention's norm."""
    group = layer_topology(layer.config, 0)[0]
    found = walk.collect(layer, [group.leader])

    def rounder(module: str, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        return round_module(weight, GRID, importance, Method("rtn", "range"), 1).values

    facts = Half(walk, layer).smooth(layer.fork(), [group], [group], found, rounder, FORMATS["F32"])[group.leader]
    assert facts["loss_smoothed"] <= facts["loss_plain"]
    return facts["power"]


def test_scales_are_chosen_by_what_the_half_makes(first_layer: Callable[[], tuple[Walk, LayerWeights]]) -> None:
    """Large channels are worth a scale, but not where nothing of the attention reaches its output."""
    walk, layer = first_layer()
    assert chosen_power(walk, layer) > 0
    walk, layer = first_layer()
    layer.replaced[layer.full("self_attn.o_proj.weight")] = np.zeros_like(layer.matrix("self_attn.o_proj").numpy())
    assert chosen_power(walk, layer) == 0


def test_a_half_knows_what_a_trial_changes(first_layer: Callable[[], tuple[Walk, LayerWeights]]) -> None:
    walk, layer = first_layer()
    half, trial = Half(walk, layer), layer.fork()
    assert half.changed(trial) == {}
    assert half.error(trial) == 0
    name = trial.full("self_attn.v_proj.weight")
    trial.replaced[name] = np.asarray(trial.matrix("self_attn.v_proj")) * 2
    assert list(half.changed(trial)) == [name]
    assert half.error(trial) > half.error(trial, batches=1) > 0
    assert name not in layer.replaced

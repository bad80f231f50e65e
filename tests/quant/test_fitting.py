"""Types by measurement: the divergence of replaced weights, losses and slopes, plans within a size, and the head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model

from llmctl.errors import UsageError
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant import fitting
from llmctl.quant.convert import Plan, make_plan, planned_file_bytes, write
from llmctl.quant.divergence import EMBEDDING, HEAD, Divergence
from llmctl.quant.fitting import Budget, fit
from llmctl.quant.grid_gptq import DAMPING, loss
from llmctl.quant.head import head_statistics, round_head, solve_head
from llmctl.quant.recipe import RECIPES
from llmctl.quant.source import open_source
from llmctl.quant.survey import Surveyed, measure, survey, survey_embedding, types_for
from llmctl.quant.walk import Walk
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.weights import ModelWeights

ROWS = [np.random.default_rng(seed).integers(3, 250, 48).tolist() for seed in range(6)]
SIZES = {"batch_tokens": 100, "lanes": 1}
TIED = {"tie_word_embeddings": True}


def opened(folder: Path) -> ModelWeights:
    return ModelWeights(open_checkpoint(folder))


def noisy(folder: Path, name: str, scale: float = 0.05) -> np.ndarray:
    weight = np.array(dequantize(opened(folder).read(name)), np.float32)
    noise = np.random.default_rng(5).standard_normal(weight.shape).astype(np.float32)
    return weight + np.float32(scale) * weight.std() * noise


def divergence_by_logits(left: Path, right: Path) -> float:
    """From the logits of whole models."""
    total = 0.0
    for row in ROWS[:2]:
        pair = [torch.from_numpy(np.array(compute_logits(load_model(path, backend="reference"), row))) for path in (left, right)]
        one, other = (torch.log_softmax(logits.double(), -1) for logits in pair)
        total += float((one.exp() * (one - other)).sum(-1).mean())
    return total / 2


@pytest.mark.parametrize(
    ("family", "choices", "name"),
    [
        ("llama", {}, "model.layers.1.mlp.down_proj.weight"),
        ("llama", {}, HEAD),
        ("llama", {}, EMBEDDING),
        ("llama", TIED, EMBEDDING),
        ("gemma3", {"final_logit_softcapping": 1.5}, "model.layers.0.self_attn.v_proj.weight"),
    ],
)
def test_divergence_is_that_of_the_whole_models(
    tiny: Callable[..., Path], changed: Callable[..., Path], family: str, choices: dict, name: str
) -> None:
    folder = tiny(family, **choices)
    replaced = noisy(folder, name)
    found = Divergence(opened(folder), ROWS[:2], **SIZES)({name: replaced})
    assert found > 1e-6
    assert found == pytest.approx(divergence_by_logits(folder, changed(family, {name: replaced}, **choices)), rel=0.02)


def test_nothing_replaced_is_no_divergence_at_all(tiny: Callable[..., Path]) -> None:
    assert Divergence(opened(tiny("llama")), ROWS[:2], **SIZES)({}) == 0


def surveyed(folder: Path) -> tuple[list[Surveyed], Walk]:
    walk = Walk(opened(folder), ROWS, **SIZES)
    return survey(walk, DAMPING), walk


def test_the_survey_has_a_smaller_loss_for_each_larger_type_of_every_group(tiny: Callable[..., Path]) -> None:
    groups, walk = surveyed(tiny("llama"))
    assert len(groups) == 4 * walk.weights.config.num_layers
    assert groups[0].names == tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    for one in groups:
        assert set(one.losses) == {"Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
        assert one.losses["Q4_0"] > one.losses["Q5_0"] > one.losses["Q8_0"] > 0
        assert one.probe_loss > one.losses["Q4_0"] * 0.8  # the probe is not solved, only rounded


def test_slopes_know_how_much_of_an_error_reaches_the_output(tiny: Callable[..., Path], changed: Callable[..., Path]) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    found = []
    for folder in (tiny("llama"), changed("llama", {name: np.float32(0.1) * noisy(tiny("llama"), name, 0)})):
        groups, walk = surveyed(folder)
        slopes = measure(groups, walk, Divergence(opened(folder), ROWS[:2], **SIZES))
        found.append(dict(zip(((one.kind, one.layer) for one in groups), slopes, strict=True)))
        assert all(slope > 0 for slope in slopes)
    before, after = found
    assert after["mlp.gate_proj", 1] == pytest.approx(before["mlp.gate_proj", 1] / 100, rel=0.5)
    assert after["mlp.gate_proj", 2] == pytest.approx(before["mlp.gate_proj", 2], rel=0.5)


def test_types_fit_the_rows() -> None:
    assert [form.name for form in types_for(96)] == ["Q4_0", "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
    assert {"Q3_K", "Q4_K", "Q5_K", "Q6_K"} < {form.name for form in types_for(512)}
    assert "Q2_K" not in {form.name for form in types_for(512)}


def fitted(folder: Path, budget: Budget) -> fitting.Fitted:
    plan = make_plan(open_source(folder), RECIPES["Q4_0"])
    return fit(plan, opened(folder), ROWS, budget, damping=DAMPING, **SIZES)


def types(plan: Plan) -> dict[str, str]:
    return {tensor.source.name: tensor.format.name for tensor in plan.tensors}


@pytest.mark.parametrize("choices", [{}, TIED])
def test_the_file_has_no_more_bytes_than_asked_for_and_hardly_fewer(
    tiny: Callable[..., Path], tmp_path: Path, choices: dict
) -> None:
    folder = tiny("llama", **choices)
    size = sum(planned_file_bytes(make_plan(open_source(folder), RECIPES[name])) for name in ("Q4_1", "Q5_1")) // 2
    found = fitted(folder, Budget(nbytes=size))
    assert planned_file_bytes(found.plan) == write(found.plan, tmp_path / "out.gguf").file_bytes <= size
    assert planned_file_bytes(found.plan) > 0.99 * size
    assert found.plan.type_name.endswith("bpw")


def test_bits_a_weight_are_those_of_all_tensors_and_fused_groups_are_alike(tiny: Callable[..., Path]) -> None:
    found = types(fitted(tiny("llama"), Budget(bits_per_weight=5.6)).plan)
    plan = fitted(tiny("llama"), Budget(bits_per_weight=5.6)).plan
    assert types(plan) == found  # the same again
    bits = 8 * sum(t.nbytes for t in plan.tensors) / sum(t.num_elements for t in plan.tensors)
    assert 5.5 < bits <= 5.6
    for layer in range(3):
        assert len({found[f"blk.{layer}.attn_{name}.weight"] for name in "qkv"}) == 1
        assert found[f"blk.{layer}.ffn_gate.weight"] == found[f"blk.{layer}.ffn_up.weight"]
    assert len(set(found.values()) - {"F32"}) > 1


def test_what_measures_worse_than_a_recipe_gives_way_to_it(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "measure", lambda groups, *rest: [-1.0] * len(groups))  # the larger the loss, the better
    budget = Budget(nbytes=planned_file_bytes(make_plan(open_source(tiny("llama")), RECIPES["Q5_1"])))
    found = fitted(tiny("llama"), budget)
    assert found.recipe == "Q5_1"
    assert found.measured > found.recipe_measured
    assert types(found.plan)["blk.0.attn_q.weight"] == "Q5_1"


def test_a_size_that_cannot_be_is_refused_before_anything_is_measured(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "survey", None)
    with pytest.raises(UsageError, match=r"bytes more than the size"):
        fitted(tiny("llama"), Budget(nbytes=1000))
    with pytest.raises(UsageError, match=r"in their smallest types"):
        fitted(tiny("llama"), Budget(bits_per_weight=3.0))


@pytest.mark.parametrize("choices", [{}, TIED])
def test_the_solved_head_is_closer_than_the_rounded_one(tiny: Callable[..., Path], choices: dict) -> None:
    weights = opened(tiny("llama", **choices))
    walk = Walk(weights, ROWS, **SIZES)
    walk.embed()
    for index in range(weights.config.num_layers):
        walk.advance(walk.layer(index))
    table = np.array(weights.read(EMBEDDING if choices else HEAD), np.float32)
    hessian = head_statistics(walk).take_hessian().numpy()
    plain = dequantize(quantize(table, FORMATS["Q4_0"]))
    weighted = dequantize(round_head(weights, head_statistics(walk), FORMATS["Q4_0"], 1))
    solved = dequantize(solve_head(weights, head_statistics(walk), FORMATS["Q4_0"], DAMPING, 1))
    assert loss(table, weighted, hessian) < loss(table, plain, hessian)
    assert loss(table, solved, hessian) < 0.8 * loss(table, weighted, hessian)


EXPERTS = {
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": False, "use_sliding_window": False, "mlp_only_layers": []},
    "deepseek_v2": {},
}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models with experts."""
    root = tmp_path_factory.mktemp("sparse")

    def make(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else make_tiny_model(folder, family, tokenizer="bpe", **EXPERTS[family])

    return make


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_have_one_type_a_tensor_and_the_bytes_are_those_of_the_file(
    sparse: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = sparse(family)
    size = sum(planned_file_bytes(make_plan(open_source(folder), RECIPES[name])) for name in ("Q4_0", "Q5_1")) // 2
    found = fitted(folder, Budget(nbytes=size))
    assert planned_file_bytes(found.plan) == write(found.plan, tmp_path / "out.gguf").file_bytes <= size
    assert planned_file_bytes(found.plan) > 0.98 * size
    chosen = types(found.plan)
    stacks = [name for name in chosen if "_exps." in name]
    assert stacks
    for name in stacks:
        assert chosen[name] == chosen[name.replace("ffn_up_exps", "ffn_gate_exps")], "fused by runtimes"
    assert len({chosen[name] for name in chosen if chosen[name] != "F32"}) > 1


def test_losses_of_experts_count_by_the_tokens_that_chose_them(sparse: Callable[[str], Path]) -> None:
    """Of the expert that no token chooses they count nothing, of one that gets all as much as those of any other matrix."""
    folder = sparse("mixtral")
    groups, walk = surveyed(folder)
    config = walk.weights.config
    one = next(one for one in groups if one.kind.endswith("experts.0.gate_proj"))
    assert len(one.names) == 2 * config.experts.num_experts
    assert one.losses["Q4_0"] > one.losses["Q5_0"] > one.losses["Q8_0"] > 0
    again = Walk(opened(folder), ROWS, **SIZES)
    again.embed()
    layer = again.layer(one.layer)
    leaders = [f"mlp.experts.{number}.gate_proj" for number in range(config.experts.num_experts)]
    for index in range(one.layer):
        again.advance(again.layer(index))
    expected = 0.0
    for leader, seen in again.collect(layer, leaders).items():
        hessian = seen.products.numpy()
        for module in (leader, leader.replace("gate", "up")):
            weight = layer.matrix(module).numpy()
            rounded = dequantize(quantize(weight, FORMATS["Q4_0"]))
            expected += seen.count / again.num_tokens * loss(weight, rounded, hessian)
    assert 0.3 * expected < one.losses["Q4_0"] < 1.05 * expected  # of a sample of rows, with errors fed back


def test_an_embedding_of_its_own_is_weighed_too(tiny: Callable[..., Path]) -> None:
    found = types(fitted(tiny("llama"), Budget(bits_per_weight=7.5)).plan)
    assert FORMATS[found["token_embd.weight"]].bits_per_weight > FORMATS["Q4_0"].bits_per_weight  # what the recipe had
    weights = opened(tiny("llama"))
    one = survey_embedding(weights, ROWS)
    assert one.losses["Q4_0"] > one.losses["Q5_0"] > one.losses["Q8_0"] > 0
    table = np.array(weights.read(EMBEDDING), np.float32)
    error = dequantize(quantize(table, FORMATS["Q4_0"])) - table
    flat = np.concatenate([np.array(row) for row in ROWS])
    assert one.losses["Q4_0"] == pytest.approx(float((error[flat] ** 2).sum(axis=1).mean()), rel=1e-4)

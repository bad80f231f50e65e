"""Which tensor gets which type: llama.cpp's choices, fallbacks, and what is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_shapes import MODELS, summary

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.codecs import can_quantize
from llmctl.quant.recipe import RECIPES, ModelFacts, choose_types, model_facts, recipe_by_name

# By `llama-quantize --dry-run`: scripts/make_golden_recipes.py.
GOLDEN = json.loads((Path(__file__).parent / "golden_recipes.json").read_text())

UNTIED = ModelFacts("llama", 4)


def chosen(name: str, shape: tuple[int, ...], recipe: str, facts: ModelFacts = UNTIED, **options: bool) -> str:
    return choose_types([(name, shape)], RECIPES[recipe], facts, **options)[name].format.name


@pytest.mark.parametrize("title", MODELS)
@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "MXFP4"])
@pytest.mark.parametrize("importance", [False, True])
def test_types_are_those_of_llama_quantize(title: str, recipe: str, importance: bool) -> None:
    facts, shapes = MODELS[title]
    facts = ModelFacts(**{**vars(facts), "importance": importance})
    types = {name: choice.format.name for name, choice in choose_types(shapes, RECIPES[recipe], facts).items()}
    assert summary(types) == GOLDEN[f"{title}: {recipe}{' with importance' * importance}"]


@pytest.mark.parametrize("title", MODELS)
def test_mxfp4_without_exceptions_is_llama_quantizes_pure_one(title: str) -> None:
    facts, shapes = MODELS[title]
    types = {name: c.format.name for name, c in choose_types(shapes, RECIPES["MXFP4_MOE"], facts, pure=True).items()}
    assert summary(types) == GOLDEN[f"{title}: MXFP4"]
    if facts.experts == 8:  # whose keys and values have eight bits in every mix
        return
    plain = {name: c.format.name for name, c in choose_types(shapes, RECIPES["MXFP4"], facts).items()}
    head = "token_embd.weight" if facts.tied else "output.weight"
    assert {name for name in types if types[name] != plain[name]} <= {head}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_written(recipe: str) -> None:
    found = RECIPES[recipe]
    types = {found.matrices.name, found.head.name, *(rule.type for rule in found.rules)}
    assert all(can_quantize(choice) for choice in [found.matrices, found.head, *([found.stacks] if found.stacks else [])])
    assert types <= {"F32", "F16", "BF16", "Q8_0", "MXFP4", "IQ4_NL", *RECIPES, "Q3_K", "Q4_K", "Q5_K"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_norm.weight", (64,)),
        ("blk.0.attn_q_norm.weight", (8, 64)),
        ("blk.0.attn_q.bias", (64,)),
        ("rope_freqs.weight", (32,)),
        ("blk.0.ffn_gate_inp.weight", (8, 64)),
        ("blk.0.ssm_conv1d.weight", (64, 64)),
        ("blk.0.time_mix_w1.weight", (64, 64)),
        ("per_layer_model_proj.weight", (64, 64)),
        ("blk.0.ssm_a", (64, 64)),
    ],
)
def test_small_tensors_stay_in_float32(recipe: str, name: str, shape: tuple[int, ...]) -> None:
    assert chosen(name, shape, recipe) == "F32"


def test_the_head_is_rounded_less() -> None:
    tied = ModelFacts("llama", 4, tied=True)
    for recipe, head in (("F16", "F16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q6_K"), ("Q2_K", "Q6_K"), ("MXFP4", "Q8_0")):
        matrices = RECIPES[recipe].matrices.name
        assert chosen("output.weight", (384, 256), recipe) == head
        assert chosen("token_embd.weight", (384, 256), recipe) == matrices, "an embedding of its own is no head"
        assert chosen("token_embd.weight", (384, 256), recipe, tied) == head
        assert chosen("output.weight", (384, 256), recipe, pure=True) == matrices


def test_rows_that_are_no_whole_blocks_fall_back_and_say_so() -> None:
    def replaced(recipe: str, columns: int, name: str = "blk.0.attn_q.weight") -> tuple[str, str | None]:
        choice = choose_types([(name, (64, columns))], RECIPES[recipe], UNTIED)[name]
        return choice.format.name, choice.replaced and choice.replaced.name

    fallbacks = {"Q2_K": "Q4_0", "Q3_K_S": "Q4_0", "Q4_K_S": "Q5_0", "Q5_K_S": "Q5_1", "Q6_K": "Q8_0"}
    for recipe, found in fallbacks.items():
        assert replaced(recipe, 96) == (found, RECIPES[recipe].matrices.name)
        assert replaced(recipe, 80) == ("F16", RECIPES[recipe].matrices.name)
        assert replaced(recipe, 256) == (RECIPES[recipe].matrices.name, None)
    assert replaced("Q4_0", 80) == ("F16", "Q4_0")
    assert replaced("Q4_0", 96) == ("Q4_0", None)
    assert replaced("BF16", 81) == ("BF16", None)
    assert replaced("Q4_0", 96, "output.weight") == ("Q8_0", "Q6_K")


def test_facts_come_from_the_metadata() -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 80,
        "llama.expert_count": 8,
        "llama.attention.head_count": 64,
        "llama.attention.head_count_kv": [8, 64],
    }
    assert model_facts(metadata, {"output.weight"}) == ModelFacts("llama", 80, 8, 8)
    assert model_facts(metadata, {"token_embd.weight"}, importance=True) == ModelFacts("llama", 80, 8, 8, True, True)
    assert model_facts({"general.architecture": "x", "x.attention.head_count": 4}, ()).heads_per_kv_head == 1
    assert model_facts({}, ()) == ModelFacts(heads_per_kv_head=0, tied=True)


def test_names_of_any_case_and_short_ones() -> None:
    assert recipe_by_name("q4_0") is RECIPES["Q4_0"]
    assert recipe_by_name("q4_k") is RECIPES["Q4_K_M"]
    assert recipe_by_name("Auto") is None
    with pytest.raises(UnsupportedError, match=r"'IQ2_XS' can be read, but not written; types are auto, F32.*Q4_0.*Q4_K_M"):
        recipe_by_name("IQ2_XS")
    with pytest.raises(UsageError, match=r"no type 'q4km'; did you mean Q4_K_M\? Types are auto, F32"):
        recipe_by_name("q4km")

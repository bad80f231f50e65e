"""Which tensor gets which type."""

from __future__ import annotations

import pytest

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.codecs import can_quantize
from llmctl.quant.recipe import RECIPES, choose, head_name, recipe_by_name

HEAD = "output.weight"


def chosen(name: str, shape: tuple[int, ...], recipe: str, **options: object) -> str:
    return choose(name, shape, RECIPES[recipe], **{"head": HEAD, **options}).format.name


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_can_be_written(recipe: str) -> None:
    assert can_quantize(RECIPES[recipe].matrices)
    assert can_quantize(RECIPES[recipe].head)


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
        ("blk.0.ssm_a", (64, 64)),
    ],
)
def test_small_tensors_stay_in_float32(recipe: str, name: str, shape: tuple[int, ...]) -> None:
    assert chosen(name, shape, recipe) == "F32"


@pytest.mark.parametrize("recipe", RECIPES)
def test_matrices_have_the_type_asked_for(recipe: str) -> None:
    assert chosen("blk.3.ffn_down.weight", (64, 96), recipe) == recipe
    assert chosen("blk.3.ffn_down_exps.weight", (4, 64, 96), recipe) == recipe


HEADS = {name: name for name in ("F32", "F16", "BF16", "Q8_0")} | dict.fromkeys(("Q5_1", "Q5_0", "Q4_1", "Q4_0"), "Q8_0")


@pytest.mark.parametrize(("recipe", "expected"), HEADS.items())
def test_the_head_is_rounded_less(recipe: str, expected: str) -> None:
    assert chosen("output.weight", (384, 64), recipe) == expected
    assert chosen("token_embd.weight", (384, 64), recipe) == recipe, "an embedding of its own is no head"
    assert chosen("token_embd.weight", (384, 64), recipe, head="token_embd.weight") == expected
    assert chosen("output.weight", (384, 64), recipe, pure=True) == recipe


def test_the_head_is_the_embedding_where_there_is_no_other() -> None:
    assert head_name({"token_embd.weight"}) == "token_embd.weight"
    assert head_name({"token_embd.weight", "output.weight"}) == "output.weight"


def test_rows_that_are_no_whole_blocks_fall_back_and_say_so() -> None:
    choice = choose("blk.0.ffn_down.weight", (64, 80), RECIPES["Q4_0"], head=HEAD)
    assert (choice.format.name, choice.replaced and choice.replaced.name) == ("F16", "Q4_0")
    choice = choose("output.weight", (384, 80), RECIPES["Q4_0"], head=HEAD)
    assert (choice.format.name, choice.replaced and choice.replaced.name) == ("F16", "Q8_0")
    assert choose("blk.0.ffn_down.weight", (64, 96), RECIPES["Q4_0"], head=HEAD).replaced is None
    assert choose("blk.0.ffn_down.weight", (64, 81), RECIPES["BF16"], head=HEAD).replaced is None


def test_names_of_any_case() -> None:
    assert recipe_by_name("q4_0") is RECIPES["Q4_0"]
    assert recipe_by_name("Auto") is None
    with pytest.raises(UnsupportedError, match=r"'Q4_K_M' cannot be written yet; types are auto, F32.*Q4_0"):
        recipe_by_name("Q4_K_M")

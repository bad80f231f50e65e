"""GGUF keys ↔ config: what is written is read back as the same model, and broken metadata is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from make_tiny_model import tiny_config

from llmctl.errors import FormatError
from llmctl.runtime.models.gguf_config import config_from_gguf, factor_tensors, metadata_from_config
from llmctl.runtime.models.registry import family_by_model_type
from llmctl.runtime.models.rope import rope_frequencies

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {**CONFIG, "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16}
SHAPES = {"token_embd.weight": (100, 64)}


def round_trip(values: dict[str, Any]) -> tuple[Any, Any]:
    """The config as read from Hugging Face, and after a detour through GGUF metadata."""
    family = family_by_model_type(values["model_type"])
    config = family.read_config(values)
    metadata = metadata_from_config(config, family)
    return config, family.read_config(config_from_gguf(metadata, family, SHAPES, factor_tensors(config)))


@pytest.mark.parametrize("values", [CONFIG, GEMMA3, {**GEMMA3, "final_logit_softcapping": 30.0}])
def test_every_choice_survives_the_detour(values: dict[str, Any]) -> None:
    before, after = round_trip(values)
    for name in vars(before):
        if name != "layers":
            assert getattr(after, name) == getattr(before, name), name
    assert [layer.sliding_window for layer in after.layers] == [layer.sliding_window for layer in before.layers]


ROPES = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3, "beta_fast": 16},
    {
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
]


@pytest.mark.parametrize("scaling", ROPES)
@pytest.mark.parametrize("length", [16, 100])
def test_rope_scaling_survives_the_detour(scaling: dict[str, Any], length: int) -> None:
    before, after = round_trip({**CONFIG, "rope_scaling": scaling})
    expected, expected_scaling = rope_frequencies(before.layers[0].rope, length)
    found, found_scaling = rope_frequencies(after.layers[0].rope, length)
    np.testing.assert_allclose(found, expected, rtol=3e-7)
    assert found_scaling == pytest.approx(expected_scaling, rel=1e-6)


def test_gemma3_scaling_touches_the_global_layers_only() -> None:
    _, after = round_trip({**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 100.0})
    assert [layer.rope.kind for layer in after.layers] == ["default"] * 5 + ["linear", "default"]
    assert (after.layers[0].rope.theta, after.layers[5].rope.theta) == (100.0, 500.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": "seven"}, "llama.block_count"),
        ({"llama.block_count": True}, "llama.block_count"),
        ({"llama.attention.head_count": [6, 4]}, "llama.attention.head_count"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": "big"}, "rope.scaling.factor"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count"),
        ({"llama.context_length": 2**64 - 1}, "llama.context_length"),
        ({"llama.context_length": float("nan")}, "llama.context_length"),
        ({"llama.embedding_length": [[1], [1]]}, "llama.embedding_length"),
        ({"llama.embedding_length": 3, "llama.attention.key_length": None}, "embedding_length"),
        ({"llama.attention.layer_norm_rms_epsilon": float("inf")}, "layer_norm_rms_epsilon"),
        ({"llama.rope.freq_base": -1.0}, "rope.freq_base"),
        ({"llama.rope.dimension_count": 2**31 - 1}, "rotate"),
        ({"llama.rope.scaling.type": np.array([1, 2])}, "rope.scaling.type"),
        ({"llama.rope.scale_linear": "four"}, "rope.scale_linear"),
        ({"llama.expert_count": 4}, "llama.expert_used_count' is missing"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 0}, "llama.expert_used_count' is missing"),
        ({"tokenizer.ggml.eos_token_id": "two"}, "eos_token_id"),
        ({"tokenizer.ggml.bos_token_id": np.array([1])}, "bos_token_id"),
    ],
)
def test_broken_metadata_is_named(change: dict[str, Any], named: str) -> None:
    family = family_by_model_type("llama")
    metadata = {**metadata_from_config(family.read_config(CONFIG), family), **change}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    with pytest.raises(FormatError, match=named):
        family.read_config(config_from_gguf(metadata, family, SHAPES, {}))


def test_per_layer_values_that_are_alike_are_one_value() -> None:
    family = family_by_model_type("llama")
    metadata = {**metadata_from_config(family.read_config(CONFIG), family), "llama.attention.head_count_kv": np.array([2] * 7)}
    assert family.read_config(config_from_gguf(metadata, family, SHAPES, {})).num_kv_heads == 2


@pytest.mark.parametrize(
    ("pattern", "without"),
    [(None, {5}), (3, {2, 5}), (1, set(range(7))), (0, set()), (2**40, set()), ([1, 0, 1, 1, 1, 1, 1], {1})],
)
def test_a_file_may_say_which_layers_have_a_window(pattern: Any, without: set[int]) -> None:
    """llama.cpp takes a list, or a number n: every n-th layer sees everything, and 0 means that none does."""
    family = family_by_model_type("gemma3_text")
    metadata = metadata_from_config(family.read_config(GEMMA3), family)
    if pattern is not None:
        metadata["gemma3.attention.sliding_window_pattern"] = pattern
    layers = family.read_config(config_from_gguf(metadata, family, SHAPES, {})).layers
    assert {index for index, layer in enumerate(layers) if layer.sliding_window is None} == without


@pytest.mark.parametrize("pattern", [-1, 0.5, True, "six", [1, 0], ["a"] * 7])
def test_a_pattern_of_windows_that_cannot_be_is_named(pattern: Any) -> None:
    family = family_by_model_type("gemma3_text")
    metadata = metadata_from_config(family.read_config(GEMMA3), family)
    with pytest.raises(FormatError, match=r"sliding_window_pattern.* 7 layers"):
        config_from_gguf({**metadata, "gemma3.attention.sliding_window_pattern": pattern}, family, SHAPES, {})


def test_a_foreign_key_does_not_hide_the_size_of_heads() -> None:
    """Of latent attention heads have several sizes; a family without it has one, whatever keys there are."""
    family = family_by_model_type("glm4")
    config = family.read_config(tiny_config("glm4").to_dict())
    metadata = {**metadata_from_config(config, family), "glm4.attention.kv_lora_rank": 64}
    read = family.read_config(config_from_gguf(metadata, family, {"token_embd.weight": (384, 96)}, {}))
    assert read.layers[0].rope.rotary_dim == config.layers[0].rope.rotary_dim != config.head_dim


def test_heads_and_biases_are_told_by_the_tensors() -> None:
    family = family_by_model_type("llama")
    metadata = metadata_from_config(family.read_config(CONFIG), family)
    shapes = {**SHAPES, "output.weight": (100, 64), "blk.0.attn_q.bias": (96,)}
    config = family.read_config(config_from_gguf(metadata, family, shapes, {}))
    assert (config.tie_word_embeddings, config.attention_bias, config.attention_out_bias) == (False, True, False)


def test_zero_stands_for_a_scaling_or_cap_that_is_not_there() -> None:
    family = family_by_model_type("llama")
    zeros = {"llama.rope.scaling.factor": 0.0, "llama.final_logit_softcapping": 0.0}
    metadata = {**metadata_from_config(family.read_config(CONFIG), family), **zeros}
    config = family.read_config(config_from_gguf(metadata, family, SHAPES, {}))
    assert (config.final_softcap, config.layers[0].rope.kind) == (None, "default")


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_of_no_stated_kind_is_linear(key: str) -> None:
    """As llama.cpp reads it; files of 2023 have the second key."""
    family = family_by_model_type("llama")
    metadata = {**metadata_from_config(family.read_config(CONFIG), family), f"llama.{key}": 4.0}
    rope = family.read_config(config_from_gguf(metadata, family, SHAPES, {})).layers[0].rope
    assert rope is not None
    assert (rope.kind, rope.parameters["factor"]) == ("linear", 4.0)


@pytest.mark.parametrize("key", ["attention.key_length_mla", "expert_gating_func", "expert_weights_norm"])
def test_lists_where_a_number_belongs(key: str) -> None:
    family = family_by_model_type("deepseek_v3")
    config = family.read_config(tiny_config("deepseek_v3").to_dict())
    metadata = {**metadata_from_config(config, family), f"deepseek2.{key}": np.array([1, 2])}
    with pytest.raises(FormatError, match=f"'deepseek2.{key}' must be a number"):
        config_from_gguf(metadata, family, SHAPES, {})


@pytest.mark.parametrize("family_name", ["mixtral", "olmo3"])
def test_a_file_without_a_base_means_ten_thousand(family_name: str) -> None:
    """As readers take it, not what the class of config.json has for a default."""
    family = family_by_model_type(family_name)
    metadata = metadata_from_config(family.read_config(tiny_config(family_name).to_dict()), family)
    del metadata[f"{family.gguf_arch}.rope.freq_base"]
    values = config_from_gguf(metadata, family, {"token_embd.weight": (384, 96)}, {})
    assert {layer.rope.theta for layer in family.read_config(values).layers if layer.rope} == {10_000.0}


def test_long_factors_need_the_short_ones() -> None:
    family = family_by_model_type("llama")
    metadata = metadata_from_config(family.read_config(CONFIG), family)
    with pytest.raises(FormatError, match="rope_factors_short"):
        config_from_gguf(metadata, family, SHAPES, {"rope_factors_long.weight": np.ones(16, np.float32)})

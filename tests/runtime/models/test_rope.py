"""Rotary frequencies against transformers, for every type and every spelling of the config."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from make_tiny_model import HEAD_DIM, ORIGINAL_CONTEXT, ROPES, tiny_config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies

SCALED = sorted(set(ROPES) - {"default"})
VARIANTS = {
    **ROPES,
    "yarn_paper": {**ROPES["yarn"], "rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn_attention_factor": {**ROPES["yarn"], "rope_type": "yarn", "attention_factor": 0.83},
    "yarn_mscale": {**ROPES["yarn"], "rope_type": "yarn", "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn_not_truncated": {**ROPES["yarn"], "rope_type": "yarn", "truncate": False},
    "yarn_narrow_ramp": {**ROPES["yarn"], "rope_type": "yarn", "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "longrope_attention_factor": {**ROPES["longrope"], "rope_type": "longrope", "attention_factor": 1.21},
    "longrope_implied_factor": {**ROPES["longrope"], "rope_type": "longrope", "factor": None},
    "linear_other_theta": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500_000.0},
}


def variant(name: str) -> str | dict:
    return name if name in ROPES else dict(VARIANTS[name])


def reference_angles(rotary, length: int, layer_type: str | None) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [length, HEAD_DIM / 2] that transformers uses in one forward over `length` tokens."""
    arguments = [torch.zeros(1), torch.arange(length)[None]] + ([layer_type] if layer_type else [])
    cos, sin = rotary(*arguments)
    return cos[0, :, : HEAD_DIM // 2].numpy(), sin[0, :, : HEAD_DIM // 2].numpy()


def our_angles(config: dict, length: int, layer_type: str | None) -> tuple[np.ndarray, np.ndarray]:
    inv_freq, scaling = rope_frequencies(RopeConfig.from_hf(config, layer_type), length)
    angles = np.arange(length, dtype=np.float32)[:, None] * inv_freq
    return np.cos(angles) * np.float32(scaling), np.sin(angles) * np.float32(scaling)


@pytest.mark.parametrize("length", [ORIGINAL_CONTEXT // 2, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1, 3 * ORIGINAL_CONTEXT])
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_llama_angles_equal_transformers(name: str, length: int) -> None:
    config = tiny_config("llama", rope=variant(name))
    expected = reference_angles(LlamaRotaryEmbedding(config), length, None)
    np.testing.assert_allclose(our_angles(config.to_dict(), length, None), expected, atol=2e-5)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("length", [ORIGINAL_CONTEXT // 2, 3 * ORIGINAL_CONTEXT])
@pytest.mark.parametrize("name", sorted(ROPES))
def test_gemma3_angles_equal_transformers_in_both_layer_types(name: str, length: int, layer_type: str) -> None:
    config = tiny_config("gemma3", rope=name)
    expected = reference_angles(Gemma3RotaryEmbedding(config), length, layer_type)
    np.testing.assert_allclose(our_angles(config.to_dict(), length, layer_type), expected, atol=2e-5)


@pytest.mark.parametrize("name", SCALED)
def test_scaling_is_active_in_the_test_configs(name: str) -> None:
    """The comparisons above would prove nothing if the scaled tables were the plain one."""
    plain, _ = rope_frequencies(RopeConfig.from_hf(tiny_config("llama").to_dict()), 3 * ORIGINAL_CONTEXT)
    scaled, _ = rope_frequencies(RopeConfig.from_hf(tiny_config("llama", rope=name).to_dict()), 3 * ORIGINAL_CONTEXT)
    assert np.max(np.abs(scaled / plain - 1)) > 0.3


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_types_that_depend_on_length_change_only_beyond_the_original_context(name: str) -> None:
    rope = RopeConfig.from_hf(tiny_config("llama", rope=name).to_dict())
    assert rope.depends_on_length
    short, at_border, beyond = (rope_frequencies(rope, n)[0] for n in (1, ORIGINAL_CONTEXT, ORIGINAL_CONTEXT + 1))
    np.testing.assert_array_equal(short, at_border)
    assert np.max(np.abs(beyond / short - 1)) > 0.01


def spellings(name: str) -> dict[str, dict]:
    """One rope in every way a config.json has said it."""
    base = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": HEAD_DIM, "max_position_embeddings": 128}
    numbers, theta = ROPES[name], 20_000.0
    new = {"rope_type": name, "rope_theta": theta, **numbers}
    return {
        "rope_parameters": {**base, "rope_parameters": new},
        "nested": {**base, "rope_parameters": {"full_attention": new, "sliding_attention": {"rope_type": "default"}}},
        "rope_type": {**base, "rope_theta": theta, "rope_scaling": {"rope_type": name, **numbers}},
        "type": {**base, "rope_theta": theta, "rope_scaling": {"type": name, **numbers}},
        "both": {**base, "rope_theta": theta, "rope_scaling": {"type": name, "rope_type": name, **numbers}},
        "theta_outside": {**base, "rope_theta": theta, "rope_parameters": {"rope_type": name, **numbers}},
    }


@pytest.mark.parametrize("name", sorted(ROPES))
@pytest.mark.parametrize("spelling", sorted(spellings("default")))
def test_one_table_whatever_the_spelling(name: str, spelling: str) -> None:
    configs = spellings(name)
    layer_type = "full_attention" if spelling == "nested" else None
    expected = rope_frequencies(RopeConfig.from_hf(configs["rope_parameters"]), 96)
    found = rope_frequencies(RopeConfig.from_hf(configs[spelling], layer_type), 96)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("name", ["llama3", "yarn", "longrope"])
def test_original_context_may_stand_outside_the_scaling(name: str) -> None:
    config = copy.deepcopy(spellings(name)["type"])
    expected = rope_frequencies(RopeConfig.from_hf(config), 96)
    config["original_max_position_embeddings"] = config["rope_scaling"].pop("original_max_position_embeddings")
    found = rope_frequencies(RopeConfig.from_hf(config), 96)
    np.testing.assert_array_equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize("absent", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None}])
def test_no_scaling_is_the_plain_table(absent: dict) -> None:
    config = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": HEAD_DIM, "rope_theta": 10_000.0, **absent}
    inv_freq, scaling = rope_frequencies(RopeConfig.from_hf(config), None)
    expected = [10_000.0 ** (-i / HEAD_DIM) for i in range(0, HEAD_DIM, 2)]
    np.testing.assert_allclose(inv_freq, expected, rtol=1e-6)
    assert scaling == 1.0


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_type_is_an_error_that_names_it(key: str) -> None:
    config = spellings("linear")["type"] | {"rope_scaling": {key: "spiral", "factor": 2.0}}
    with pytest.raises(UnsupportedError, match="spiral"):
        RopeConfig.from_hf(config)


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"rope_parameters": 0}, "rope_parameters must be an object, found 0"),
        ({"rope_parameters": []}, "rope_parameters must be an object"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": 3}}, "rope_parameters of full_attention must be an object, found 3"),
        ({"rope_parameters": {"sliding_attention": {}}}, "no entry for layer type 'full_attention'"),
        ({"rope_parameters": {"rope_type": 0}}, "rope_type must be a string, found 0"),
        ({"rope_parameters": {"rope_type": []}}, "rope_type must be a string"),
    ],
)
def test_what_is_no_object_or_name_is_an_error(stated: dict, named: str) -> None:
    config = {"hidden_size": 96, "num_attention_heads": 6, "head_dim": HEAD_DIM, **stated}
    with pytest.raises(FormatError, match=named):
        RopeConfig.from_hf(config, "full_attention")


@pytest.mark.parametrize(("name", "missing"), [("linear", "factor"), ("dynamic", "factor"), ("llama3", "low_freq_factor")])
def test_a_missing_number_is_an_error_that_names_it(name: str, missing: str) -> None:
    config = copy.deepcopy(spellings(name)["rope_type"])
    del config["rope_scaling"][missing]
    with pytest.raises(FormatError, match=missing):
        RopeConfig.from_hf(config)


@pytest.mark.parametrize("factor", [0, -1.0, "four", math.inf, math.nan])
def test_a_senseless_factor_is_an_error(factor: object) -> None:
    config = spellings("linear")["type"] | {"rope_scaling": {"type": "linear", "factor": factor}}
    with pytest.raises(FormatError, match="factor"):
        RopeConfig.from_hf(config)


def test_a_list_of_the_wrong_length_is_an_error_with_both_lengths() -> None:
    config = copy.deepcopy(spellings("longrope")["type"])
    config["rope_scaling"]["long_factor"] = [1.0] * (HEAD_DIM // 2 - 1)
    with pytest.raises(FormatError, match=f"{HEAD_DIM // 2 - 1}.*{HEAD_DIM // 2}"):
        rope_frequencies(RopeConfig.from_hf(config), 96)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("yarn", {"rope_theta": 1.0}),
        ("yarn", {"beta_fast": "many"}),
        ("yarn", {"beta_fast": -1}),
        ("yarn", {"attention_factor": math.nan}),
        ("yarn", {"original_max_position_embeddings": 1.5}),
        ("llama3", {"high_freq_factor": 1.0, "low_freq_factor": 1.0}),
        ("longrope", {"long_factor": ["a"] * (HEAD_DIM // 2)}),
        ("longrope", {"long_factor": [0.0] * (HEAD_DIM // 2)}),
        ("longrope", {"short_factor": {"a": 1}}),
        ("longrope", {"original_max_position_embeddings": 1}),
        ("linear", {"partial_rotary_factor": 0.1}),
    ],
)
def test_numbers_that_make_no_table_are_refused_when_they_are_read(name: str, changes: dict) -> None:
    config = copy.deepcopy(spellings(name)["rope_parameters"])
    config["rope_parameters"] |= changes
    with pytest.raises(FormatError, match=r"config\.json: "):
        RopeConfig.from_hf(config)

"""Configs are read strictly: what is missing, senseless or unknown is named."""

from __future__ import annotations

from typing import Any

import pytest
from make_tiny_model import tiny_config

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.config_json import config_json
from llmctl.runtime.models.registry import family_by_gguf_arch, family_by_model_type

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
GEMMA3: dict[str, Any] = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}


def read(config: dict[str, Any], **changes: Any) -> Any:
    values = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    return family_by_model_type(values["model_type"]).read_config(values)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [..., 0, -1, "12", 1.5, True, [3]])
def test_a_missing_or_senseless_size_is_named(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        read(LLAMA, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 2**40),
        ("vocab_size", 10**4000),
        ("head_dim", 2**31),
        ("head_dim", 15),
        ("num_attention_heads", 128),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", 10**400),
        ("rope_theta", [1.0]),
        ("rope_theta", float("inf")),
        ("partial_rotary_factor", 2.0),
        ("hidden_act", ["silu"]),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, [3]]),
        ("max_position_embeddings", {"a": 1}),
        ("rope_scaling", ["linear"]),
    ],
)
def test_no_value_is_used_unseen(key: str, value: Any) -> None:
    """One error of a line, whatever stands there, before it costs time or memory."""
    with pytest.raises(FormatError) as caught:
        read(LLAMA, **{"head_dim": ... if key == "num_attention_heads" else 16, key: value})
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"), [("query_pre_attn_scalar", 0), ("final_logit_softcapping", -3), ("text_config", [1])]
)
def test_gemma3_numbers_that_cannot_be(key: str, value: Any) -> None:
    with pytest.raises(FormatError, match=key):
        read(GEMMA3, **{key: value})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", {"num_experts_per_tok": 7}, "7 experts a token cannot be chosen among 6"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts a token cannot be chosen among 8"),
        ("deepseek_v3", {"n_group": 3}, "2 of 3 groups cannot be chosen among 8 experts"),
        ("deepseek_v3", {"topk_group": 5}, "5 of 4 groups cannot be chosen"),
        ("deepseek_v3", {"n_group": 8, "num_experts_per_tok": 2}, "groups of 1 experts have no two best"),
    ],
)
def test_experts_that_cannot_be_chosen(family: str, change: dict[str, Any], message: str) -> None:
    """Found in the config, so that the file is named and no weight is read first."""
    with pytest.raises(FormatError, match=f"config.json: {message}"):
        read({**tiny_config(family).to_dict(), **change})


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("cohere", {"num_attention_heads": 2**20, "num_key_value_heads": 1, "head_dim": 32}, "1048576 heads of 32 numbers"),
        ("deepseek_v3", {"num_attention_heads": 2**20, "num_key_value_heads": 2**20}, "1048576 heads of 40 numbers"),
        ("deepseek_v3", {"kv_lora_rank": 2**31 - 1}, "'kv_lora_rank' is 2147483647, the limit is 65536"),
        ("deepseek_v3", {"qk_nope_head_dim": 2**31 - 1}, "'qk_nope_head_dim' is 2147483647, the limit is 65536"),
    ],
)
def test_claims_of_heads_cost_no_memory(family: str, change: dict[str, Any], message: str) -> None:
    """Rows are put in order, and the cache is planned, before a tensor could contradict."""
    with pytest.raises(FormatError, match=message):
        read({**tiny_config(family).to_dict(), **change})


@pytest.mark.parametrize("value", [["llama"], 5, {"a": 1}, True])
def test_an_architecture_that_is_no_name(value: Any) -> None:
    for find in (family_by_model_type, family_by_gguf_arch):
        with pytest.raises(FormatError, match="must be a string"):
            find(value)


def test_old_llama_configs_without_kv_heads_and_head_dim() -> None:
    config = read(LLAMA, num_key_value_heads=..., head_dim=..., hidden_size=96)
    assert (config.num_kv_heads, config.head_dim) == (6, 16)


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(FormatError, match="6 query heads cannot share 4"):
        read(LLAMA, num_key_value_heads=4)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="'relu2'"):
        read(LLAMA, hidden_act="relu2")


@pytest.mark.parametrize(("stored", "expected"), [(None, ()), (5, (5,)), ([5, 7], (5, 7))])
def test_end_tokens_as_nothing_a_number_or_a_list(stored: Any, expected: tuple[int, ...]) -> None:
    assert read(LLAMA, eos_token_id=stored).eos_token_ids == expected


def test_gemma3_pattern_five_local_then_one_global() -> None:
    windows = [layer.sliding_window for layer in read(GEMMA3).layers]
    assert windows == [8, 8, 8, 8, 8, None, 8]


def test_gemma3_layer_types_beat_the_pattern_and_are_checked() -> None:
    types = ["full_attention", *["sliding_attention"] * 6]
    assert read(GEMMA3, layer_types=types).layers[0].sliding_window is None
    for wrong in (types[:-1], ["chunked_attention"] * 7):
        with pytest.raises(UnsupportedError, match="layer_types"):
            read(GEMMA3, layer_types=wrong)


def test_gemma3_theta_by_layer_in_both_spellings() -> None:
    old = read(GEMMA3, rope_theta=50_000.0, rope_local_base_freq=100.0, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = read(
        GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )
    for config in (old, new):
        local, everywhere = config.layers[0].rope, config.layers[5].rope
        assert (local.kind, local.theta) == ("default", 100.0)
        assert (everywhere.kind, everywhere.theta) == ("linear", 50_000.0)


def test_gemma3_inside_a_multimodal_config() -> None:
    config = read({"model_type": "gemma3", "text_config": GEMMA3, "vision_config": {"hidden_size": 9}})
    assert (config.family, config.num_layers) == ("gemma3", 7)


@pytest.mark.parametrize(("growth", "kind"), [(None, "mistral"), (0.1, "ministral3")])
def test_the_text_of_a_mistral3_is_a_mistral_or_a_ministral3(growth: float | None, kind: str) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": growth}
    text = {**LLAMA, "model_type": kind, "rope_parameters": rope}
    config = read({"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 9}})
    assert (config.family, config.query_growth, config.num_layers) == ("mistral3", growth, 3)
    family = family_by_model_type("mistral3")
    assert config_json(config, family, FORMATS["F16"], None)["model_type"] == kind


REFUSED = {
    "starcoder2": {"norm_type": "rms_norm"},
    "gemma": {"use_bidirectional_attention": True},
    "gemma2": {"use_bidirectional_attention": True, "sliding_window": 8},
    "smollm3": {"layer_types": ["chunked_attention"] * 3},
    "gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "qwen2": {"use_sliding_window": True, "layer_types": ["linear_attention"] * 3},
}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_a_family_does_not_do_is_refused_by_name(family: str) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(REFUSED[family])) if family != "qwen2" else "layer_types"):
        read({**LLAMA, "model_type": family, **REFUSED[family]})


@pytest.mark.parametrize(("pattern", "windows"), [(3, [8, 8, None]), ("LG", [8, None, 8])])
def test_patterns_of_exaone4(pattern: int | str, windows: list[int | None]) -> None:
    config = read(LLAMA, model_type="exaone4", sliding_window=8, sliding_window_pattern=pattern)
    assert [layer.sliding_window for layer in config.layers] == windows
    assert [layer.rope is None for layer in config.layers] == [window is None for window in windows]
    with pytest.raises(FormatError, match="sliding_window_pattern"):
        read(LLAMA, model_type="exaone4", sliding_window_pattern="LX")


def test_layers_without_rope_are_checked() -> None:
    config = read(LLAMA, model_type="smollm3", no_rope_layers=[1, 0, 1])
    assert [layer.rope is None for layer in config.layers] == [False, True, False]
    with pytest.raises(FormatError, match="no_rope_layers must be 3"):
        read(LLAMA, model_type="smollm3", no_rope_layers=[1, 0])


def test_bidirectional_gemma3_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
        read(GEMMA3, use_bidirectional_attention=True)


def test_unknown_architectures_name_themselves_and_a_relative() -> None:
    with pytest.raises(UnsupportedError, match=r"'gemma3n'.*'gemma3'.*--as gemma3"):
        family_by_model_type("gemma3n")
    with pytest.raises(UnsupportedError, match=r"'mamba'.*llama"):
        family_by_gguf_arch("mamba")
    with pytest.raises(UnsupportedError, match="missing"):
        family_by_model_type(None)

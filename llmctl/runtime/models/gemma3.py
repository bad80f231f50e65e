"""The gemma3 family (text): Gemma 3 270M to 27B."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import LAYER_NAMES, QK_NORM_NAMES, SANDWICH_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import NORMS_AROUND, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.rope import RopeConfig

LOCAL_THETA = 10000.0
PATTERN = 6  # five sliding layers, then one that sees everything


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Gemma3TextConfig (or the text part of a Gemma3Config) → ModelConfig."""
    values = _text_part(values)
    hf = HfConfig(values)
    hf.refuse("use_bidirectional_attention", (False,), "only causal Gemma 3 models can generate")
    num_layers, head_dim = hf.layers(), hf.head_dim(256)
    return ModelConfig(
        family=FAMILY.name,
        vocab_size=hf.integer("vocab_size", 262208),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=hf.integer("num_attention_heads", 8),
        num_kv_heads=hf.integer("num_key_value_heads", 4),
        head_dim=head_dim,
        max_position_embeddings=hf.integer("max_position_embeddings", 131072),
        rms_norm_eps=hf.positive("rms_norm_eps", 1e-6),
        activation=hf.text("hidden_activation", "gelu_pytorch_tanh"),
        tie_word_embeddings=hf.flag("tie_word_embeddings", True),
        layers=_layers(hf, num_layers, head_dim),
        attention_scale=hf.positive("query_pre_attn_scalar", 256) ** -0.5,
        attention_bias=hf.flag("attention_bias"),
        attention_out_bias=hf.flag("attention_out_bias", hf.flag("attention_bias")),
        qk_norm="head",
        norms=NORMS_AROUND,
        norm_offset=1.0,
        embedding_scale=hf.integer("hidden_size") ** 0.5,
        attention_softcap=hf.optional_positive("attn_logit_softcapping"),
        final_softcap=hf.optional_positive("final_logit_softcapping"),
        eos_token_ids=hf.eos_token_ids(),
    )


def _text_part(values: dict[str, Any]) -> dict[str, Any]:
    nested = values.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise FormatError(f"config.json: text_config is {type(nested).__name__}, expected an object")
    return nested or values


def _layers(hf: HfConfig, num_layers: int, head_dim: int) -> tuple[LayerConfig, ...]:
    window = hf.integer("sliding_window", 4096)
    values = {**hf.values, "head_dim": head_dim}
    choices = {
        "full_attention": LayerConfig(None, RopeConfig.from_hf(_full(values), "full_attention")),
        "sliding_attention": LayerConfig(window, RopeConfig.from_hf(_sliding(values), "sliding_attention")),
    }
    pattern = hf.integer("sliding_window_pattern", hf.integer("_sliding_window_pattern", PATTERN))
    types = hf.layer_types(num_layers) or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)
    ]
    return tuple(choices[t] for t in types)


def _full(values: dict[str, Any]) -> dict[str, Any]:
    return {"rope_theta": 1_000_000.0, **values}


def _sliding(values: dict[str, Any]) -> dict[str, Any]:
    """Before transformers 5 the sliding layers had their own theta and were never scaled."""
    if "rope_parameters" in values:
        return {**values, "rope_theta": LOCAL_THETA}
    return {**values, "rope_theta": values.get("rope_local_base_freq") or LOCAL_THETA, "rope_scaling": None}


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Gemma3TextConfig has beyond the keys of all families."""
    windows = [layer.sliding_window for layer in config.layers]
    scalar = config.attention_scale**-2
    return {
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The query scale: 1/sqrt(head_dim), except that the 62-layer 27B divides by hidden_size / heads."""
    is_27b = config["num_hidden_layers"] == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {**config, "query_pre_attn_scalar": scalar}


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    read_config=read_config,
    gguf_arch="gemma3",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**LAYER_NAMES, **QK_NORM_NAMES, **SANDWICH_NAMES},
        permuted={},
        plus_one=True,
    ),
    hf_class="Gemma3ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
)

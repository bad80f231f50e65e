"""The llama family: Llama 1–3.x, TinyLlama, Yi, SmolLM 1/2, everything else that says model_type "llama", Mistral and Ministral.

Mistral is Llama without biases, and in its first version with a window; Ministral has the window in some of the layers.
"""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, LLAMA_PERMUTED, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import SLIDING, rope_of, window_keys, windowed

# What MistralConfig takes for keys that are absent, where LlamaConfig takes something else.
_MISTRAL_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face LlamaConfig, MistralConfig or MinistralConfig → ModelConfig."""
    mistral = values.get("model_type") in ("mistral", "ministral")
    values = {**_MISTRAL_DEFAULTS, **values} if mistral else values
    hf = HfConfig(values)
    if mistral:
        for key in ("attention_bias", "mlp_bias"):
            hf.refuse(key, (False,), "Mistral has no biases")
    num_layers, num_heads, head_dim = hf.layers(), hf.integer("num_attention_heads"), hf.head_dim()
    window = _window(hf) if mistral else None
    types = hf.layer_types(num_layers) if values.get("model_type") == "ministral" else None
    layers = windowed(types or [SLIDING] * num_layers, window, rope_of(hf, head_dim))
    return ModelConfig(
        family=FAMILY.name,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        intermediate_size=hf.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        max_position_embeddings=hf.integer("max_position_embeddings", 2048),
        rms_norm_eps=hf.positive("rms_norm_eps", 1e-6),
        activation=hf.text("hidden_act", "silu"),
        tie_word_embeddings=hf.flag("tie_word_embeddings"),
        layers=layers,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias"),
        attention_out_bias=hf.flag("attention_out_bias", hf.flag("attention_bias")),
        mlp_bias=hf.flag("mlp_bias"),
        eos_token_ids=hf.eos_token_ids(),
    )


def _window(hf: HfConfig) -> int | None:
    """The window, where it is shorter than the context; null says that there is none."""
    if hf.values["sliding_window"] is None:
        return None
    window = hf.integer("sliding_window")
    return window if window < hf.integer("max_position_embeddings") else None


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What LlamaConfig, or Mistral's and Ministral's where there is a window, has beyond the keys of all families."""
    windows = {layer.sliding_window for layer in config.layers}
    if windows == {None}:
        return {"hidden_act": config.activation, "mlp_bias": config.mlp_bias}
    if len(windows) > 1:
        ministral = {"architectures": ["MinistralForCausalLM"], "model_type": "ministral"}
        return {**ministral, "hidden_act": config.activation, **window_keys(config)}
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    return {**mistral, "hidden_act": config.activation, "sliding_window": windows.pop()}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """A window makes it a Mistral: Llama has none."""
    return {**config, "model_type": "mistral"} if config.get("sliding_window") else config


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "ministral"),
    read_config=read_config,
    gguf_arch="llama",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"},
        permuted=LLAMA_PERMUTED,
    ),
    hf_class="LlamaForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
)

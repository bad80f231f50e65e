"""The smollm3 family: Llama with layers that know no positions, usually every fourth."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import LAYER_NAMES, LLAMA_PERMUTED, TOP_NAMES, GgufNames
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config

_DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face SmolLM3Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        FAMILY.name,
        _layers(hf),
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        mlp_bias=hf.flag("mlp_bias"),
    )


def _layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    num_layers, rope = hf.layers(), rope_of(hf, hf.head_dim())
    turned = _turned(hf, num_layers)
    window = hf.integer("sliding_window") if hf.flag("use_sliding_window") and hf.values.get("sliding_window") else None
    types = hf.layer_types(num_layers) or [FULL if has_rope else SLIDING for has_rope in turned]
    return tuple(
        LayerConfig(window if kind == SLIDING else None, rope if has_rope else None)
        for kind, has_rope in zip(types, turned, strict=True)
    )


def _turned(hf: HfConfig, num_layers: int) -> list[bool]:
    """Which layers have a rope."""
    listed = hf.values.get("no_rope_layers")
    if listed is None:
        interval = hf.integer("no_rope_layer_interval", 4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if not isinstance(listed, list) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
        raise FormatError(f"config.json: no_rope_layers must be {num_layers} of 0 / 1, found {quoted(listed)}")
    return [bool(one) for one in listed]


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What SmolLM3Config has beyond the keys of all families."""
    windows = [layer.sliding_window for layer in config.layers]
    return {
        "hidden_act": config.activation,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(layer.rope is not None) for layer in config.layers],
        "use_sliding_window": any(windows),
        "sliding_window": next((window for window in windows if window), None),
        "layer_types": [SLIDING if window else FULL for window in windows],
    }


FAMILY = Family(
    name="smollm3",
    model_types=("smollm3",),
    read_config=read_config,
    gguf_arch="smollm3",
    gguf_names=GgufNames(
        top=TOP_NAMES, layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"}, permuted=LLAMA_PERMUTED
    ),
    hf_class="SmolLM3ForCausalLM",
    hf_keys=hf_keys,
)

"""The dense Qwen families: Qwen 1.5, 2 and 2.5 (biases on q, k and v), and Qwen 3 (a norm over every query and key head)."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import rope_of, standard_config, switched_types, window_keys, windowed

_NAMES = {**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"}


def read_qwen2(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Qwen2Config → ModelConfig."""
    return _read(values, QWEN2.name, attention_bias=True)


def read_qwen3(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Qwen3Config → ModelConfig."""
    hf, bias = HfConfig(values), HfConfig(values).flag("attention_bias")
    out_bias = hf.flag("attention_out_bias", bias)
    return _read(
        values, QWEN3.name, head_dim=hf.head_dim(128), qk_norm="head", attention_bias=bias, attention_out_bias=out_bias
    )


def _read(values: dict[str, Any], name: str, **choices: Any) -> ModelConfig:
    hf = HfConfig({"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28, **values})
    head_dim, num_layers = choices.pop("head_dim", None) or hf.head_dim(), hf.layers()
    types = switched_types(hf, num_layers)
    window = hf.integer("sliding_window") if "sliding_attention" in types else None
    return standard_config(hf, name, windowed(types, window, rope_of(hf, head_dim)), head_dim=head_dim, **choices)


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Qwen2Config and Qwen3Config have beyond the keys of all families."""
    keys = window_keys(config)
    return {"hidden_act": config.activation, "use_sliding_window": keys["sliding_window"] is not None, **keys}


QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    read_config=read_qwen2,
    gguf_arch="qwen2",
    gguf_names=GgufNames(top=TOP_NAMES, layer=_NAMES, permuted={}),
    hf_class="Qwen2ForCausalLM",
    hf_keys=hf_keys,
)
QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    read_config=read_qwen3,
    gguf_arch="qwen3",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="Qwen3ForCausalLM",
    hf_keys=hf_keys,
)

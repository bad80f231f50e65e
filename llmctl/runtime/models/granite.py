"""The granite family: IBM Granite 3.x (dense). Llama with four factors: on embeddings, scores, residuals and logits."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, LLAMA_PERMUTED, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, rope_of, standard_config, windowed


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face GraniteConfig → ModelConfig."""
    hf = HfConfig(values)
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        FAMILY.name,
        windowed([FULL] * hf.layers(), None, rope_of(hf, hf.head_dim())),
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        mlp_bias=hf.flag("mlp_bias"),
        attention_scale=hf.positive("attention_multiplier", 1.0),
        embedding_scale=hf.positive("embedding_multiplier", 1.0),
        residual_scale=hf.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / hf.positive("logits_scaling", 1.0),
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What GraniteConfig has beyond the keys of all families."""
    return {
        "hidden_act": config.activation,
        "mlp_bias": config.mlp_bias,
        "attention_multiplier": config.attention_scale,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1.0 / config.logit_scale,
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Without a key for it, readers scale the scores as usual."""
    return {"attention_multiplier": config["head_dim"] ** -0.5, **config}


FAMILY = Family(
    name="granite",
    model_types=("granite",),
    read_config=read_config,
    gguf_arch="granite",
    gguf_names=GgufNames(
        top=TOP_NAMES, layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"}, permuted=LLAMA_PERMUTED
    ),
    hf_class="GraniteForCausalLM",
    hf_keys=hf_keys,
    gguf_numbers={
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    complete_gguf=complete_gguf,
)

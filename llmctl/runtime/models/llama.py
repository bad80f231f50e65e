"""The llama family: Llama 1–3.x, TinyLlama, Yi, SmolLM 1/2 and everything else that says model_type "llama"."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.rope import RopeConfig


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face LlamaConfig → ModelConfig."""
    hf = HfConfig(values)
    num_layers, num_heads, head_dim = hf.layers(), hf.integer("num_attention_heads"), hf.head_dim()
    layer = LayerConfig(sliding_window=None, rope=RopeConfig.from_hf({**values, "head_dim": head_dim}))
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
        layers=(layer,) * num_layers,
        attention_scale=head_dim**-0.5,
        attention_bias=hf.flag("attention_bias"),
        attention_out_bias=hf.flag("attention_out_bias", hf.flag("attention_bias")),
        mlp_bias=hf.flag("mlp_bias"),
        eos_token_ids=hf.eos_token_ids(),
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What LlamaConfig has beyond the keys of all families."""
    return {"hidden_act": config.activation, "mlp_bias": config.mlp_bias}


FAMILY = Family(
    name="llama",
    model_types=("llama",),
    read_config=read_config,
    gguf_arch="llama",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"},
        permuted={"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"},
    ),
    hf_class="LlamaForCausalLM",
    hf_keys=hf_keys,
)

"""The first two Gemma families: Gemma 1 (2B, 7B, CodeGemma), and Gemma 2 with alternating windows and soft caps."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, SANDWICH_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import NORMS_AROUND, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys, windowed

_GELU = "gelu_pytorch_tanh"
_DEFAULTS = {"max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def read_gemma(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face GemmaConfig → ModelConfig. Early files say "gelu" where the tanh approximation was always meant."""
    hf = HfConfig({**_DEFAULTS, **values})
    stated = hf.text("hidden_activation", hf.text("hidden_act", _GELU))
    layers = windowed([FULL] * hf.layers(), None, rope_of(hf, hf.head_dim()))
    return standard_config(hf, GEMMA.name, layers, activation=_GELU if stated == "gelu" else stated, **_choices(hf))


def read_gemma2(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Gemma2Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **_CAPS, "sliding_window": 4096, **values})
    num_layers = hf.layers()
    types = hf.layer_types(num_layers) or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    layers = windowed(types, hf.integer("sliding_window"), rope_of(hf, hf.head_dim()))
    return standard_config(
        hf,
        GEMMA2.name,
        layers,
        activation=hf.text("hidden_activation", _GELU),
        attention_scale=hf.positive("query_pre_attn_scalar", 256) ** -0.5,
        norms=NORMS_AROUND,
        attention_softcap=hf.optional_positive("attn_logit_softcapping"),
        final_softcap=hf.optional_positive("final_logit_softcapping"),
        **_choices(hf),
    )


def _choices(hf: HfConfig) -> dict[str, Any]:
    """What both have in common: norms that store w of 1 + w, scaled embeddings."""
    hf.refuse("use_bidirectional_attention", (False,), "only causal Gemma models can generate")
    bias = hf.flag("attention_bias")
    return {
        "head_dim": hf.head_dim(),
        "norm_offset": 1.0,
        "embedding_scale": hf.integer("hidden_size") ** 0.5,
        "attention_bias": bias,
        "attention_out_bias": hf.flag("attention_out_bias", bias),
    }


def gemma_keys(config: ModelConfig) -> dict[str, Any]:
    """What GemmaConfig has beyond the keys of all families."""
    return {"hidden_act": config.activation, "hidden_activation": config.activation}


def gemma2_keys(config: ModelConfig) -> dict[str, Any]:
    """What Gemma2Config has beyond the keys of all families."""
    scalar = config.attention_scale**-2
    return {
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        **window_keys(config),
    }


def complete_gemma2(config: dict[str, Any]) -> dict[str, Any]:
    """The query scale: 1/sqrt(head_dim), except that the 46-layer 27B divides by hidden_size / heads."""
    is_27b = config["num_hidden_layers"] == 46
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {**config, "query_pre_attn_scalar": scalar}


GEMMA = Family(
    name="gemma",
    model_types=("gemma",),
    read_config=read_gemma,
    gguf_arch="gemma",
    gguf_names=GgufNames(
        top=TOP_NAMES, layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"}, permuted={}, plus_one=True
    ),
    hf_class="GemmaForCausalLM",
    hf_keys=gemma_keys,
)
GEMMA2 = Family(
    name="gemma2",
    model_types=("gemma2",),
    read_config=read_gemma2,
    gguf_arch="gemma2",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**LAYER_NAMES, **SANDWICH_NAMES}, permuted={}, plus_one=True),
    hf_class="Gemma2ForCausalLM",
    hf_keys=gemma2_keys,
    complete_gguf=complete_gemma2,
)

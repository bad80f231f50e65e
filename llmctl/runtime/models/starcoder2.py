"""The starcoder2 family: StarCoder 2 and Granite Code's larger models. LayerNorm, biases everywhere, an MLP without a gate."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import LAYER_NORM_EPS, Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, windowed

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 2, "tie_word_embeddings": True}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Starcoder2Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    hf.refuse("norm_type", ("layer_norm",), "StarCoder 2 has LayerNorm")
    window = None if hf.values.get("sliding_window") is None else hf.integer("sliding_window")
    types, bias = [FULL if window is None else SLIDING] * hf.layers(), hf.flag("use_bias", True)
    return standard_config(
        hf,
        FAMILY.name,
        windowed(types, window, rope_of(hf, hf.head_dim())),
        rms_norm_eps=hf.positive("norm_epsilon", 1e-5),
        activation=hf.text("hidden_act", "gelu_pytorch_tanh"),
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Starcoder2Config has beyond the keys of all families."""
    return {
        "hidden_act": config.activation,
        "norm_epsilon": config.rms_norm_eps,
        "use_bias": config.attention_bias,
        "sliding_window": config.layers[0].sliding_window,
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Biases are everywhere or nowhere."""
    return {"use_bias": config["attention_bias"], **config}


FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    read_config=read_config,
    gguf_arch="starcoder2",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={
            **{hf: gguf for hf, gguf in LAYER_NAMES.items() if not hf.startswith("mlp.")},
            "post_attention_layernorm": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        permuted={},
    ),
    hf_class="Starcoder2ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    eps_keys=("norm_epsilon", LAYER_NORM_EPS),
)

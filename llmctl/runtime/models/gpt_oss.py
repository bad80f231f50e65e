"""The gpt_oss family: gpt-oss 20B and 120B. A learned sink beside the keys of every head, windows in every second layer, biases
everywhere, experts with a clamped activation."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import EXPERT_NAMES, LAYER_NAMES, TOP_NAMES, GgufNames, HfNames
from llmctl.runtime.models.config import ExpertNames, ExpertsConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys, windowed

# What GptOssConfig takes for keys that are absent.
_DEFAULTS = {
    **{"num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088},
    **{"hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"sliding_window": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
}
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_NAMES = ExpertNames(router="mlp.router")


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face GptOssConfig → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **_with_rope(values)})
    hf.refuse("hidden_act", ("silu",), "gpt-oss has a clamped SwiGLU")
    hf.refuse("swiglu_alpha", (1.702,), "gpt-oss has a SwiGLU of alpha 1.702")
    hf.refuse("swiglu_limit", (7.0,), "gpt-oss clamps its SwiGLU at 7")
    bias, num_layers = hf.flag("attention_bias", True), hf.layers()
    types = hf.layer_types(num_layers) or [FULL if i % 2 else SLIDING for i in range(num_layers)]
    experts = ExpertsConfig(
        num_experts=hf.integer("num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=hf.integer("intermediate_size"),
        names=_NAMES,
        bias=True,
        renormalize=True,
    )
    return standard_config(
        hf,
        FAMILY.name,
        windowed(types, hf.integer("sliding_window"), rope_of(hf, hf.head_dim()), sparse=True),
        activation="clamped_swiglu",
        attention_bias=bias,
        attention_out_bias=bias,
        attention_sinks=True,
        experts=experts,
    )


def _with_rope(values: dict[str, Any]) -> dict[str, Any]:
    """A config that says nothing of its rope means the one of gpt-oss."""
    return values if values.get("rope_parameters") or values.get("rope_scaling") else {**values, "rope_scaling": _YARN}


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What GptOssConfig has beyond the keys of all families."""
    assert config.experts is not None, config
    return {
        "hidden_act": "silu",
        "num_local_experts": config.experts.num_experts,
        "num_experts_per_tok": config.experts.top_k,
        "swiglu_limit": 7.0,
        **window_keys(config),
    }


def gguf_keys(config: ModelConfig) -> dict[str, Any]:
    """What the architecture's readers look for."""
    assert config.experts is not None, config
    return {"expert_feed_forward_length": config.experts.intermediate_size}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Windows alternate, and the borders of yarn are no whole numbers: no key says so."""
    layers = config["num_hidden_layers"]
    types = [FULL if i % 2 else SLIDING for i in range(layers)]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {
        "layer_types": types,
        **config,
        "num_local_experts": config.pop("num_experts", None),
        "intermediate_size": config.pop("moe_intermediate_size", config["intermediate_size"]),
        "rope_scaling": {**scaling, "truncate": False},
    }


FAMILY = Family(
    name="gpt_oss",
    model_types=("gpt_oss",),
    read_config=read_config,
    gguf_arch="gpt-oss",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={
            **{hf: gguf for hf, gguf in LAYER_NAMES.items() if not hf.startswith("mlp.")},
            "self_attn.sinks": "attn_sinks",
            "post_attention_layernorm": "post_attention_norm",
            **{("mlp.router" if hf == "mlp.gate" else hf): gguf for hf, gguf in EXPERT_NAMES.items()},
        },
        permuted={},
    ),
    hf_class="GptOssForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    gguf_keys=gguf_keys,
    sparse=True,
    hf_names=HfNames(layer={"self_attn.sinks.weight": "self_attn.sinks"}, joined_experts=True),
)

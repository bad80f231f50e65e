"""The glm4 family: GLM-4 and GLM-4-0414 (dense, text). Norms around attention and MLP, pairs side by side of half a head."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import BlockNorms, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, rope_of, standard_config, windowed

_NORMS = BlockNorms("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Glm4Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, "partial_rotary_factor": 0.5, **values})
    return standard_config(
        hf,
        FAMILY.name,
        windowed([FULL] * hf.layers(), None, rope_of(hf, hf.head_dim())),
        attention_bias=hf.flag("attention_bias", True),
        norms=_NORMS,
        fused_gate_up=True,
        rope_interleaved=True,
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Glm4Config has beyond the keys of all families."""
    rope = config.layers[0].rope
    assert rope is not None
    return {"hidden_act": config.activation, "partial_rotary_factor": rope.rotary_dim / config.head_dim}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary dimension is always there; where it is the whole head, nothing else is said."""
    return {"partial_rotary_factor": 1.0, **config}


FAMILY = Family(
    name="glm4",
    model_types=("glm4",),
    read_config=read_config,
    gguf_arch="glm4",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={
            **{hf: gguf for hf, gguf in LAYER_NAMES.items() if hf not in ("mlp.gate_proj", "mlp.up_proj")},
            "mlp.gate_up_proj": "ffn_up",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_attention_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        permuted={},
    ),
    hf_class="Glm4ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
)

"""The phi3 family: Phi-3, 3.5 and 4 (text). q, k and v are stored as one matrix, gate and up as another."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, windowed

_DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Phi3Config → ModelConfig."""
    hf = HfConfig(_with_longrope({**_DEFAULTS, **values}))
    head_dim, window = hf.head_dim(), hf.values.get("sliding_window")
    if window is not None:
        window = hf.integer("sliding_window")
        window = window if window < hf.integer("max_position_embeddings") else None
    types = [FULL if window is None else SLIDING] * hf.layers()
    layers = windowed(types, window, rope_of(hf, head_dim))
    return standard_config(hf, FAMILY.name, layers, head_dim=head_dim, fused_qkv=True, fused_gate_up=True)


def _with_longrope(values: dict[str, Any]) -> dict[str, Any]:
    """Early files call their longrope "yarn"; the two lists of factors say what it is."""
    key = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    scaling = values.get(key)
    if scaling is not None and not isinstance(scaling, dict):
        raise FormatError(f"config.json: {key} is {type(scaling).__name__}, expected an object")
    if not scaling or "long_factor" not in scaling:
        return values
    return {**values, key: {**scaling, "rope_type": "longrope"}}


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Phi3Config has beyond the keys of all families."""
    rope = config.layers[0].rope
    assert rope is not None
    return {
        "hidden_act": config.activation,
        "sliding_window": config.layers[0].sliding_window,
        "original_max_position_embeddings": rope.original_max_position,
    }


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    read_config=read_config,
    gguf_arch="phi3",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
        permuted={},
    ),
    hf_class="Phi3ForCausalLM",
    hf_keys=hf_keys,
)

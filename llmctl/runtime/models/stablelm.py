"""The stablelm family: StableLM 3B, StableLM 2 1.6B and 12B, Zephyr. Llama with LayerNorm and a quarter of a head rotating; in
the 12B every head has a norm of its own, and attention and MLP stand side by side."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames, HfNames
from llmctl.runtime.models.config import NORM_SHARED, BlockNorms, ModelConfig
from llmctl.runtime.models.family import LAYER_NORM_EPS, Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, rope_of, standard_config, windowed

_DEFAULTS = {"max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face StableLmConfig → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    parallel = hf.flag("use_parallel_residual")
    return standard_config(
        hf,
        FAMILY.name,
        windowed([FULL] * hf.layers(), None, rope_of(hf, hf.head_dim())),
        rms_norm_eps=hf.positive("layer_norm_eps", 1e-5),
        attention_bias=hf.flag("use_qkv_bias"),
        qk_norm="each" if hf.flag("qk_layernorm") else None,
        layer_norm=True,
        norm_bias=True,
        parallel=parallel,
        norms=NORM_SHARED if parallel else BlockNorms(),
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What StableLmConfig has beyond the keys of all families."""
    rope = config.layers[0].rope
    assert rope is not None
    return {
        "hidden_act": config.activation,
        "layer_norm_eps": config.rms_norm_eps,
        "use_qkv_bias": config.attention_bias,
        "use_parallel_residual": config.parallel,
        "qk_layernorm": config.qk_norm is not None,
        "partial_rotary_factor": rope.rotary_dim / config.head_dim,
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary dimension is always there; where it is the whole head, nothing else is said."""
    own = {"use_qkv_bias": config["attention_bias"], "qk_layernorm": config["use_qk_norm"]}
    return {"partial_rotary_factor": 1.0, **own, **config}


FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    read_config=read_config,
    gguf_arch="stablelm",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**LAYER_NAMES, **QK_NORM_NAMES, "post_attention_layernorm": "ffn_norm"},
        permuted={},
    ),
    hf_class="StableLmForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    eps_keys=("layer_norm_eps", LAYER_NORM_EPS),
    hf_names=HfNames(rows={f"self_attn.{x}_norm.weight": f"self_attn.{x}_layernorm.norms.{{}}.weight" for x in "qk"}),
)

"""The mixtral family: Mistral with a mixture of experts in every layer. Its GGUF files say that they are llamas with experts."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import EXPERT_NAMES, LAYER_NAMES, LLAMA_PERMUTED, TOP_NAMES, GgufNames, HfNames
from llmctl.runtime.models.config import ExpertsConfig, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import rope_of, standard_config

# What MixtralConfig takes for keys that are absent.
_DEFAULTS = {
    **{"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    **{"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face MixtralConfig → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    for key in ("attention_bias", "mlp_bias"):
        hf.refuse(key, (False,), "Mixtral has no biases")
    window = None if hf.values.get("sliding_window") is None else hf.integer("sliding_window")
    layers = (LayerConfig(window, rope_of(hf, hf.head_dim()), sparse=True),) * hf.layers()
    experts = ExpertsConfig(
        num_experts=hf.integer("num_local_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=hf.integer("intermediate_size"),
        renormalize=True,
    )
    return standard_config(hf, FAMILY.name, layers, experts=experts)


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What MixtralConfig has beyond the keys of all families."""
    assert config.experts is not None, config
    return {
        "hidden_act": config.activation,
        "sliding_window": config.layers[0].sliding_window,
        "num_local_experts": config.experts.num_experts,
        "num_experts_per_tok": config.experts.top_k,
    }


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Experts are counted under another name."""
    return {**config, "num_local_experts": config.pop("num_experts", None)}


FAMILY = Family(
    name="mixtral",
    model_types=("mixtral",),
    read_config=read_config,
    gguf_arch="llama",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm", **EXPERT_NAMES},
        permuted=LLAMA_PERMUTED,
    ),
    hf_class="MixtralForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    sparse=True,
    hf_names=HfNames(
        layer={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.experts.{}.gate_proj": "block_sparse_moe.experts.{}.w1",
            "mlp.experts.{}.down_proj": "block_sparse_moe.experts.{}.w2",
            "mlp.experts.{}.up_proj": "block_sparse_moe.experts.{}.w3",
        }
    ),
)

"""The Qwen families with experts: Qwen 1.5 and 2 MoE (an expert that all tokens share, behind a gate of its own), Qwen 3 MoE."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import EXPERT_NAMES, LAYER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import ExpertsConfig, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys

# What Qwen2MoeConfig and Qwen3MoeConfig take for keys that are absent.
_COMMON = {"max_position_embeddings": 32768, "sliding_window": 4096, "decoder_sparse_step": 1}
_QWEN2 = {
    **_COMMON,
    **{"intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    **{"num_experts": 60, "num_experts_per_tok": 4, "max_window_layers": 28},
}
_QWEN3 = {
    **_COMMON,
    **{"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
}


def read_qwen2_moe(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Qwen2MoeConfig → ModelConfig."""
    hf = HfConfig({**_QWEN2, **values})
    types = hf.layer_types(hf.layers()) or _alternating(hf)
    experts = _experts(hf, shared_size=hf.integer("shared_expert_intermediate_size"), shared_gate=True)
    bias = hf.flag("qkv_bias", True)
    return _read(hf, QWEN2_MOE.name, types, experts, attention_bias=bias, attention_out_bias=False)


def read_qwen3_moe(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Qwen3MoeConfig → ModelConfig."""
    hf = HfConfig({**_QWEN3, **values})
    types, bias = [SLIDING] * hf.layers(), hf.flag("attention_bias")
    out_bias = hf.flag("attention_out_bias", bias)
    return _read(hf, QWEN3_MOE.name, types, _experts(hf), qk_norm="head", attention_bias=bias, attention_out_bias=out_bias)


def _alternating(hf: HfConfig) -> list[str]:
    """Every second of the first layers has a window, where there are windows at all."""
    first = hf.integer("max_window_layers")
    return [SLIDING if i % 2 == 0 and i < first else FULL for i in range(hf.layers())]


def _experts(hf: HfConfig, **choices: Any) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=hf.integer("num_local_experts", hf.integer("num_experts")),  # as transformers 5 writes it, or 4
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=hf.integer("moe_intermediate_size"),
        renormalize=hf.flag("norm_topk_prob"),
        **choices,
    )


def _read(hf: HfConfig, name: str, types: list[str], experts: ExpertsConfig, **choices: Any) -> ModelConfig:
    head_dim = hf.head_dim()
    window = hf.integer("sliding_window") if hf.flag("use_sliding_window") and hf.values["sliding_window"] is not None else None
    rope, sparse = rope_of(hf, head_dim), _sparse_layers(hf)
    layers = tuple(
        LayerConfig(window if kind == SLIDING else None, rope, sparse=index in sparse) for index, kind in enumerate(types)
    )
    return standard_config(hf, name, layers, head_dim=head_dim, experts=experts, **choices)


def _sparse_layers(hf: HfConfig) -> set[int]:
    """Every `decoder_sparse_step`-th layer, without those said to be dense."""
    dense = hf.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in dense):
        raise FormatError(f"config.json: 'mlp_only_layers' must be a list of layers, found {quoted(dense)}")
    step = hf.integer("decoder_sparse_step")
    return {index for index in range(hf.layers()) if (index + 1) % step == 0} - set(dense)


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Qwen2MoeConfig and Qwen3MoeConfig have beyond the keys of all families."""
    experts, windows = config.experts, window_keys(config)
    assert experts is not None, config
    keys = {
        "hidden_act": config.activation,
        "use_sliding_window": windows["sliding_window"] is not None,
        "sliding_window": windows["sliding_window"],
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [index for index, layer in enumerate(config.layers) if not layer.sparse],
    }
    if experts.shared_size is None:
        return keys
    shared = {"shared_expert_intermediate_size": experts.shared_size, "qkv_bias": config.attention_bias}
    return {**keys, **shared, "layer_types": windows["layer_types"]}


def _complete_qwen2(config: dict[str, Any]) -> dict[str, Any]:
    """No key says what its readers know by heart: weights of the chosen experts are their shares of all."""
    shared = config.get("shared_expert_intermediate_size", config["intermediate_size"])
    own = {"qkv_bias": config["attention_bias"], "shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return {**_with_expert_size(config), **own}


def _complete_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    return {**_with_expert_size(config), "norm_topk_prob": True}


def _with_expert_size(config: dict[str, Any]) -> dict[str, Any]:
    """Older files say only how large a token's experts are together."""
    together = config["intermediate_size"] // config.get("num_experts_per_tok", 1)
    return {"moe_intermediate_size": together, **config}


_NAMES = {**LAYER_NAMES, **EXPERT_NAMES, "post_attention_layernorm": "ffn_norm"}
_SHARED_NAMES = {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
QWEN2_MOE = Family(
    name="qwen2_moe",
    model_types=("qwen2_moe",),
    read_config=read_qwen2_moe,
    gguf_arch="qwen2moe",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={**_NAMES, **_SHARED_NAMES},
        permuted={},
        flat=frozenset({"mlp.shared_expert_gate"}),
    ),
    hf_class="Qwen2MoeForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=_complete_qwen2,
    sparse=True,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    read_config=read_qwen3_moe,
    gguf_arch="qwen3moe",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="Qwen3MoeForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=_complete_qwen3,
    sparse=True,
)

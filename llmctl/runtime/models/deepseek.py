"""The deepseek family: DeepSeek V2 (also Lite), V3 and R1. Latent attention, shared and routed experts after a few dense layers.

V2 chooses experts by softmax, V3 by sigmoids and a bias that evens out their load.
"""

from __future__ import annotations

import math
from typing import Any

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.names import EXPERT_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ExpertNames, ExpertsConfig, LatentConfig, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import MAX_HEAD_DIM, HfConfig
from llmctl.runtime.models.rope import RopeConfig
from llmctl.runtime.models.standard import rope_of, standard_config

_LATENT = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# What DeepseekV2Config and DeepseekV3Config take for keys that are absent.
_V2 = {
    **_LATENT,
    **{"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407},
    **{"topk_method": "greedy", "max_position_embeddings": 2048},
}
_V3 = {
    **_LATENT,
    **{"first_k_dense_replace": 3, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048},
    **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "rope_interleave": True, "max_position_embeddings": 4096},
}
_NAMES = ExpertNames(shared="mlp.shared_experts")
_SOFTMAX, _SIGMOID = 1, 2  # of GGUF's expert_gating_func
_GGUF_ONLY = ("qk_head_dim", "value_length", "num_experts", "gating", "log_multiplier", "temperature")
_CORRECTION = "mlp.gate.e_score_correction_bias"


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face DeepseekV2Config or DeepseekV3Config → ModelConfig."""
    v3 = values.get("model_type") == "deepseek_v3"
    hf = HfConfig({**(_V3 if v3 else _V2), **values})
    heads = hf.integer("num_attention_heads")
    hf.refuse("num_key_value_heads", (heads,), "every head has keys and values of its own, all from one latent")
    latent, experts = _latent(hf), _experts(hf, v3)
    head_dim, rope = latent.nope_dim + latent.rope_dim, rope_of(HfConfig(_without_share(hf.values)), latent.rope_dim)
    dense = _dense_layers(hf)
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        FAMILY.name,
        tuple(LayerConfig(None, rope, sparse=index >= dense) for index in range(hf.layers())),
        head_dim=head_dim,
        num_kv_heads=heads,
        attention_scale=head_dim**-0.5 * _mscale(rope) ** 2,
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        mlp_bias=hf.flag("mlp_bias") and not v3,
        rope_interleaved=hf.flag("rope_interleave", True),
        latent=latent,
        experts=experts,
    )


def _without_share(values: dict[str, Any]) -> dict[str, Any]:
    """All of the rotating part rotates, whatever share of a head it is."""
    return {key: value for key, value in values.items() if key != "partial_rotary_factor"}


def _latent(hf: HfConfig) -> LatentConfig:
    return LatentConfig(
        rank=hf.integer("kv_lora_rank", limit=MAX_HEAD_DIM),
        nope_dim=hf.integer("qk_nope_head_dim", limit=MAX_HEAD_DIM),
        rope_dim=hf.integer("qk_rope_head_dim", limit=MAX_HEAD_DIM),
        value_dim=hf.integer("v_head_dim", limit=MAX_HEAD_DIM),
        query_rank=None if hf.values["q_lora_rank"] is None else hf.integer("q_lora_rank"),
    )


def _dense_layers(hf: HfConfig) -> int:
    """How many layers come before the first with experts."""
    hf.refuse("moe_layer_freq", (1,), "after the dense layers all are sparse in the models there are")
    return 0 if hf.values["first_k_dense_replace"] in (0, None) else hf.integer("first_k_dense_replace")


def _experts(hf: HfConfig, v3: bool) -> ExpertsConfig:
    size, grouped = hf.integer("moe_intermediate_size"), _has_groups(hf, v3)
    return ExpertsConfig(
        num_experts=hf.integer("n_routed_experts"),
        top_k=hf.integer("num_experts_per_tok"),
        intermediate_size=size,
        names=_NAMES,
        shared_size=size * hf.integer("n_shared_experts"),
        correction_bias=_CORRECTION if v3 else None,
        renormalize=v3 and hf.flag("norm_topk_prob"),
        sigmoid=v3,
        num_groups=hf.integer("n_group", 1) if grouped else 1,
        top_groups=hf.integer("topk_group", 1) if grouped else 1,
        group_by_top2=v3 and grouped,
        scale=hf.positive("routed_scaling_factor", 1.0),
    )


def _has_groups(hf: HfConfig, v3: bool) -> bool:
    """Whether experts are chosen within groups; refuses what the class does not do."""
    if v3:
        hf.refuse("scoring_func", ("sigmoid",), "DeepSeek V3 scores its experts by sigmoids")
        hf.refuse("topk_method", ("noaux_tc",), "DeepSeek V3 has one way to choose among its experts")
        return hf.integer("n_group", 1) > 1
    hf.refuse("scoring_func", ("softmax",), "DeepSeek V2 scores its experts by softmax")
    hf.refuse("topk_method", ("greedy", "group_limited_greedy"), "DeepSeek V2 knows two ways to choose among its experts")
    hf.refuse("norm_topk_prob", (False,), "transformers and DeepSeek's own code weigh the experts of V2 differently then")
    return hf.values["topk_method"] == "group_limited_greedy"


def _mscale(rope: RopeConfig) -> float:
    """What a stretched context makes of every query and every key (Peng et al., "YaRN", 2023, section 3.4)."""
    weight, factor = rope.parameters.get("mscale_all_dim"), rope.parameters.get("factor")
    if rope.kind == "default" or not weight:
        return 1.0
    if factor is None:
        raise FormatError("config.json: rope mscale_all_dim needs 'factor', which is missing")
    return 1.0 if factor <= 1 else 0.1 * float(weight) * math.log(float(factor)) + 1.0


def gguf_keys(config: ModelConfig) -> dict[str, Any]:
    """GGUF's keys for what is not in all families. Attention is what it is once absorbed: one key for all heads; the sizes
    before that have keys of their own."""
    latent, experts, rope = config.latent, config.experts, config.layers[0].rope
    assert latent is not None, config
    assert experts is not None, config
    assert rope is not None, config
    stated = hf_keys(config)
    keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + latent.rope_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": config.head_dim,
        "attention.value_length_mla": latent.value_dim,
        "attention.kv_lora_rank": latent.rank,
        "leading_dense_block_count": stated["first_k_dense_replace"],
        "expert_shared_count": stated["n_shared_experts"],
        "expert_weights_scale": float(experts.scale),
        "expert_group_count": experts.num_groups,
        "expert_group_used_count": experts.top_groups,
        "expert_gating_func": _SIGMOID if experts.sigmoid else _SOFTMAX,
    }
    if latent.query_rank is not None:
        keys["attention.q_lora_rank"] = latent.query_rank
    if experts.renormalize:
        keys["expert_weights_norm"] = True
    if weight := rope.parameters.get("mscale_all_dim"):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * float(weight)
    return keys


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a GGUF file's values, which are those after absorption, or in older files those before it."""
    values = {key: value for key, value in config.items() if key not in ("head_dim", "num_key_value_heads", *_GGUF_ONLY)}
    key_length = config.get("qk_head_dim", config.get("head_dim"))
    if "qk_rope_head_dim" not in config or key_length is None:
        raise FormatError("the file has no deepseek2.attention.key_length, or no deepseek2.rope.dimension_count")
    _refuse_relatives(config)
    found = {
        "n_routed_experts": config.get("num_experts"),
        "q_lora_rank": config.get("q_lora_rank") or None,
        "qk_nope_head_dim": key_length - config["qk_rope_head_dim"],
        "v_head_dim": config.get("v_head_dim", config.get("value_length")),
        "n_group": config.get("n_group") or 1,
        "topk_group": config.get("topk_group") or 1,
        "routed_scaling_factor": config.get("routed_scaling_factor") or 1.0,
    }
    v3, grouped = config.get("gating") == _SIGMOID, found["n_group"] > 1
    found |= {"model_type": "deepseek_v3" if v3 else "deepseek_v2", "norm_topk_prob": config.get("norm_topk_prob", False)}
    found["topk_method"] = "noaux_tc" if v3 else "group_limited_greedy" if grouped else "greedy"
    return {**values, **found, **_scaling(config)}


def _refuse_relatives(config: dict[str, Any]) -> None:
    """The architecture is also that of models which compute something else."""
    gating = config.get("gating")
    if isinstance(gating, bool) or gating not in (None, 0, _SOFTMAX, _SIGMOID):  # none or 0: older than the key, softmax
        raise UnsupportedError(
            f"deepseek2.expert_gating_func = {gating} is not supported: DeepSeek V2 scores its experts by softmax "
            f"({_SOFTMAX}), V3 by sigmoids ({_SIGMOID})"
        )
    if config.get("temperature"):
        raise UnsupportedError(
            f"deepseek2.attention.temperature_scale = {config['temperature']} is not supported: no DeepSeek's queries grow with "
            "the position"
        )


def _scaling(config: dict[str, Any]) -> dict[str, Any]:
    """rope_scaling with the weight that GGUF keeps apart. llama.cpp takes the two of a config.json for the same."""
    scaling, multiplier = config.get("rope_scaling"), config.get("log_multiplier")
    if scaling is None or scaling["rope_type"] != "yarn":
        return {}
    if not multiplier:
        raise UnsupportedError(
            "yarn without mscale_all_dim (rope.scaling.yarn_log_multiplier): llama.cpp and transformers scale scores differently "
            "then, so that GGUF cannot say what is meant"
        )
    weight = round(multiplier / 0.1, 6)
    return {"rope_scaling": {**scaling, "mscale": weight, "mscale_all_dim": weight}}


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What DeepseekV2Config and DeepseekV3Config have beyond the keys of all families."""
    latent, experts = config.latent, config.experts
    assert latent is not None, config
    assert experts is not None, config
    dense = sum(not layer.sparse for layer in config.layers)
    keys = {
        "hidden_act": config.activation,
        "head_dim": latent.rope_dim,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": dense,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": (experts.shared_size or 0) // experts.intermediate_size,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.intermediate_size,
        "n_group": experts.num_groups,
        "topk_group": experts.top_groups,
        "routed_scaling_factor": experts.scale,
        "norm_topk_prob": experts.renormalize,
        "mlp_bias": config.mlp_bias,
    }
    if not experts.sigmoid:
        method = "greedy" if experts.num_groups == 1 else "group_limited_greedy"
        return {**keys, "topk_method": method, "scoring_func": "softmax"}
    v3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rope_interleave": config.rope_interleaved}
    return {**keys, **v3, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}


FAMILY = Family(
    name="deepseek",
    model_types=("deepseek_v2", "deepseek_v3"),
    read_config=read_config,
    gguf_arch="deepseek2",
    gguf_names=GgufNames(
        top=TOP_NAMES,
        layer={
            "input_layernorm": "attn_norm",
            "self_attn.q_proj": "attn_q",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.kv_b_proj": "attn_kv_b",
            "self_attn.k_b_proj": "attn_k_b",
            "self_attn.v_b_proj": "attn_v_b",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
            **EXPERT_NAMES,
            _CORRECTION: "exp_probs_b.bias",
            "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
            "mlp.shared_experts.up_proj": "ffn_up_shexp",
            "mlp.shared_experts.down_proj": "ffn_down_shexp",
        },
        permuted={},
    ),
    hf_class="DeepseekV2ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    gguf_keys=gguf_keys,
    gguf_values={
        "kv_lora_rank": "attention.kv_lora_rank",
        "q_lora_rank": "attention.q_lora_rank",
        "qk_head_dim": "attention.key_length_mla",
        "v_head_dim": "attention.value_length_mla",
        "value_length": "attention.value_length",
        "qk_rope_head_dim": "rope.dimension_count",
        "first_k_dense_replace": "leading_dense_block_count",
        "n_shared_experts": "expert_shared_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "routed_scaling_factor": "expert_weights_scale",
        "norm_topk_prob": "expert_weights_norm",
        "gating": "expert_gating_func",
        "log_multiplier": "rope.scaling.yarn_log_multiplier",
        "temperature": "attention.temperature_scale",
    },
)

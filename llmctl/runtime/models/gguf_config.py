"""GGUF metadata ↔ model config: one table of keys, used both ways."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import MAX_COUNT, MAX_HEAD_DIM, MAX_LAYERS
from llmctl.runtime.models.rope import RopeConfig, rope_frequencies

# Hugging Face key, GGUF key below `{arch}.`, needed. The order is the order in which the converter writes them.
_KEYS = (
    ("num_hidden_layers", "block_count", True),
    ("max_position_embeddings", "context_length", True),
    ("hidden_size", "embedding_length", True),
    ("intermediate_size", "feed_forward_length", True),
    ("num_attention_heads", "attention.head_count", True),
    ("num_key_value_heads", "attention.head_count_kv", False),
    ("rms_norm_eps", "attention.layer_norm_rms_epsilon", True),
    ("rope_theta", "rope.freq_base", False),
    ("head_dim", "attention.key_length", False),
    ("sliding_window", "attention.sliding_window", False),
    ("rope_local_base_freq", "rope.freq_base_swa", False),
    ("attn_logit_softcapping", "attn_logit_softcapping", False),
    ("final_logit_softcapping", "final_logit_softcapping", False),
    ("num_experts", "expert_count", False),
    ("num_experts_per_tok", "expert_used_count", False),
    ("moe_intermediate_size", "expert_feed_forward_length", False),
    ("shared_expert_intermediate_size", "expert_shared_feed_forward_length", False),
)
_LIMITS = {"num_hidden_layers": MAX_LAYERS, "head_dim": MAX_HEAD_DIM}
_REAL = {"rms_norm_eps", "rope_theta", "rope_local_base_freq", "attn_logit_softcapping", "final_logit_softcapping"}
# Where writers put a zero for what a model has not.
_ZERO_IS_ABSENT = (
    ".expert_count",
    ".expert_used_count",
    "_logit_softcapping",
    ".sliding_window",
    ".rope.scaling.factor",
    ".rope.scale_linear",
    ".rope.scaling.attn_factor",
)
_ROPE_THETA = 10_000.0  # of a file that states none, whatever the family's config.json means without it
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
FACTOR_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def config_from_gguf(
    metadata: Mapping[str, Any], family: Family, shapes: Mapping[str, tuple[int, ...]], factors: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """A Hugging Face config dict out of GGUF metadata.

    shapes: GGUF tensor name → torch-order shape. factors: those of FACTOR_TENSORS the file holds, as float32.
    Raises FormatError naming a key that is missing or is not a number.
    """
    arch = family.gguf_arch
    config = {hf: _value(metadata, hf, f"{arch}.{key}", needed) for hf, key, needed in _KEYS if hf != "rms_norm_eps"}
    stated, key = family.eps_keys
    config[stated] = _number(metadata, f"{arch}.{key}", needed=True)
    config |= {hf: _number(metadata, f"{arch}.{key}", needed=False) for hf, key in family.gguf_numbers.items()}
    config |= {hf: _stated(metadata, f"{arch}.{key}") for hf, key in family.gguf_values.items()}
    config = {key: value for key, value in config.items() if value is not None}
    config.setdefault("rope_theta", _ROPE_THETA)
    config["model_type"], config["architectures"] = family.model_types[0], [family.hf_class]
    if "token_embd.weight" not in shapes:
        raise FormatError("the file has no tensor 'token_embd.weight'")
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config["attention_bias"] = not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(shapes)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in shapes
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in shapes
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in shapes
    if "kv_lora_rank" not in family.gguf_values:  # heads of latent attention have several sizes
        _add_head_dim(config, metadata, arch)
    if "num_experts" in config:
        _add_experts(config, shapes, arch)
    _add_layer_types(config, metadata, arch)
    _add_rope_scaling(config, metadata, arch, factors)
    _add_token_ids(config, metadata)
    return family.complete_gguf(config)


def has_experts(metadata: Mapping[str, Any], arch: object) -> bool:
    """Whether a file of this architecture says that it has experts, if only in a number that cannot be."""
    value = metadata.get(f"{arch}.expert_count")
    return value is not None and not _is_zero(value)


def _value(metadata: Mapping[str, Any], hf: str, key: str, needed: bool) -> int | float | None:
    if hf in _REAL:
        return _number(metadata, key, needed)
    return _count(metadata, key, needed=needed, limit=_LIMITS.get(hf, MAX_COUNT))


def _number(metadata: Mapping[str, Any], key: str, needed: bool) -> Any:
    value = metadata.get(key)
    if value is None and not needed:
        return None
    if isinstance(value, (list, np.ndarray)) and len(value) and all(one == value[0] for one in value):
        value = np.asarray(value).tolist()[0]  # per-layer values that are all alike
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise FormatError(f"metadata key {key!r} must be a number, found {'nothing' if value is None else quoted(value)}")
    if value == 0 and not needed and key.endswith(_ZERO_IS_ABSENT):
        return None
    if not 0 < value < math.inf:
        raise FormatError(f"metadata key {key!r} must be above zero and finite, found {value}")
    return value


def _stated(metadata: Mapping[str, Any], key: str) -> int | float | bool | None:
    """A flag, or a number from zero on; None where there is none."""
    value = metadata.get(key)
    return value if isinstance(value, bool) or _is_zero(value) else _number(metadata, key, needed=False)


def _is_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and value == 0


def _count(metadata: Mapping[str, Any], key: str, *, needed: bool = False, limit: int = MAX_COUNT) -> int | None:
    value = _number(metadata, key, needed)
    if value is not None and (not isinstance(value, int) or value > limit):
        raise FormatError(f"metadata key {key!r} must be a whole number up to {limit}, found {value}")
    return value


def _add_head_dim(config: dict[str, Any], metadata: Mapping[str, Any], arch: str) -> None:
    """Older files say the head size only through the rotary dimension, or not at all."""
    value_length = _count(metadata, f"{arch}.attention.value_length")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if not head_dim:
        raise FormatError(f"{arch}.embedding_length is less than {arch}.attention.head_count")
    if value_length not in (None, head_dim):
        raise FormatError(f"{arch}.attention.value_length is {value_length}, but key_length is {head_dim}")
    config["head_dim"] = head_dim
    rotary = _count(metadata, f"{arch}.rope.dimension_count")
    if rotary not in (None, head_dim):
        config["partial_rotary_factor"] = rotary / head_dim


def _add_experts(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]], arch: str) -> None:
    """Which layers have experts. How many a token passes has a default in a config.json's class; a file has to say it."""
    if "num_experts_per_tok" not in config:
        raise FormatError(f"metadata key '{arch}.expert_used_count' is missing, but '{arch}.expert_count' says there are experts")
    layers = range(config["num_hidden_layers"])
    config["mlp_only_layers"] = [index for index in layers if f"blk.{index}.ffn_gate_inp.weight" not in shapes]


def _add_layer_types(config: dict[str, Any], metadata: Mapping[str, Any], arch: str) -> None:
    """Which layers have a window, where the file says it: layer by layer, or by a number n (every n-th has none; 0: all have)."""
    key, layers = f"{arch}.attention.sliding_window_pattern", config["num_hidden_layers"]
    pattern = metadata.get(key)
    if pattern is None or not config.get("sliding_window"):
        return
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        pattern = [not pattern or (index + 1) % pattern != 0 for index in range(layers)]
    found = np.asarray(pattern)
    if found.shape != (layers,) or found.dtype.kind not in "bui":
        raise FormatError(
            f"metadata key {key!r} must say of {layers} layers whether they have a window, or every how many one has none"
        )
    config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in found]


def _add_rope_scaling(config: dict[str, Any], metadata: Mapping[str, Any], arch: str, factors: Mapping[str, np.ndarray]) -> None:
    keys = ("factor", "original_context_length", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")
    found = {key: _number(metadata, f"{arch}.rope.scaling.{key}", needed=False) for key in keys}
    found["factor"] = found["factor"] or _number(metadata, f"{arch}.rope.scale_linear", needed=False)  # the first key there was
    # A factor without a word on its kind is linear: readers have taken it so since before there were others.
    kind = metadata.get(f"{arch}.rope.scaling.type", "linear" if found["factor"] else "none")
    if not isinstance(kind, str):
        raise FormatError(f"metadata key '{arch}.rope.scaling.type' must be a string, found {quoted(kind)}")
    original = found["original_context_length"]
    if "rope_freqs.weight" in factors:
        scaling = {"rope_type": "factors", "factors": factors["rope_freqs.weight"].tolist()}
    elif "rope_factors_long.weight" in factors:
        if "rope_factors_short.weight" not in factors:
            raise FormatError("the file has no tensor 'rope_factors_short.weight' beside 'rope_factors_long.weight'")
        scaling = {
            "rope_type": "longrope",
            "long_factor": factors["rope_factors_long.weight"].tolist(),
            "short_factor": factors["rope_factors_short.weight"].tolist(),
            "attention_factor": found["attn_factor"],
            "original_max_position_embeddings": original,
        }
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": found["factor"],
            "original_max_position_embeddings": original,
            "attention_factor": _yarn_attention_factor(metadata, arch, found),
            "beta_fast": found["yarn_beta_fast"],
            "beta_slow": found["yarn_beta_slow"],
        }
    elif kind == "none":
        return
    else:
        scaling = {"rope_type": kind, "factor": found["factor"]}
    config["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}


def _yarn_attention_factor(metadata: Mapping[str, Any], arch: str, found: dict[str, Any]) -> float | None:
    """GGUF's attn_factor multiplies the standard yarn factor; Hugging Face's attention_factor replaces it."""
    if found["attn_factor"] is None or not found["factor"]:
        return None
    return found["attn_factor"] * (1.0 + 0.1 * float(np.log(found["factor"])))


def _add_token_ids(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    keys = [f"tokenizer.ggml.{key}" for key in (*_END_TOKENS, "bos_token_id")]
    found = {key: metadata[key] for key in keys if key in metadata}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"metadata key {key!r} must be a token id, found {quoted(value)}")
    bos = found.pop("tokenizer.ggml.bos_token_id", None)
    config["eos_token_id"] = sorted(set(found.values()))
    if bos is not None:
        config["bos_token_id"] = bos


def metadata_from_config(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The `{arch}.*` keys a converter writes for this model."""
    arch = family.gguf_arch
    windows = [layer.sliding_window for layer in config.layers if layer.sliding_window]
    ropes, stated = global_and_local_rope(config), family.hf_keys(config)
    values = {
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": float(config.rms_norm_eps),
        "rope_theta": ropes[0].theta if ropes[0] else None,
        "head_dim": config.head_dim,
        "sliding_window": windows[0] if windows else None,
        "rope_local_base_freq": ropes[1].theta if ropes[1] else None,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.final_softcap,
        "num_experts": config.experts.num_experts if config.experts else None,
        "num_experts_per_tok": config.experts.top_k if config.experts else None,
        "moe_intermediate_size": stated.get("moe_intermediate_size"),
        "shared_expert_intermediate_size": stated.get("shared_expert_intermediate_size"),
    }
    spelled = [(hf, family.eps_keys[1] if hf == "rms_norm_eps" else key) for hf, key, _ in _KEYS]
    keys = {f"{arch}.{key}": values[hf] for hf, key in spelled if values[hf] is not None}
    keys[f"{arch}.attention.value_length"] = config.head_dim
    if ropes[0]:
        keys[f"{arch}.rope.dimension_count"] = ropes[0].rotary_dim
    keys[f"{arch}.vocab_size"] = config.vocab_size
    numbers = {f"{arch}.{key}": stated[hf] for hf, key in family.gguf_numbers.items()}
    keys |= {key: float(value) for key, value in numbers.items() if value is not None}
    keys |= {f"{arch}.{key}": value for key, value in family.gguf_keys(config).items()}
    if family.gguf_window_pattern and windows:
        keys[f"{arch}.attention.sliding_window_pattern"] = [layer.sliding_window is not None for layer in config.layers]
    scaling = _scaling_metadata(ropes[0], arch) if ropes[0] else {}
    if f"{arch}.rope.scaling.yarn_log_multiplier" in keys:
        scaling.pop(f"{arch}.rope.scaling.attn_factor", None)  # the one says what the other would
    return {**keys, **scaling}


def global_and_local_rope(config: ModelConfig) -> tuple[RopeConfig | None, RopeConfig | None]:
    """The rope of layers that see everything and, where they differ, of those with a window; None, None of a model without."""
    everywhere = [layer.rope for layer in config.layers if layer.rope and layer.sliding_window is None]
    local = [layer.rope for layer in config.layers if layer.rope and layer.sliding_window is not None]
    differ = local and everywhere and local[0] is not everywhere[0]
    return next(iter(everywhere or local), None), (local[0] if differ else None)


def _scaling_metadata(rope: RopeConfig, arch: str) -> dict[str, Any]:
    """Keys for linear, yarn and longrope. The dynamic type acts only beyond context_length, so a file needs nothing for it."""
    prefix, p = f"{arch}.rope.scaling.", rope.parameters
    if rope.kind == "linear":
        return {prefix + "type": "linear", prefix + "factor": float(p["factor"])}
    if rope.kind == "yarn":
        factor = float(p.get("factor") or rope.max_position / rope.original_max_position)
        keys = {
            prefix + "type": "yarn",
            prefix + "factor": factor,
            prefix + "original_context_length": rope.original_max_position,
            prefix + "attn_factor": rope_frequencies(rope)[1] / (1.0 + 0.1 * float(np.log(factor))),
            prefix + "yarn_beta_fast": p.get("beta_fast") and float(p["beta_fast"]),
            prefix + "yarn_beta_slow": p.get("beta_slow") and float(p["beta_slow"]),
        }
        return {key: value for key, value in keys.items() if value is not None}
    if rope.kind == "longrope":
        return {
            prefix + "type": "longrope",  # llama.cpp looks for the two sets of factors only in a file that says it has them
            prefix + "original_context_length": rope.original_max_position,
            prefix + "attn_factor": rope_frequencies(rope)[1],
        }
    return {}


def factor_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """The rope tensors (float32 divisors per frequency) that GGUF keeps beside the weights."""
    rope = global_and_local_rope(config)[0]
    if rope is None:
        return {}
    if rope.kind == "longrope":
        return {
            "rope_factors_long.weight": np.asarray(rope.parameters["long_factor"], dtype=np.float32),
            "rope_factors_short.weight": np.asarray(rope.parameters["short_factor"], dtype=np.float32),
        }
    if rope.kind == "factors":
        return {"rope_freqs.weight": np.asarray(rope.parameters["factors"], dtype=np.float32)}
    if rope.kind == "llama3":
        return {"rope_freqs.weight": llama3_divisors(rope)}
    return {}


def llama3_divisors(rope: RopeConfig) -> np.ndarray:
    """What llama3 scaling divides each frequency by, float32.

    The quotient of the frequencies: a reader that divides gets transformers' own again, where the divisors that llama.cpp's
    converter computes from the numbers (a last bit apart) would give their neighbours.
    """
    plain = RopeConfig("default", rope.theta, rope.rotary_dim, rope.original_max_position, rope.max_position)
    return rope_frequencies(plain)[0] / rope_frequencies(rope)[0]

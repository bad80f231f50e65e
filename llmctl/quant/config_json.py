"""A model's config as the config.json and generation_config.json of a Hugging Face folder.

Keys are those of transformers 4, which version 5 reads too; every choice is written, also where it is the default. What was
written is read back and compared, so that nothing is lost without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from llmctl.errors import FormatError
from llmctl.kernels.formats.spec import Format
from llmctl.quant.expressible import check_config_json
from llmctl.quant.rope_json import rope_scaling, round_trip
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.gguf_config import global_and_local_rope
from llmctl.runtime.models.rope import RopeConfig
from llmctl.runtime.tokenizer.facts import Facts

TORCH_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def config_json(config: ModelConfig, family: Family, form: Format, facts: Facts | None) -> dict[str, Any]:
    """The content of config.json. form: of the weights. facts: of the tokenizer, for the special ids.

    UnsupportedError naming a choice that transformers has no key for.
    """
    values = {
        "architectures": [family.hf_class],
        "model_type": family.model_types[0],
        "torch_dtype": TORCH_DTYPES[form.name],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": round_trip(config.rms_norm_eps),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        **_rope_keys(config, family),
        **family.hf_keys(config),
        **special_ids(facts, config),
        "use_cache": True,
    }
    values = {family.hf_spelling.get(key, key): value for key, value in values.items()}
    check_config_json(config, family, values)
    return values


def _rope_keys(config: ModelConfig, family: Family) -> dict[str, Any]:
    rope, local = global_and_local_rope(config)
    if rope is None:
        return {}
    keys = {"rope_theta": round_trip(rope.theta), "rope_scaling": rope_scaling(rope)}
    if rope.rotary_dim != config.head_dim:
        keys["partial_rotary_factor"] = rope.rotary_dim / config.head_dim
    if local is not None:
        keys["rope_local_base_freq"] = round_trip(local.theta)
    if family.hf_nested_rope and any(layer.sliding_window is not None for layer in config.layers):
        keys["rope_parameters"] = {"full_attention": _nested(rope), "sliding_attention": _nested(local or rope)}
    return keys


def _nested(rope: RopeConfig) -> dict[str, Any]:
    return {**(rope_scaling(rope) or {"rope_type": "default"}), "rope_theta": round_trip(rope.theta)}


def special_ids(facts: Facts | None, config: ModelConfig) -> dict[str, Any]:
    """bos, eos and pad by number; eos is a list where several tokens end an answer."""
    ends = list(facts.eos_token_ids if facts is not None else config.eos_token_ids)
    ids = {"bos_token_id": facts.bos_token_id if facts is not None else None}
    ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
    ids["pad_token_id"] = facts.pad_token_id if facts is not None else None
    return {key: value for key, value in ids.items() if value is not None}


def generation_json(facts: Facts | None, config: ModelConfig, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The content of generation_config.json. sampling: what the source recommends, by our names."""
    kept = {key: round_trip(value) for key, value in sampling.items() if key in _SAMPLING}
    for key, value in kept.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
            raise FormatError(f"the {key} the model recommends is {quoted(value)}, expected a number")
    if kept:
        kept["do_sample"] = kept.get("temperature") != 0
        if not kept["do_sample"]:
            kept.pop("temperature")
    return {**special_ids(facts, config), **kept}

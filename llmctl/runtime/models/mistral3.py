"""The mistral3 family: Ministral 3, and the text part of Mistral Small 3.1 and later. Yarn, and queries that grow with how many
original contexts precede them."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import LAYER_NAMES, LLAMA_PERMUTED, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, windowed

_DEFAULTS = {"max_position_embeddings": 262144, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "head_dim": 128}
_GROWTH = "llama_4_scaling_beta"
_IN_ROPE = (_GROWTH, "mscale", "mscale_all_dim")


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Ministral3Config, or a Mistral3Config around it or a MistralConfig → ModelConfig."""
    nested = values.get("text_config")
    if nested is not None and not isinstance(nested, dict):
        raise FormatError(f"config.json: text_config is {type(nested).__name__}, expected an object")
    hf = HfConfig({**_DEFAULTS, **(nested or values)})
    rope = rope_of(hf, hf.head_dim())
    window = None if hf.values.get("sliding_window") is None else hf.integer("sliding_window")
    types = [FULL if window is None else SLIDING] * hf.layers()
    growth = HfConfig(rope.parameters).optional_positive(_GROWTH)
    return standard_config(hf, FAMILY.name, windowed(types, window, rope), query_growth=growth)


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Ministral3Config has beyond the keys of all families; or MistralConfig, where queries do not grow."""
    rope = config.layers[0].rope
    assert rope is not None
    found = {key: rope.parameters.get(key) for key in _IN_ROPE}
    keys = {"hidden_act": config.activation, "sliding_window": config.layers[0].sliding_window, **found}
    if config.query_growth is not None:
        return keys
    return {**keys, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """These numbers are part of the rope; the first of the two mscales is one by definition."""
    found = {key: config[key] for key in _IN_ROPE if config.get(key) is not None}
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0
    rest = {key: value for key, value in config.items() if key not in _IN_ROPE}
    return {**rest, "rope_scaling": {**config.get("rope_scaling", {}), **found}}


FAMILY = Family(
    name="mistral3",
    model_types=("ministral3", "mistral3"),
    read_config=read_config,
    gguf_arch="mistral3",
    gguf_names=GgufNames(
        top=TOP_NAMES, layer={**LAYER_NAMES, "post_attention_layernorm": "ffn_norm"}, permuted=LLAMA_PERMUTED
    ),
    hf_class="Ministral3ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    gguf_numbers={_GROWTH: "attention.temperature_scale", "mscale_all_dim": "rope.scaling.yarn_log_multiplier"},
)

"""What most families' config.json say in the same words: a family file states only what it says otherwise."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.rope import RopeConfig

FULL, SLIDING = "full_attention", "sliding_attention"


def standard_config(hf: HfConfig, family: str, layers: tuple[LayerConfig, ...], **choices: Any) -> ModelConfig:
    """A ModelConfig from the usual keys. choices: fields the family decides itself."""
    head_dim = choices.pop("head_dim", None) or hf.head_dim()
    num_heads = hf.integer("num_attention_heads")
    fields = {
        "vocab_size": hf.integer("vocab_size"),
        "hidden_size": hf.integer("hidden_size"),
        "intermediate_size": hf.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": hf.integer("num_key_value_heads", num_heads),
        "max_position_embeddings": hf.integer("max_position_embeddings", 2048),
        "tie_word_embeddings": hf.flag("tie_word_embeddings"),
        "attention_scale": head_dim**-0.5,
        "eos_token_ids": hf.eos_token_ids(),
    }
    if "activation" not in choices:
        fields["activation"] = hf.text("hidden_act", "silu")
    if "rms_norm_eps" not in choices:
        fields["rms_norm_eps"] = hf.positive("rms_norm_eps", 1e-6)
    fields |= choices
    return ModelConfig(family=family, num_layers=len(layers), head_dim=head_dim, layers=layers, **fields)


def rope_of(hf: HfConfig, head_dim: int) -> RopeConfig:
    """The one rope of a model whose layers all turn alike."""
    return RopeConfig.from_hf({**hf.values, "head_dim": head_dim})


def windowed(
    types: list[str], window: int | None, rope: RopeConfig | None, *, sparse: bool = False
) -> tuple[LayerConfig, ...]:
    """Layers of one rope, those of type SLIDING with this window. sparse: all of them have experts."""
    choices = {FULL: LayerConfig(None, rope, sparse), SLIDING: LayerConfig(window, rope, sparse)}
    return tuple(choices[kind] for kind in types)


def switched_types(hf: HfConfig, num_layers: int) -> list[str]:
    """Layer types where `use_sliding_window` decides whether there are windows at all, and if so `layer_types` or else
    `max_window_layers`, the first layer with one."""
    if not hf.flag("use_sliding_window") or hf.values.get("sliding_window") is None:
        return [FULL] * num_layers
    first = hf.values.get("max_window_layers")
    first = hf.integer("max_window_layers") if first != 0 and first is not None else first or 0
    return hf.layer_types(num_layers) or [SLIDING if i >= first else FULL for i in range(num_layers)]


def window_keys(config: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json that say which layers have which window."""
    windows = [layer.sliding_window for layer in config.layers]
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }

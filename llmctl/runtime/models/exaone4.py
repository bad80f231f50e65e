"""The exaone4 family: EXAONE 4.0. Norms after attention and MLP; where layers alternate, only those with a window know
positions."""

from __future__ import annotations

from typing import Any

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.names import LAYER_NAMES, NORMS_AFTER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.config import NORMS_AFTER, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys

_DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Exaone4Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    return standard_config(hf, FAMILY.name, _layers(hf), qk_norm="head", norms=NORMS_AFTER)


def _layers(hf: HfConfig) -> tuple[LayerConfig, ...]:
    num_layers, rope = hf.layers(), rope_of(hf, hf.head_dim())
    if hf.values["sliding_window"] is None:
        return (LayerConfig(None, rope),) * num_layers
    choices = {FULL: LayerConfig(None, None), SLIDING: LayerConfig(hf.integer("sliding_window"), rope)}
    return tuple(choices[kind] for kind in hf.layer_types(num_layers) or _pattern(hf, num_layers))


def _pattern(hf: HfConfig, num_layers: int) -> list[str]:
    """Layer types from a number (every so many sees everything) or from letters (L: a window, G: everything)."""
    pattern = hf.values["sliding_window_pattern"]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        pattern = "L" * (pattern - 1) + "G"
    if not isinstance(pattern, str) or not pattern or set(pattern) - set("LG"):
        raise FormatError(f"config.json: sliding_window_pattern must be a number or letters L and G, found {quoted(pattern)}")
    return [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(num_layers)]


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Exaone4Config has beyond the keys of all families."""
    return {"hidden_act": config.activation, "sliding_window_pattern": 4, **window_keys(config)}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """A file without a window has none."""
    return {"sliding_window": None, **config}


FAMILY = Family(
    name="exaone4",
    model_types=("exaone4",),
    read_config=read_config,
    gguf_arch="exaone4",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**LAYER_NAMES, **NORMS_AFTER_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="Exaone4ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    gguf_window_pattern=True,
)

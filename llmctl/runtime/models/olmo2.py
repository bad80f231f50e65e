"""The olmo2 family: OLMo 2 and 3. Norms only after attention and MLP, and one over all query and all key heads together. In
OLMo 3 most layers have a window, and only those that see everything are scaled for long contexts."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, NORMS_AFTER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import NORMS_AFTER, LayerConfig, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.rope import RopeConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys

_OLMO3_DEFAULTS = {"sliding_window": 4096, "rope_theta": 500_000.0}
_PATTERN = 4  # three layers with a window, then one that sees everything


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Olmo2Config or Olmo3Config → ModelConfig."""
    is_olmo3 = values.get("model_type") == "olmo3"
    hf = HfConfig({"rms_norm_eps": 1e-5, **(_OLMO3_DEFAULTS if is_olmo3 else {}), **values})
    if not is_olmo3:
        hf.refuse("sliding_window", (), "a window makes it an OLMo 3")
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        FAMILY.name,
        _windowed(hf) if is_olmo3 else (LayerConfig(None, rope_of(hf, hf.head_dim())),) * hf.layers(),
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        qk_norm="all",
        norms=NORMS_AFTER,
    )


def _windowed(hf: HfConfig) -> tuple[LayerConfig, ...]:
    """Layers of an OLMo 3. Where the parameters are given once, they are those of the layers that see everything."""
    num_layers, values = hf.layers(), {**hf.values, "head_dim": hf.head_dim()}
    local = values if "rope_parameters" in values else {**values, "rope_scaling": None}
    choices = {
        FULL: LayerConfig(None, RopeConfig.from_hf(values, FULL)),
        SLIDING: LayerConfig(hf.integer("sliding_window"), RopeConfig.from_hf(local, SLIDING)),
    }
    types = hf.layer_types(num_layers) or [SLIDING if (i + 1) % _PATTERN else FULL for i in range(num_layers)]
    return tuple(choices[kind] for kind in types)


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Olmo2Config, or where there is a window Olmo3Config, has beyond the keys of all families."""
    keys = {"hidden_act": config.activation}
    if all(layer.sliding_window is None for layer in config.layers):
        return keys
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **keys, **window_keys(config)}


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """A window makes it an OLMo 3: both are one architecture there."""
    return {**config, "model_type": "olmo3"} if config.get("sliding_window") else config


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    read_config=read_config,
    gguf_arch="olmo2",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**LAYER_NAMES, **NORMS_AFTER_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="Olmo2ForCausalLM",
    hf_keys=hf_keys,
    complete_gguf=complete_gguf,
    gguf_window_pattern=True,
    hf_nested_rope=True,
)

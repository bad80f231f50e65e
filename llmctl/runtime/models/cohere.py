"""The Cohere families: Command R, R+ and Aya (cohere), and Command R7B (cohere2), whose layers alternate between a window with
positions and everything without. Attention and MLP read one norm, and add to the stream together."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import NORM_SHARED, LayerConfig, ModelConfig
from llmctl.runtime.models.family import LAYER_NORM_EPS, Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, SLIDING, rope_of, standard_config, window_keys

_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_PATTERN = 4


def read_cohere(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face CohereConfig → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, **values})
    layers = (LayerConfig(None, rope_of(hf, hf.head_dim())),) * hf.layers()
    return _read(hf, COHERE.name, layers, qk_norm="each" if hf.flag("use_qk_norm") else None)


def read_cohere2(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Cohere2Config → ModelConfig."""
    hf = HfConfig({**_DEFAULTS, "sliding_window": 4096, **values})
    num_layers, pattern = hf.layers(), hf.integer("sliding_window_pattern", _PATTERN)
    types = hf.layer_types(num_layers) or [SLIDING if (i + 1) % pattern else FULL for i in range(num_layers)]
    choices = {FULL: LayerConfig(None, None), SLIDING: LayerConfig(hf.integer("sliding_window"), rope_of(hf, hf.head_dim()))}
    return _read(hf, COHERE2.name, tuple(choices[kind] for kind in types))


def _read(hf: HfConfig, name: str, layers: tuple[LayerConfig, ...], **choices: Any) -> ModelConfig:
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        name,
        layers,
        rms_norm_eps=hf.positive("layer_norm_eps", 1e-5),
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        layer_norm=True,
        parallel=True,
        norms=NORM_SHARED,
        rope_interleaved=True,
        logit_scale=hf.positive("logit_scale", 0.0625),
        **choices,
    )


def cohere_keys(config: ModelConfig) -> dict[str, Any]:
    """What CohereConfig has beyond the keys of all families."""
    keys = {"layer_norm_eps": config.rms_norm_eps, "logit_scale": config.logit_scale}
    return {"hidden_act": config.activation, "use_qk_norm": config.qk_norm is not None, **keys}


def cohere2_keys(config: ModelConfig) -> dict[str, Any]:
    """What Cohere2Config has beyond the keys of all families."""
    return {**cohere_keys(config), **window_keys(config)}


_NAMES = GgufNames(top=TOP_NAMES, layer=LAYER_NAMES, permuted={})
COHERE = Family(
    name="cohere",
    model_types=("cohere",),
    read_config=read_cohere,
    gguf_arch="command-r",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**LAYER_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="CohereForCausalLM",
    hf_keys=cohere_keys,
    eps_keys=("layer_norm_eps", LAYER_NORM_EPS),
    gguf_numbers={"logit_scale": "logit_scale"},
)
COHERE2 = Family(
    name="cohere2",
    model_types=("cohere2",),
    read_config=read_cohere2,
    gguf_arch="cohere2",
    gguf_names=_NAMES,
    hf_class="Cohere2ForCausalLM",
    hf_keys=cohere2_keys,
    eps_keys=("layer_norm_eps", LAYER_NORM_EPS),
    gguf_numbers={"logit_scale": "logit_scale"},
)

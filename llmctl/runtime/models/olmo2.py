"""The olmo2 family: OLMo 2. Norms only after attention and MLP, and one over all query and all key heads together."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import LAYER_NAMES, NORMS_AFTER_NAMES, QK_NORM_NAMES, TOP_NAMES, GgufNames
from llmctl.runtime.models.config import NORMS_AFTER, ModelConfig
from llmctl.runtime.models.family import Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import FULL, rope_of, standard_config, windowed


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face Olmo2Config → ModelConfig."""
    hf = HfConfig({"rms_norm_eps": 1e-5, **values})
    hf.refuse("sliding_window", (), "a window makes it an OLMo 3, which GGUF calls by the same name")
    bias = hf.flag("attention_bias")
    return standard_config(
        hf,
        FAMILY.name,
        windowed([FULL] * hf.layers(), None, rope_of(hf, hf.head_dim())),
        attention_bias=bias,
        attention_out_bias=hf.flag("attention_out_bias", bias),
        qk_norm="all",
        norms=NORMS_AFTER,
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What Olmo2Config has beyond the keys of all families."""
    return {"hidden_act": config.activation}


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    read_config=read_config,
    gguf_arch="olmo2",
    gguf_names=GgufNames(top=TOP_NAMES, layer={**LAYER_NAMES, **NORMS_AFTER_NAMES, **QK_NORM_NAMES}, permuted={}),
    hf_class="Olmo2ForCausalLM",
    hf_keys=hf_keys,
)

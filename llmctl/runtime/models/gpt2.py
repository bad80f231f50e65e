"""The gpt2 family: GPT-2 and models trained like it. Learned positions, LayerNorm, an MLP without a gate, weights stored as
(in_features, out_features)."""

from __future__ import annotations

from typing import Any

from llmctl.runtime.checkpoint.names import GgufNames, HfNames
from llmctl.runtime.models.config import LayerConfig, ModelConfig
from llmctl.runtime.models.family import LAYER_NORM_EPS, Family
from llmctl.runtime.models.hf_config import HfConfig
from llmctl.runtime.models.standard import standard_config

_SPELLING = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
_DEFAULTS = {
    **{"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"max_position_embeddings": 1024, "hidden_act": "gelu_new", "tie_word_embeddings": True},
}
_GELU_NEW, _GELU = "gelu_new", "gelu_pytorch_tanh"  # two names of one function


def read_config(values: dict[str, Any]) -> ModelConfig:
    """Hugging Face GPT2Config → ModelConfig."""
    own = {usual: values[key] for usual, key in _SPELLING.items() if values.get(key) is not None}
    hf = HfConfig({**_DEFAULTS, **values, **own})
    hf.refuse("add_cross_attention", (False,), "it reads what an encoder has made")
    hf.refuse("scale_attn_by_inverse_layer_idx", (False,), "every layer would have a scale of its own")
    activation = hf.text("hidden_act", _GELU_NEW)
    head_dim = hf.head_dim()
    return standard_config(
        HfConfig({**hf.values, "intermediate_size": hf.integer("intermediate_size", 4 * hf.integer("hidden_size"))}),
        FAMILY.name,
        (LayerConfig(None, None),) * hf.layers(),
        rms_norm_eps=hf.positive("rms_norm_eps", 1e-5),
        activation=_GELU if activation == _GELU_NEW else activation,
        attention_scale=head_dim**-0.5 if hf.flag("scale_attn_weights", True) else 1.0,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        fused_qkv=True,
        layer_norm=True,
        norm_bias=True,
        gated_mlp=False,
        learned_positions=True,
    )


def hf_keys(config: ModelConfig) -> dict[str, Any]:
    """What GPT2Config has beyond the keys of all families."""
    activation = _GELU_NEW if config.activation == _GELU else config.activation
    return {
        "hidden_act": activation,
        "n_ctx": config.max_position_embeddings,
        "scale_attn_weights": config.attention_scale != 1.0,
    }


_TOP = {"model.embed_tokens": "wte", "model.embed_positions": "wpe", "model.norm": "ln_f"}
_LAYER = {
    "input_layernorm": "ln_1",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.c_fc": "mlp.c_fc",
    "mlp.c_proj": "mlp.c_proj",
}
_BARE = "transformer."
FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    read_config=read_config,
    gguf_arch="gpt2",
    gguf_names=GgufNames(
        top={
            "model.embed_tokens": "token_embd",
            "model.embed_positions": "position_embd",
            "model.norm": "output_norm",
            "lm_head": "output",
        },
        layer={
            "input_layernorm": "attn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "post_attention_layernorm": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        permuted={},
    ),
    hf_class="GPT2LMHeadModel",
    hf_keys=hf_keys,
    eps_keys=("rms_norm_eps", LAYER_NORM_EPS),
    hf_names=HfNames(
        top={**{ours: _BARE + theirs for ours, theirs in _TOP.items()}, "lm_head": "lm_head"},
        layer=_LAYER,
        layers=_BARE + "h",
        bare=_BARE,
        transposed=frozenset(("self_attn.qkv_proj", "self_attn.o_proj", "mlp.c_fc", "mlp.c_proj")),
    ),
    hf_spelling=_SPELLING,
)

"""The tiny models that conversions in both directions are tried on: name → arguments of the `tiny` fixture."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-multi_query": {"num_key_value_heads": 1},
    "llama-multi_head": {"num_key_value_heads": 6},
    "llama-spm": {"tokenizer": "sentencepiece"},
    **{f"llama-{rope}": {"rope": rope} for rope in ("linear", "llama3", "yarn", "longrope")},
    "mistral": {},
    "mistral-no_window": {"sliding_window": None},
    "gemma3": {},
    "gemma3-untied": {"tie_word_embeddings": False},
    "gemma3-softcap": {"final_logit_softcapping": 1.5},
    "gemma3-bpe": {"tokenizer": "bpe"},
    **{f"gemma3-{rope}": {"rope": rope} for rope in ("linear", "yarn")},
}

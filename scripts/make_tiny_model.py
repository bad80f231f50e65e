#!/usr/bin/env python3
"""Write a tiny random Hugging Face folder (config.json, safetensors, optionally a tokenizer) for tests and experiments.

    python scripts/make_tiny_model.py FOLDER llama --rope yarn --set attention_bias=true
    python scripts/make_tiny_model.py FOLDER gemma3 --tokenizer sentencepiece --dtype float16

The defaults are uneven on purpose (6 query / 2 kv heads, head_dim not hidden/heads, odd layer pattern, a window shorter
than any useful test) and the weights are large enough that every part of the model moves the logits: with transformers'
own initialization attention is nearly uniform, and a wrong rotary table would hide below any tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ORIGINAL_CONTEXT = 32  # what rope scaling counts from: shorter than the test sequences, so that scaling is active
CONTEXT = 128
HEAD_DIM = 32

LLAMA = {
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA3 = {
    "vocab_size": 384,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 24,  # neither head_dim nor hidden/heads
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
PLAIN = {key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias")}
WINDOWED = {**PLAIN, "num_hidden_layers": 4, "sliding_window": 8, "layer_types": ALTERNATING}
QWEN = {**WINDOWED, "use_sliding_window": True}
GEMMA = {key: value for key, value in GEMMA3.items() if key not in ("sliding_window", "layer_types")}
GEMMA1 = {key: value for key, value in GEMMA.items() if "softcapping" not in key and "query" not in key}
# hidden_size / heads, for classes that know no other head_dim
PHI3 = {key: value for key, value in PLAIN.items() if key != "head_dim"} | {"hidden_size": 6 * HEAD_DIM}
MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT // 2},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
LAYER_NORM = {key: value for key, value in PHI3.items() if key != "rms_norm_eps"}
COHERE = {**LAYER_NORM, "num_hidden_layers": 4, "layer_norm_eps": 1e-5, "tie_word_embeddings": True}
DEEPSEEK = {
    **{key: value for key, value in PLAIN.items() if key != "head_dim"},
    **{"num_key_value_heads": 6, "num_hidden_layers": 4, "rms_norm_eps": 1e-6, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 40, "q_lora_rank": 56, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7},
}
MISTRAL = {key: value for key, value in LLAMA.items() if key not in ("attention_bias", "mlp_bias")} | {"sliding_window": 8}
GPT2 = {
    **{"vocab_size": 384, "n_embd": 96, "n_inner": 160, "n_layer": 3, "n_head": 6, "n_positions": CONTEXT},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
MIXTRAL = {**PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN_MOE = {
    **{**PLAIN, "sliding_window": 8, "use_sliding_window": True, "moe_intermediate_size": 64},
    **{"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1]},
}
QWEN2_MOE = {**{key: value for key, value in QWEN_MOE.items() if key != "head_dim"}, "shared_expert_intermediate_size": 96}
GPT_OSS = {
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT},
        **{"beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
    },
}
FAMILIES = {
    "llama": ("LlamaConfig", LLAMA),
    "mistral": ("MistralConfig", MISTRAL),
    "gemma3": ("Gemma3TextConfig", GEMMA3),
    "gemma": ("GemmaConfig", GEMMA1),
    "gemma2": ("Gemma2Config", {**GEMMA3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "qwen2": ("Qwen2Config", {key: value for key, value in QWEN.items() if key != "head_dim"}),
    "qwen3": ("Qwen3Config", QWEN),
    "phi3": ("Phi3Config", {**PHI3, "original_max_position_embeddings": ORIGINAL_CONTEXT, "sliding_window": 24}),
    "smollm3": ("SmolLM3Config", {**LLAMA, "num_hidden_layers": 4}),
    "ministral": ("MinistralConfig", WINDOWED),
    "ministral3": ("Ministral3Config", {**PLAIN, "rope_parameters": MINISTRAL3_ROPE}),
    "olmo2": ("Olmo2Config", {key: value for key, value in PLAIN.items() if key != "head_dim"}),
    "olmo3": ("Olmo3Config", {key: value for key, value in WINDOWED.items() if key != "head_dim"}),
    "granite": (
        "GraniteConfig",
        {
            **{key: value for key, value in LLAMA.items() if key != "head_dim"},
            "attention_multiplier": 0.4,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
        },
    ),
    "glm4": ("Glm4Config", {**PLAIN, "attention_bias": True}),
    "starcoder2": ("Starcoder2Config", {**LAYER_NORM, "norm_epsilon": 1e-5, "sliding_window": 8, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", {**LAYER_NORM, "layer_norm_eps": 1e-5, "use_qkv_bias": True}),
    "cohere": ("CohereConfig", {**COHERE, "logit_scale": 0.7}),
    "cohere2": (
        "Cohere2Config",
        {**COHERE, "sliding_window": 8, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "logit_scale": 0.7},
    ),
    "gpt2": ("GPT2Config", GPT2),
    "gpt_oss": ("GptOssConfig", {**WINDOWED, **GPT_OSS}),
    "deepseek_v2": ("DeepseekV2Config", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3Config", {**DEEPSEEK, "norm_topk_prob": True}),
    "mixtral": ("MixtralConfig", MIXTRAL),
    "qwen2_moe": ("Qwen2MoeConfig", QWEN2_MOE),
    "qwen3_moe": ("Qwen3MoeConfig", QWEN_MOE),
    "exaone4": ("Exaone4Config", {**WINDOWED, "layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
}
DEFAULT_THETA = {"gemma3": 1_000_000.0}  # 10_000 for the others
PARTIAL_ROTARY = {"phi3": 0.75, "glm4": 0.5, "stablelm": 0.25}

# rope type → what its scaling needs, in the spelling of transformers 5 (`rope_parameters`)
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "short_factor": [1.0 + 0.03 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.4 * i for i in range(HEAD_DIM // 2)],
    },
}


# What the little tokenizers are trained on: enough scripts to make merges, byte fallback and spaces all matter.
TRAINING_TEXT = [
    "the house stands where the river turns and the road to the town begins",
    "she said that the answer to the question is in the other house",
    "there are three rivers, seven roads and one hundred and twenty-five houses",
    "das Haus steht dort, wo der Fluss sich wendet",
    "def answer(question):\n    return question + 1\n",
    "北京 上海 東京 résumé naïve 0123456789",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny_model(
    folder: Path,
    family: str,
    *,
    rope: str | dict[str, Any] = "default",
    seed: int = 0,
    dtype: str = "float32",
    tokenizer: str | None = None,
    **choices: Any,
) -> Path:
    """Write a tiny random model as a Hugging Face folder and return the folder.

    folder: made if missing. family: a key of FAMILIES. rope and choices: see `tiny_config`. dtype: float32, float16
    or bfloat16. tokenizer: None, "bpe" (byte-level, tokenizer.json) or "sentencepiece" (tokenizer.model).
    Same arguments, same bytes.
    """
    import torch
    import transformers

    config = tiny_config(family, rope=rope, **choices)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if tokenizer is not None:
        TOKENIZERS[tokenizer](folder, config)
    return folder


def tiny_config(family: str, *, rope: str | dict[str, Any] = "default", **choices: Any):
    """The transformers config of a tiny model.

    family: a key of FAMILIES. rope: a key of ROPES, or the whole rope dictionary; for gemma3 it is the one of the full
    attention layers (the sliding ones keep the default type at theta 10000, as in the real models). choices: fields of
    the config to override; KeyError if the family has no such field.
    """
    import transformers

    class_name, defaults = FAMILIES[family]
    config_class = getattr(transformers, class_name)
    known = {field.name for field in dataclasses.fields(config_class)}
    if unknown := sorted(set(choices) - known):  # the class itself would take any keyword and ignore it
        raise KeyError(f"{class_name} has no field {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    settings = {**defaults, **choices}
    if rope == "dynamic" and "max_position_embeddings" not in choices:
        settings["max_position_embeddings"] = ORIGINAL_CONTEXT  # this type scales beyond the model's own context
    if "layer_types" in defaults and "layer_types" not in choices:
        layers = settings["num_hidden_layers"]
        settings["layer_types"] = (defaults["layer_types"] * layers)[:layers]
    if "rope_parameters" in known:
        settings.setdefault("rope_parameters", _rope_parameters(family, rope))
    return config_class(**settings)


def _rope_parameters(family: str, rope: str | dict[str, Any]) -> dict[str, Any]:
    chosen = {"rope_type": rope, **ROPES[rope]} if isinstance(rope, str) else dict(rope)
    chosen.setdefault("rope_theta", DEFAULT_THETA.get(family, 10_000.0))
    if family in PARTIAL_ROTARY:
        chosen.setdefault("partial_rotary_factor", PARTIAL_ROTARY[family])
        half = int(HEAD_DIM * PARTIAL_ROTARY[family]) // 2
        chosen |= {name: chosen[name][:half] for name in ("short_factor", "long_factor") if name in chosen}
    if family not in ("gemma3", "olmo3"):
        return chosen
    return {"full_attention": chosen, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}


def randomize(model, seed: int) -> None:
    """Fill every parameter from the seed: unit-gain matrices, norm weights spread around one, biases that matter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if name.endswith("norm.weight") or (name.endswith("weight") and (".ln_" in name or "norm.norms." in name)):
                # Gemma's norms multiply by one plus the stored weight and start at zero; the others start at one.
                parameter.copy_(parameter.mean().round() + 0.2 * noise)
            elif parameter.ndim == 2 and "embed_tokens" not in name and not name.endswith("_bias"):
                gain = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "c_attn")) else 1.0
                fan_in = parameter.shape[0 if ".h." in name else 1]  # of GPT-2's modules, which are no Linear
                parameter.copy_(noise * gain / fan_in**0.5)
            elif parameter.ndim == 3 and hasattr(model.config, "swiglu_limit"):
                # (experts, in, out), so large that some numbers are clamped
                parameter.copy_(noise * (4.0 if "gate_up" in name else 0.5) / parameter.shape[1] ** 0.5)
            elif parameter.ndim > 1 and not name.endswith("_bias"):
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # is trained as the parameters are
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))


def _byte_level_tokenizer(folder: Path, config) -> None:
    """tokenizer.json of a GPT-2 style byte-level BPE with ChatML markers, at most vocab_size tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_tokenizer_config(folder, {"tokenizer_class": "PreTrainedTokenizerFast", **special})


def _sentencepiece_tokenizer(folder: Path, config) -> None:
    """tokenizer.model of a SentencePiece BPE with byte fallback, its first ids as Gemma's: pad, eos, bos, unk."""
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for line in TRAINING_TEXT if line.isascii()),  # the rest must fall back to bytes
        model_writer=model,
        model_type="bpe",
        vocab_size=config.vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=1.0,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        control_symbols=["<mask>", "<|im_start|>", "<|im_end|>"],
        pad_id=0,
        eos_id=config.eos_token_id,
        bos_id=config.bos_token_id,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    _write_tokenizer_config(folder, {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True, **special})


def _write_tokenizer_config(folder: Path, content: dict[str, Any]) -> None:
    content["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


TOKENIZERS = {"bpe": _byte_level_tokenizer, "sentencepiece": _sentencepiece_tokenizer}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def main(arguments: list[str] | None = None) -> int:
    """Make one folder from the command line and print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--rope", choices=sorted(ROPES), default="default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--tokenizer", choices=sorted(TOKENIZERS))
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="FIELD=JSON", dest="choices")
    options = parser.parse_args(arguments)
    how = {"rope": options.rope, "seed": options.seed, "dtype": options.dtype, "tokenizer": options.tokenizer}
    print(make_tiny_model(options.folder, options.family, **how, **dict(options.choices)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""From a Hugging Face folder to GGUF: the same model in our runtime and, tensor by tensor, as gguf-py reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import MODELS

from llmctl.errors import FormatError, UnsupportedError
from llmctl.quant.convert import Written
from llmctl.quant.left_out import summary
from llmctl.quant.source import open_source
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.loading import load_model, sampling_defaults

Convert = Callable[..., Written]
Tiny = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("name", MODELS)
def test_the_same_model_comes_back(tiny: Tiny, convert: Convert, logits: Any, tmp_path: Path, name: str) -> None:
    folder = tiny(name.partition("-")[0], **MODELS[name])
    output = convert(folder, tmp_path / "out.gguf", "F32").output
    before, after = load_model(folder), load_model(output)
    assert before.tokenizer is not None
    assert after.tokenizer is not None
    np.testing.assert_allclose(logits(output), logits(folder), rtol=0, atol=2e-6)
    assert after.context_length == before.context_length
    assert after.eos_token_ids == before.eos_token_ids
    assert after.tokenizer.chat_templates == before.tokenizer.chat_templates
    assert after.tokenizer.named_special == before.tokenizer.named_special
    for text in ("the house in 北京", "<|im_start|>user\n12 é"):
        assert after.tokenizer.encode(text, parse_special=True) == before.tokenizer.encode(text, parse_special=True)


def by_gguf_py(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors as float32 and metadata, read by the reference reader."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return tensors, {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order for rotary weights, written out element by element."""
    size = weight.shape[0] // heads
    rows = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in range(2)]
    return weight[rows]


def test_llama_in_another_reader(tiny: Tiny, convert: Convert, tmp_path: Path) -> None:
    folder = tiny("llama", attention_bias=True)
    tensors, metadata = by_gguf_py(convert(folder, tmp_path / "out.gguf").output)
    source = load_file(folder / "model.safetensors")
    attention = "model.layers.2.self_attn."
    for kind in ("weight", "bias"):
        np.testing.assert_array_equal(tensors[f"blk.2.attn_q.{kind}"], interleaved(source[f"{attention}q_proj.{kind}"], 6))
        np.testing.assert_array_equal(tensors[f"blk.2.attn_k.{kind}"], interleaved(source[f"{attention}k_proj.{kind}"], 2))
        np.testing.assert_array_equal(tensors[f"blk.2.attn_v.{kind}"], source[f"{attention}v_proj.{kind}"])
    np.testing.assert_array_equal(tensors["blk.2.ffn_norm.weight"], source["model.layers.2.post_attention_layernorm.weight"])
    np.testing.assert_array_equal(tensors["output.weight"], source["lm_head.weight"])
    assert len(tensors) == len(source)
    assert list(tensors)[:3] == ["token_embd.weight", "blk.0.attn_norm.weight", "blk.0.attn_q.weight"]
    assert list(tensors)[-2:] == ["output_norm.weight", "output.weight"]
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.basename": "tiny-llama",
        "general.file_type": 0,
        "general.quantization_version": 2,
        "llama.block_count": 3,
        "llama.context_length": 128,
        "llama.embedding_length": 96,
        "llama.feed_forward_length": 160,
        "llama.attention.head_count": 6,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.rope.dimension_count": 32,
        "llama.vocab_size": 384,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: metadata[key] for key in expected} == expected
    assert len(metadata["tokenizer.ggml.tokens"]) == 384


def test_gemma3_in_another_reader(tiny: Tiny, convert: Convert, tmp_path: Path) -> None:
    folder = tiny("gemma3", dtype="float16")
    tensors, metadata = by_gguf_py(convert(folder, tmp_path / "out.gguf").output)
    source = load_file(folder / "model.safetensors")
    names = {
        "attn_norm": "input_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    for gguf_name, name in names.items():
        expected = source[f"model.layers.3.{name}.weight"].astype(np.float32) + 1
        np.testing.assert_array_equal(tensors[f"blk.3.{gguf_name}.weight"], expected)
    q_proj = source["model.layers.3.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(tensors["blk.3.attn_q.weight"].astype(np.float16), q_proj)
    assert "output.weight" not in tensors
    assert metadata["general.file_type"] == 1
    assert (metadata["gemma3.attention.sliding_window"], metadata["gemma3.rope.freq_base_swa"]) == (8, 10000)
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == ("llama", "default")


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("pure", [False, True])
def test_blocks_are_those_of_gguf_py(tiny: Tiny, convert: Convert, tmp_path: Path, type_name: str, pure: bool) -> None:
    folder = tiny("gemma3")
    output = convert(folder, tmp_path / "out.gguf", type_name, pure=pure).output
    source, names = load_file(folder / "model.safetensors"), open_source(folder).tensors
    checked = 0
    for tensor in gguf.GGUFReader(output).tensors:
        origin = next(one.origin for one in names if one.name == tensor.name)
        if "norm" in tensor.name:
            assert tensor.tensor_type.name == "F32"
            continue
        expected = "Q8_0" if tensor.name == "token_embd.weight" and not pure else type_name
        assert tensor.tensor_type.name == expected
        blocks = gguf.quants.quantize(source[origin], gguf.GGMLQuantizationType[expected])
        assert tensor.data.tobytes() == blocks.tobytes()
        checked += 1
    assert checked == 7 * 7 + 1


def test_a_tied_head_is_written_once(tiny: Tiny, changed: Any, convert: Convert, logits: Any, tmp_path: Path) -> None:
    """Also where the folder stores it twice; a stored head that is another is neither dropped nor taken."""
    plain = convert(tiny("llama", tie_word_embeddings=True), tmp_path / "tied.gguf").output
    head = load_file(tiny("llama", tie_word_embeddings=True) / "model.safetensors")["model.embed_tokens.weight"]
    twice = changed("llama", {"lm_head.weight": head}, tie_word_embeddings=True)
    output = convert(twice, tmp_path / "twice.gguf").output
    assert "output.weight" not in open_checkpoint(output)
    np.testing.assert_array_equal(logits(output), logits(plain))
    weights = load_file(twice / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"] * 2
    save_file(weights, twice / "model.safetensors")
    with pytest.raises(FormatError, match=r"says tie_word_embeddings, but lm_head\.weight differs"):
        open_source(twice)


ODD_VALUES = np.array([1e5, 1e-40, -0.0, np.nan, -np.inf, 3e38, 1.0, -1e-3], np.float32).astype(ml_dtypes.bfloat16)


def bf16_folder(changed: Any) -> tuple[Path, np.ndarray]:
    """A bfloat16 folder with values float16 has no room for, and the tensor they are in."""
    folder = changed("llama", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weight = weights[UP].copy()
    weight[3, :8] = ODD_VALUES
    save_file(weights | {UP: weight}, folder / "model.safetensors")
    return folder, weight


def test_by_default_the_type_is_kept_bit_by_bit(changed: Any, convert: Convert, tmp_path: Path) -> None:
    """Whatever float16 could not hold; NaN is copied, but not without a word."""
    folder, weight = bf16_folder(changed)
    written = convert(folder, tmp_path / "out.gguf")
    with open_checkpoint(written.output) as checkpoint:
        assert checkpoint.read("blk.1.ffn_up.weight").tobytes() == weight.tobytes()
        assert checkpoint.metadata["general.file_type"] == 32
        assert checkpoint.entry("blk.1.ffn_norm.weight").format.name == "F32"
    assert written.warnings == [f"tensor '{UP}' (blk.1.ffn_up.weight) holds NaN or infinity (row 3, column 3), copied as it is"]


def test_widening_keeps_nan_with_a_warning(changed: Any, convert: Convert, tmp_path: Path) -> None:
    folder, _ = bf16_folder(changed)
    assert [text for text in convert(folder, tmp_path / "out.gguf", "F32").warnings if "NaN" in text] == [
        f"tensor '{UP}' (blk.1.ffn_up.weight) holds NaN or infinity (row 3, column 3), copied as it is"
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [(1e5, "99840 in row 3, column 0 does not fit F16"), (np.nan, "nan in row 3, column 0"), (np.inf, "inf in row 3")],
)
def test_values_that_do_not_fit_name_their_tensor(
    changed: Any, convert: Convert, tmp_path: Path, value: float, message: str
) -> None:
    folder = changed("llama", dtype="bfloat16")
    weights = load_file(folder / "model.safetensors")
    weight = weights[UP].copy()
    weight[3, 0] = value
    save_file(weights | {UP: weight}, folder / "model.safetensors")
    with pytest.raises(FormatError, match=rf"'{UP}' \(blk\.1\.ffn_up\.weight\): .*({message})"):
        convert(folder, tmp_path / "out.gguf", "F16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed"]


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_quantizing_refuses_what_is_not_finite_everywhere(changed: Any, convert: Convert, tmp_path: Path, name: str) -> None:
    """Also in tensors that are only copied."""
    weight = load_file(changed("llama") / "model.safetensors")[name]
    weight[..., 2] = np.inf
    save_file(load_file(tmp_path / "changed" / "model.safetensors") | {name: weight}, tmp_path / "changed" / "model.safetensors")
    with pytest.raises(FormatError, match=f"'{name}'"):
        convert(tmp_path / "changed", tmp_path / "out.gguf", "Q4_0", strict=True)
    assert not (tmp_path / "out.gguf").exists()


def test_float64_becomes_float32(changed: Any, convert: Convert, tmp_path: Path) -> None:
    weight = load_file(changed("llama") / "model.safetensors")[UP].astype(np.float64)
    save_file(load_file(tmp_path / "changed" / "model.safetensors") | {UP: weight}, tmp_path / "changed" / "model.safetensors")
    output = convert(tmp_path / "changed", tmp_path / "out.gguf").output
    assert open_checkpoint(output).entry("blk.1.ffn_up.weight").format.name == "F32"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({UP: None}, FormatError, f"tensor '{UP}' is missing"),
        ({UP: np.zeros((96, 160), np.float32)}, FormatError, f"tensor '{UP}' has shape"),
        ({UP: np.zeros((160, 96), np.int8)}, UnsupportedError, f"tensor '{UP}' holds I8 numbers"),
        ({UP: np.zeros((160, 96), ml_dtypes.float8_e4m3fn)}, UnsupportedError, f"tensor '{UP}' holds F8_E4M3 numbers"),
        ({UP.replace("weight", "bias"): np.zeros(160, np.float32)}, FormatError, r"up_proj\.bias' has no place"),
        ({f"{UP}_scale": np.array(2.0, np.float32)}, FormatError, r"up_proj\.weight_scale' has no place"),
    ],
)
def test_tensors_that_are_not_as_the_config_says(changed: Any, tensors: dict[str, Any], error: type, message: str) -> None:
    """Found before anything is written; a scale is never dropped."""
    with pytest.raises(error, match=message):
        open_source(changed("llama", tensors))


def test_parts_beside_the_text_model_are_left_out_by_name(changed: Any) -> None:
    extra = ("vision_tower.blocks.0.weight", "multi_modal_projector.norm.weight", "model.layers.3.eh_proj.weight", "mtp.a.weight")
    source = open_source(changed("llama", {name: np.zeros((2, 2), np.float32) for name in extra}))
    assert sorted(source.left_out) == sorted(extra)
    assert summary(["vision_tower.a", "vision_tower.b", "model.layers.3.x.weight"]) == (
        "vision_tower (2 tensors), model.layers.3 (1 tensor)"
    )


def test_unknown_tensors_are_refused(changed: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'extra.weight' has no place in a llama model, and is none that can be"):
        open_source(changed("llama", {"extra.weight": np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.router.weight", "model.layers.1.self_attn.q_norm.weight"])
def test_parts_of_a_layer_that_the_config_does_not_describe_are_refused(changed: Any, name: str) -> None:
    with pytest.raises(FormatError, match=rf"tensor '{name}' has no place in the model its config describes"):
        open_source(changed("llama", {name: np.zeros((2, 2), np.float32)}))


@pytest.mark.parametrize(
    ("family", "choices", "message"),
    [
        ("llama", {"hidden_act": "gelu_pytorch_tanh"}, "no key for activation = gelu_pytorch_tanh .* reader would take silu"),
        ("gemma3", {"query_pre_attn_scalar": 24}, "no key for attention_scale"),
        ("qwen2_moe", {"tokenizer": "bpe"}, r"no key for experts\.renormalize = True of .* reader would take False"),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, "no key for sliding_window = None in layer 0"),
    ],
)
def test_what_gguf_cannot_say_is_refused(tiny: Tiny, family: str, choices: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_source(tiny(family, **choices))


def test_dynamic_rope_is_said_to_be_lost(tiny: Tiny) -> None:
    assert open_source(tiny("llama", rope="dynamic")).warnings == [
        "GGUF has no key for dynamic rope scaling: beyond 32 tokens readers will not scale"
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "weights quantized with 'bitsandbytes'"),
    ],
)
def test_models_that_cannot_be_read(changed: Any, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        open_source(changed("llama", config=config))


def test_sampling_defaults_go_along(changed: Any, convert: Convert, tmp_path: Path) -> None:
    folder = changed("llama")
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.25, "do_sample": true}', "utf-8"
    )
    output = convert(folder, tmp_path / "out.gguf").output
    expected = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "repetition_penalty": 1.25}
    assert sampling_defaults(open_checkpoint(output)) == sampling_defaults(open_checkpoint(folder)) == expected


def test_a_rule_the_user_vouches_for_is_written_with_the_difference_said(tiny: Tiny) -> None:
    source = open_source(tiny("llama"), pre="bloom")
    assert source.metadata["tokenizer.ggml.pre"] == "bloom"
    assert len(source.warnings) == 1
    assert source.warnings[0].startswith("with the tokenizer written, ")
    with pytest.raises(UnsupportedError, match="--pre is for byte-level BPE"):
        open_source(tiny("gemma3"), pre="bloom")

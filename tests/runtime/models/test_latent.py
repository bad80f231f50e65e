"""Latent attention: kv_b_proj taken apart and put together, files of before it was stored in two, what the cache keeps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_tiny_model import make_tiny_model, tiny_config
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.convert import make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.runtime.cache.memory import LayerShape, bytes_per_token
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.deepseek import complete_gguf, read_config
from llmctl.runtime.models.latent_parts import join_parts, parts_of, whole_name

IDS = np.random.default_rng(3).integers(3, 384, 30).tolist()
WHOLE = "model.layers.1.self_attn.kv_b_proj.weight"
KEYS, VALUES = WHOLE.replace("kv_b", "k_b"), WHOLE.replace("kv_b", "v_b")
CONFIG = read_config({**tiny_config("deepseek_v3").to_dict(), "kv_lora_rank": 64})
ROWS = 6 * (24 + 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", "deepseek_v2", tokenizer="bpe")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """The folder as GGUF in today's form."""
    path = folder.parent / "model.gguf"
    write(make_plan(open_source(folder), recipe_by_name("F32")), path)
    return path


def test_parts_are_the_rows_of_every_head() -> None:
    whole = np.random.default_rng(0).standard_normal((ROWS, 64), dtype=np.float32)
    parts = parts_of(WHOLE, CONFIG)
    keys, values = parts[KEYS].take(whole), parts[VALUES].take(whole)
    assert (keys.shape, values.shape) == ((6, 64, 24), (6, 20, 64))
    np.testing.assert_array_equal(keys[2], whole[2 * 44 : 2 * 44 + 24].T)
    np.testing.assert_array_equal(values[2], whole[2 * 44 + 24 : 3 * 44])
    np.testing.assert_array_equal(join_parts(keys, values), whole)
    assert {whole_name(KEYS), whole_name(VALUES), whole_name(WHOLE)} == {WHOLE}


def test_values_stay_as_they_are_quantized_and_keys_are_unfolded() -> None:
    stored = quantize(np.random.default_rng(0).standard_normal((ROWS, 64), dtype=np.float32), FORMATS["Q8_0"])
    parts = parts_of(WHOLE, CONFIG)
    values = parts[VALUES].take(stored)
    assert isinstance(values, QuantTensor)
    assert values.format.name == "Q8_0"
    np.testing.assert_array_equal(dequantize(values), parts[VALUES].take(dequantize(stored)))
    np.testing.assert_array_equal(parts[KEYS].take(stored), parts[KEYS].take(dequantize(stored)))


def test_another_shape_is_named() -> None:
    with pytest.raises(FormatError, match=r"kv_b_proj.weight' has shape \(263, 64\), the config asks for \(264, 64\)"):
        parts_of(WHOLE, CONFIG)[KEYS].take(np.zeros((ROWS - 1, 64), np.float32))


def test_another_shape_is_named_with_its_file(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, WHOLE: np.ascontiguousarray(tensors[WHOLE].T)}, file)
    with pytest.raises(FormatError, match=rf"{tmp_path}/model: tensor '{WHOLE}' has shape"):
        load_model(tmp_path / "model")


def test_files_of_before_kv_b_was_stored_in_two(file: Path, tmp_path: Path) -> None:
    """Their sizes are those of the heads before absorption."""
    old = tmp_path / "old.gguf"
    with open_checkpoint(file) as source:
        metadata = {k: v for k, v in source.typed_metadata().items() if not k.endswith("_mla")}
        for key, value in (("key_length", 40), ("value_length", 20), ("head_count_kv", 6)):
            metadata[f"deepseek2.attention.{key}"] = Typed(value, ValueType.U32)
        tensors = {name: source.read(name) for name in source.names()}
        for name in [name for name in tensors if "attn_k_b" in name]:
            whole = join_parts(tensors.pop(name), tensors.pop(name.replace("k_b", "v_b")))
            tensors[name.replace("k_b", "kv_b")] = np.ascontiguousarray(whole)
        _write(old, metadata, tensors)
    assert compute_logits(load_model(old), IDS) == pytest.approx(compute_logits(load_model(file), IDS), abs=1e-6)


def _write(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    with GgufWriter(path, metadata) as writer:
        for name, tensor in tensors.items():
            writer.declare(name, FORMATS["F32"], tensor.shape)
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def test_yarn_that_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    path = make_tiny_model(tmp_path / "model", "deepseek_v3", tokenizer="bpe", rope=rope)
    with pytest.raises(UnsupportedError, match="yarn without mscale_all_dim"):
        open_source(path)


def test_groups_that_llama_cpp_takes_otherwise_are_said(folder: Path) -> None:
    assert any("llama.cpp values a group of experts by its two best" in warning for warning in open_source(folder).warnings)


def test_a_file_without_sizes_is_named() -> None:
    with pytest.raises(FormatError, match=r"has no deepseek2\.attention\.key_length, or no deepseek2\.rope"):
        complete_gguf({"qk_rope_head_dim": 16})


SIZES = {"qk_rope_head_dim": 16, "qk_head_dim": 40, "v_head_dim": 20, "num_experts": 8}


@pytest.mark.parametrize(("key", "value"), [("gating", 3), ("gating", True), ("temperature", 0.1)])
def test_relatives_of_the_same_architecture_are_refused(key: str, value: float) -> None:
    with pytest.raises(UnsupportedError, match=f"deepseek2.* = {value} is not supported"):
        complete_gguf({**SIZES, key: value})


@pytest.mark.parametrize("stated", [{}, {"routed_scaling_factor": 0}])
def test_weights_that_no_key_scales_are_not_scaled(stated: dict[str, Any]) -> None:
    """A config.json without the factor means the 2.5 of its class, a GGUF file means none."""
    assert complete_gguf({**SIZES, "gating": 2, **stated})["routed_scaling_factor"] == 1.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not supported"),
        (
            {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": True},
            "norm_topk_prob = True is not supported",
        ),
    ],
)
def test_what_the_class_does_not_do_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        read_config({**tiny_config("deepseek_v3").to_dict(), "topk_method": "noaux_tc", **change})


def test_the_cache_keeps_one_latent_and_one_rotated_key_a_token() -> None:
    layers = CONFIG.kv_layers()
    assert layers == (LayerShape(1, 64 + 16, None, 64),) * 4
    assert bytes_per_token(layers, "f16") == 4 * 80 * 2
    deepseek_v3 = [LayerShape(1, 576, None, 512)] * 61
    assert bytes_per_token(deepseek_v3, "bf16") == 61 * 576 * 2
    assert bytes_per_token(deepseek_v3, "q8_0") == 61 * 576 // 32 * 34

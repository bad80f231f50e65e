"""Packed checkpoints run as they are: on both backends the same model as their values in a plain folder."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from make_packed_model import Choices, make_packed_model, save
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file

from llmctl.errors import FormatError, OutOfMemoryError
from llmctl.runtime import loading
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.file_types import file_type
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model, open_model
from llmctl.runtime.machine import Memory

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
IDS = np.random.default_rng(3).integers(3, 250, 40).tolist()
CASES = {
    "gptq": Choices("gptq", 4, 64),
    "gptq-order": Choices("gptq", 4, 32, act_order=True),
    "gptq-order-asymmetric": Choices("gptq_v2", 8, 64, symmetric=False, act_order=True),
    "gptq-3-bits": Choices("gptq", 3, 32, act_order=True),
    "gptq-half-a-group": Choices("gptq", 4, 128),
    "gptq-small-groups": Choices("gptq", 4, 16),
    "awq": Choices("awq", 4, 32, symmetric=False),
    "compressed-tensors": Choices("compressed-tensors", 4, 32, symmetric=False),
    "compressed-tensors-bytes": Choices("compressed-tensors-int8", 8, -1),
    "fp8": Choices("fp8", scales="block"),
    "mxfp4": Choices("mxfp4"),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", "llama", tokenizer="bpe", tie_word_embeddings=False, **SIZES)


def logits(path: Path, backend: str, **choices: str) -> np.ndarray:
    return np.array(compute_logits(load_model(path, backend=backend, threads=1, **choices), IDS))


@pytest.mark.parametrize("name", CASES)
def test_the_same_logits_as_its_values(tiny: Path, tmp_path: Path, name: str) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", CASES[name], values=tmp_path / "values")
    expected = logits(tmp_path / "values", "reference")
    assert np.array_equal(logits(packed, "reference"), expected)
    largest = np.abs(expected).max()
    assert np.abs(logits(packed, "native", activations="float", kv_type="f32") - expected).max() <= 1e-5 * largest
    rounded = logits(packed, "native")  # activations too
    assert np.linalg.norm(rounded - expected) <= 0.1 * np.linalg.norm(expected)


def test_float8_of_latent_attention_and_experts(tmp_path: Path) -> None:
    """As DeepSeek V3 comes: a scale for every 128 x 128 weights, also of kv_b_proj, which is taken apart when it is read."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "qk_nope_head_dim": 32, "v_head_dim": 40, "kv_lora_rank": 160}
    tiny = make_tiny_model(tmp_path / "tiny", "deepseek_v3", tokenizer="bpe", **sizes)
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("fp8", scales="block"), values=tmp_path / "values")
    expected = logits(tmp_path / "values", "reference")
    assert np.array_equal(logits(packed, "reference"), expected)
    assert np.abs(logits(packed, "native", activations="float", kv_type="f32") - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("layout", ["gptq", "compressed-tensors"])
def test_a_quantized_head(tiny: Path, tmp_path: Path, layout: str) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", Choices(layout, 4, 32, head=True), values=tmp_path / "values")
    assert np.array_equal(logits(packed, "reference"), logits(tmp_path / "values", "reference"))


def test_what_is_unpacked_is_said_with_its_memory(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("fp8"))
    with caplog.at_level(logging.WARNING):
        load_model(packed, backend="native", threads=1)
    assert "no kernel reads F8_E4M3 as it is stored here: unpacked to float32, exactly" in caplog.text
    assert " MB of memory" in caplog.text


def test_nothing_is_said_of_what_kernels_read(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("gptq", 3, 32, act_order=True))
    load_model(packed, backend="native", threads=1)
    assert "unpacked" not in caplog.text


def test_memory_is_that_of_the_codes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits a weight fit where float32 does not."""
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("gptq", 4, 64))
    with open_checkpoint(packed) as checkpoint:
        assert checkpoint.total_elements == sum(weight.size for weight in load_file(tiny / "model.safetensors").values())
        assert file_type(checkpoint) == "INT4"
        room = 2 * checkpoint.total_bytes
        assert room < 4 * checkpoint.total_elements
    monkeypatch.setattr(loading, "memory", lambda: Memory(total=room, available=room, limit=None))
    open_model(packed, backend="native")
    with pytest.raises(OutOfMemoryError, match="in float32"):
        open_model(packed, backend="reference")


def test_damage_found_while_loading_names_the_tensor(tiny: Path, tmp_path: Path) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("gptq", 4, 64, act_order=True))
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.g_idx"
    tensors[name] = tensors[name] + 1
    save(tensors, packed / "model.safetensors")
    with pytest.raises(FormatError, match=r"down_proj.g_idx' puts column \d+ into group 3, expected 0 to 2"):
        load_model(packed, backend="native", threads=1)


def test_another_shape_than_the_config_says(tiny: Path, tmp_path: Path) -> None:
    packed = make_packed_model(tiny, tmp_path / "packed", Choices("gptq", 4, 32))
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "intermediate_size": 224}))
    with pytest.raises(FormatError, match=r"mlp.gate_proj.weight' has shape \(192, 128\), the config asks for \(224, 128\)"):
        load_model(packed, backend="native", threads=1)

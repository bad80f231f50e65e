"""GPT-2's own spelling: names with and without a prefix, buffers beside the weights, matrices stored the other way round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import UsageError
from llmctl.quant.convert import make_plan, write
from llmctl.quant.lora import Adapter
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model

IDS = np.random.default_rng(3).integers(3, 384, 20).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("gpt2") / "model", "gpt2", tokenizer="bpe")


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_names_of_old_files(folder: Path, tmp_path: Path, backend: str) -> None:
    """The first files had no `transformer.` before their names, and the mask of every layer beside its weights."""
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    tensors = load_file(folder / "model.safetensors")
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.attn.c_attn.weight" in named
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 128, 128), np.float32)) for i in range(3)}
    save_file({**named, **masks}, old / "model.safetensors")
    expected = compute_logits(load_model(folder, backend=backend), IDS)
    np.testing.assert_array_equal(compute_logits(load_model(old, backend=backend), IDS), expected)


def test_a_folder_written_has_their_names_and_keys(folder: Path, tmp_path: Path) -> None:
    file, back = tmp_path / "model.gguf", tmp_path / "back"
    write(make_plan(open_source(folder), recipe_by_name("F32")), file)
    write_folder(plan_folder(file), back)
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in before.items()} == {name: t.tobytes() for name, t in after.items()}
    config = json.loads((back / "config.json").read_text("utf-8"))
    assert (config["n_embd"], config["n_inner"], config["n_positions"]) == (96, 160, 128)
    assert config["activation_function"] == "gelu_new"
    assert not {"hidden_size", "rope_theta", "rms_norm_eps"} & set(config)


def test_a_folder_of_quantized_weights_can_be_written(folder: Path, tmp_path: Path) -> None:
    """Rows of blocks are columns of the folder's matrices."""
    file, back = tmp_path / "model.gguf", tmp_path / "back"
    write(make_plan(open_source(folder), recipe_by_name("Q8_0")), file)
    write_folder(plan_folder(file, "F32"), back)
    np.testing.assert_array_equal(compute_logits(load_model(back), IDS), compute_logits(load_model(file), IDS))


def test_an_adapter_names_their_modules(folder: Path, tmp_path: Path) -> None:
    rng, rank = np.random.default_rng(0), 2
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rank, 96), (288, rank)))
    module = "base_model.model.transformer.h.1.attn.c_attn"
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["c_attn"], "layers_to_transform": [1]}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": True}), "utf-8")
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    write_folder(plan_folder(folder, adapters=[Adapter(adapter)]), tmp_path / "merged")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "merged"))
    name = "transformer.h.1.attn.c_attn.weight"
    np.testing.assert_allclose(after[name], before[name] + (b @ a).T, atol=1e-6)
    assert all(np.array_equal(after[other], before[other]) for other in before if other != name)


def test_no_context_beyond_the_learned_positions(folder: Path) -> None:
    with pytest.raises(UsageError, match="128 tokens"):
        load_model(folder, ctx_size=129)

"""gpt-oss as it is published: experts in MXFP4, in folders and in GGUF files, run without being unfolded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from make_packed_model import mxfp4_tensors
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError
from llmctl.quant.convert import make_plan, write
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.weights import ModelWeights

IDS = np.random.default_rng(3).integers(3, 384, 40).tolist()
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with MXFP4 experts, and one with the same values in plain numbers."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    plain = make_tiny_model(folder / "plain", "gpt_oss", tokenizer="bpe")
    shutil.copytree(plain, folder / "mxfp4")
    values = load_file(plain / "model.safetensors")
    packed = dict(values)
    for name in [name for name in values if name.endswith(STACKS)]:
        tensors, rounded = mxfp4_tensors(np.ascontiguousarray(packed.pop(name).swapaxes(1, 2)))
        values[name] = np.ascontiguousarray(rounded.swapaxes(1, 2))
        packed |= {f"{name}_{suffix.removeprefix('weight_')}": tensor for suffix, tensor in tensors.items()}
    save_file(values, plain / "model.safetensors")
    save_file(packed, folder / "mxfp4" / "model.safetensors")
    config = json.loads((plain / "config.json").read_text("utf-8"))
    (folder / "mxfp4" / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return {"plain": plain, "mxfp4": folder / "mxfp4"}


@pytest.fixture(scope="module")
def file(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with MXFP4 experts as a GGUF file, its types kept."""
    path = tmp_path_factory.mktemp("file") / "model.gguf"
    write(make_plan(open_source(folders["mxfp4"]), None), path)
    return path


def test_experts_are_read_as_they_are_stored(folders: dict[str, Path], file: Path) -> None:
    for path in (folders["mxfp4"], file):
        weights = ModelWeights(open_checkpoint(path))
        stored = [weights.stored(f"model.layers.1.mlp.experts.3.{side}_proj.weight") for side in ("gate", "up", "down")]
        assert [weight.form for weight in stored] == ["MXFP4"] * 3
        assert [weight.shape for weight in stored] == [(160, 96), (160, 96), (96, 160)]
        assert [weight.nbytes for weight in stored] == [160 * 3 * 17, 160 * 3 * 17, 96 * 5 * 17]


def test_the_file_has_the_names_and_types_that_llama_cpp_reads(file: Path) -> None:
    checkpoint = open_checkpoint(file)
    entries = {entry.name: (entry.format.name, entry.shape) for entry in checkpoint.entries() if entry.name.startswith("blk.2.")}
    assert entries["blk.2.ffn_gate_exps.weight"] == entries["blk.2.ffn_up_exps.weight"] == ("MXFP4", (4, 160, 96))
    assert entries["blk.2.ffn_down_exps.weight"] == ("MXFP4", (4, 96, 160))
    assert entries["blk.2.ffn_gate_exps.bias"] == ("F32", (4, 160))
    assert entries["blk.2.ffn_gate_inp.weight"][0] == entries["blk.2.ffn_gate_inp.bias"][0] == "F32"
    assert entries["blk.2.attn_sinks.weight"] == ("F32", (6,))
    assert "blk.2.post_attention_norm.weight" in entries
    metadata = {key: checkpoint.metadata[f"gpt-oss.{key}"] for key in ("expert_feed_forward_length", "attention.sliding_window")}
    assert metadata == {"expert_feed_forward_length": 160, "attention.sliding_window": 8}


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("kind", ["mxfp4", "file"])
def test_logits_are_those_of_the_same_values(folders: dict[str, Path], file: Path, kind: str, backend: str) -> None:
    choices = {"backend": "native", "activations": "float", "kv_type": "f32", "threads": 1} if backend == "native" else {}
    expected = compute_logits(load_model(folders["plain"]), IDS)
    model = load_model({**folders, "file": file}[kind], **choices)
    np.testing.assert_allclose(compute_logits(model, IDS), expected, atol=2e-4 * np.std(expected), rtol=0)


def test_a_folder_made_of_the_file_has_the_values(folders: dict[str, Path], file: Path, tmp_path: Path) -> None:
    write_folder(plan_folder(file, "F32"), tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folders["plain"], tmp_path / "back"))
    assert after.keys() == before.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)


def test_a_stack_of_another_number_of_experts(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["mxfp4"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text("utf-8"))
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_local_experts": 5}), "utf-8")
    with pytest.raises(FormatError, match="expected 5 experts"):
        load_model(tmp_path / "model")

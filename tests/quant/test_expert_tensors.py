"""Experts in files of every kind: one tensor each, one of all, halves of one; to GGUF and back with the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_packed_model import Choices, make_packed_model
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, UnsupportedError
from llmctl.quant.convert import make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.weights import ModelWeights

IDS = [5, 9, 300, 17, 4, 88]
GGUF_CHOICES = {
    "mixtral": {},
    "qwen2_moe": {"norm_topk_prob": False, "use_sliding_window": False, "mlp_only_layers": []},
    "qwen3_moe": {"use_sliding_window": False, "mlp_only_layers": []},
}


def tiny(path: Path, family: str, **options: object) -> Path:
    return make_tiny_model(path, family, tokenizer="bpe", **GGUF_CHOICES[family], **options)


def converted(folder: Path, file: Path, recipe: str = "auto") -> Path:
    write(make_plan(open_source(folder), recipe_by_name(recipe)), file)
    return file


def logits(path: Path) -> np.ndarray:
    return compute_logits(load_model(path), IDS)


def same_tensors(left: Path, right: Path) -> bool:
    one, other = (load_file(next(path.glob("*.safetensors"))) for path in (left, right))
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", GGUF_CHOICES)
def test_the_keys_and_names_are_llama_cpps(tmp_path: Path, family: str) -> None:
    file = converted(tiny(tmp_path / "model", family), tmp_path / "model.gguf")
    with open_checkpoint(file) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        arch = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe"}[family]
        assert checkpoint.metadata["general.architecture"] == arch
        found = {key: value for key, value in checkpoint.metadata.items() if ".expert" in key}
        count, used = (6, 2) if family == "mixtral" else (8, 3)
        size = 160 if family == "mixtral" else 64
        expected = {f"{arch}.expert_count": count, f"{arch}.expert_used_count": used}
        if family != "mixtral":
            expected[f"{arch}.expert_feed_forward_length"] = size
        if family == "qwen2_moe":
            expected[f"{arch}.expert_shared_feed_forward_length"] = 96
            assert checkpoint.entry("blk.0.ffn_gate_inp_shexp.weight").shape == (96,)
        assert found == expected
        assert checkpoint.entry("blk.1.ffn_gate_exps.weight").shape == (count, size, 96)
        assert checkpoint.entry("blk.1.ffn_down_exps.weight").shape == (count, 96, size)
        assert checkpoint.entry("blk.1.ffn_gate_inp.weight").format.name == "F32"


@pytest.mark.parametrize("family", GGUF_CHOICES)
def test_to_gguf_and_back_with_the_same_bytes(tmp_path: Path, family: str) -> None:
    folder = tiny(tmp_path / "model", family)
    write_folder(plan_folder(converted(folder, tmp_path / "model.gguf")), tmp_path / "back")
    assert same_tensors(folder, tmp_path / "back")


def fuse(folder: Path) -> None:
    """The folder's experts as transformers 5 holds them: gate above up, all experts of a layer in one tensor."""
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    if any("block_sparse_moe" in name for name in tensors):
        tensors = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
        names = {"gate": "w1", "up": "w3", "down": "w2"}
    count = 1 + max(int(name.split(".experts.")[1].split(".")[0]) for name in tensors if ".experts." in name)
    for prefix in {name.split(".experts.")[0] for name in tensors if ".experts." in name}:
        sides = {
            side: np.stack([tensors.pop(f"{prefix}.experts.{e}.{name}.weight") for e in range(count)])
            for side, name in names.items()
        }
        tensors[f"{prefix}.experts.gate_up_proj"] = np.concatenate([sides["gate"], sides["up"]], axis=1)
        tensors[f"{prefix}.experts.down_proj"] = sides["down"]
    save_file(tensors, file)


@pytest.mark.parametrize("family", GGUF_CHOICES)
def test_a_folder_with_all_experts_in_one_tensor(tmp_path: Path, family: str) -> None:
    folder = tiny(tmp_path / "model", family)
    expected = logits(folder)
    plain = converted(folder, tmp_path / "plain.gguf").read_bytes()
    fuse(folder)
    np.testing.assert_array_equal(logits(folder), expected)
    native = compute_logits(load_model(folder, backend="native", threads=1, activations="float", kv_type="f32"), IDS)
    np.testing.assert_allclose(native, expected, atol=2e-4 * expected.std())
    assert converted(folder, tmp_path / "fused.gguf").read_bytes() == plain


def test_experts_of_another_number_are_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", "qwen3_moe")
    fuse(folder)
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = tensors[name][:-1]
    save_file(tensors, file)
    with pytest.raises(FormatError, match=r"experts\.down_proj' has shape \(7, 96, 64\), expected 8 experts"):
        load_model(folder)


def test_a_file_of_before_experts_were_stacked(tmp_path: Path) -> None:
    """blk.N.ffn_gate.E.weight, as converters wrote Mixtral in 2023."""
    stacked = converted(tiny(tmp_path / "model", "mixtral"), tmp_path / "stacked.gguf", "Q8_0")
    apart = tmp_path / "apart.gguf"
    with open_checkpoint(stacked) as checkpoint:
        assert isinstance(checkpoint, GgufCheckpoint)
        tensors = {}
        for entry in checkpoint.entries():
            if "_exps." not in entry.name:
                tensors[entry.name] = (entry.format, entry.shape, checkpoint.read(entry.name))
        weights = ModelWeights(checkpoint)
        for name in weights.names():
            if ".experts." in name:
                layer, side, expert = name.split(".")[2], name.split(".")[-2].removesuffix("_proj"), name.split(".")[5]
                entry = weights.stored_entry(name)
                tensors[f"blk.{layer}.ffn_{side}.{expert}.weight"] = (entry.format, entry.shape, weights.read(name))
        with GgufWriter(apart, checkpoint.typed_metadata()) as writer:
            for name, (form, shape, _) in tensors.items():
                writer.declare(name, form, shape)
            for name, (_, _, tensor) in tensors.items():
                writer.write(name, tensor)
    np.testing.assert_array_equal(logits(apart), logits(stacked))


def test_quantized_experts_are_rounded_like_matrices_of_their_own(tmp_path: Path) -> None:
    """Each expert's blocks are those of its matrix alone."""
    folder = tiny(tmp_path / "model", "mixtral")
    plain, rounded = converted(folder, tmp_path / "f32.gguf", "F32"), converted(folder, tmp_path / "q4.gguf", "Q4_0")
    again = tmp_path / "again.gguf"
    write(make_plan(open_source(plain), recipe_by_name("Q4_0")), again)
    with open_checkpoint(rounded) as one, open_checkpoint(again) as other:
        name = "blk.2.ffn_down_exps.weight"
        assert one.entry(name).format.name == "Q4_0"
        assert np.array_equal(one.read(name).blocks, other.read(name).blocks)


def packed(tmp_path: Path, **choices: object) -> tuple[Path, Path]:
    """A folder with packed experts, and one of the same weights as plain numbers."""
    source = tiny(tmp_path / "source", "qwen3_moe", hidden_size=128)
    out = make_packed_model(source, tmp_path / "packed", Choices(group_size=32, **choices), values=tmp_path / "plain")
    return out, tmp_path / "plain"


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors", "fp8"])
def test_packed_experts(tmp_path: Path, layout: str) -> None:
    folder, plain = packed(tmp_path, layout=layout)
    expected = logits(plain)
    np.testing.assert_allclose(logits(folder), expected, atol=1e-4 * expected.std())
    native = compute_logits(load_model(folder, backend="native", threads=2, activations="float", kv_type="f32"), IDS)
    np.testing.assert_allclose(native, expected, atol=2e-4 * expected.std())
    file = converted(folder, tmp_path / "packed.gguf", "F32")
    np.testing.assert_allclose(logits(file), expected, atol=1e-4 * expected.std())


def test_experts_in_activation_order_are_refused_where_there_is_no_kernel(tmp_path: Path) -> None:
    folder, plain = packed(tmp_path, layout="gptq", act_order=True)
    expected = logits(plain)
    np.testing.assert_allclose(logits(folder), expected, atol=1e-4 * expected.std())
    with pytest.raises(UnsupportedError, match="experts whose columns are in another order"):
        compute_logits(load_model(folder, backend="native"), IDS)

"""Two models compared: by canonical names, in one layout, with the errors that numpy works out of the dequantized whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from make_packed_model import Choices, make_packed_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.quant import compare as module
from llmctl.quant.compare import Difference, compare
from llmctl.quant.convert import Written
from llmctl.quant.packed_folder import plan_packed, write_packed
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.models.weights import ModelWeights

Convert = Callable[..., Written]


def by_name(differences: list[Difference]) -> dict[str, Difference]:
    return {found.name: found for found in differences}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("way", ["gguf against folder", "folder against gguf"])
def test_a_conversion_that_keeps_the_type_is_identical(
    tiny: Callable[..., Path], convert: Convert, tmp_path: Path, family: str, way: str
) -> None:
    """Rows permuted for q and k, norms plus one, one head for two: all of it undone."""
    folder = tiny(family)
    pair = convert(folder, tmp_path / "m.gguf").output, folder
    result = compare(*(pair if way.startswith("gguf") else pair[::-1]), threads=2)
    assert result.same_tensors
    assert {found.name for found in result.differences} == set(load_file(folder / "model.safetensors"))
    assert all(found.max_error <= 2**-23 for found in result.differences), "a norm stored as 1 + w has lost as much"
    assert all(found.identical for found in result.differences if "norm" not in found.name)
    assert result.total.sqnr_db is None or result.total.sqnr_db > 100


def test_the_errors_are_those_of_the_whole_tensors(
    tiny: Callable[..., Path], convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLICE_ELEMENTS", 1000)
    folder = tiny("llama")
    output = convert(folder, tmp_path / "m.gguf", "Q4_0").output
    result = compare(output, folder)
    weights, originals = ModelWeights(open_checkpoint(output)), load_file(folder / "model.safetensors")
    for found in result.differences:
        a, b = dequantize(weights.read(found.name)).astype(np.float64), originals[found.name].astype(np.float64)
        assert found.max_error == np.abs(a - b).max()
        assert found.identical == np.array_equal(a, b)
        if not found.identical:
            assert found.relative_rms == pytest.approx(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()), rel=1e-5)
            assert found.sqnr_db == pytest.approx(10 * np.log10((b**2).sum() / ((a - b) ** 2).sum()), rel=1e-5)
    assert by_name(result.differences)["model.layers.0.self_attn.q_proj.weight"].type == "Q4_0"
    assert 10 < result.total.sqnr_db < 40


def test_wrong_row_order_is_seen(tiny: Callable[..., Path], convert: Convert, tmp_path: Path) -> None:
    """The comparison would be worth nothing if it took one order for another."""
    folder = tiny("llama")
    output = convert(folder, tmp_path / "m.gguf").output
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file(weights | {name: np.ascontiguousarray(weights[name][::-1])}, other / "model.safetensors")
    differing = [found.name for found in compare(output, other).differences if not found.identical]
    assert differing == [name]


def test_two_types_of_one_gguf(tiny: Callable[..., Path], convert: Convert, tmp_path: Path) -> None:
    """Of one kind: the stored names, whatever the architecture."""
    first = convert(tiny("gemma3"), tmp_path / "a.gguf", "Q8_0").output
    second = convert(tiny("gemma3"), tmp_path / "b.gguf", "Q4_1").output
    result = compare(second, first)
    found = by_name(result.differences)["blk.0.attn_q.weight"]
    assert (found.type, found.reference_type) == ("Q4_1", "Q8_0")
    assert found.sqnr_db > 15
    assert compare(first, first).total.identical


def test_tensors_that_one_lacks(changed: Callable[..., Path], tiny: Callable[..., Path]) -> None:
    gone, extra = "model.layers.0.mlp.up_proj.weight", "model.layers.9.extra.weight"
    shape = "model.layers.1.mlp.up_proj.weight"
    folder = changed("llama", {gone: None, extra: np.ones((2, 2), np.float32), shape: np.ones((8, 96), np.float32)})
    result = compare(folder, tiny("llama"))
    assert (result.only_here, result.only_there, result.same_tensors) == ([extra], [gone], False)
    assert result.misshapen == {shape: ((8, 96), (160, 96))}


def test_a_head_that_one_stores_and_the_other_shares(changed: Callable[..., Path], tiny: Callable[..., Path]) -> None:
    tied = tiny("llama", tie_word_embeddings=True)
    embedding = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    untied = changed("llama", {"lm_head.weight": embedding}, {"tie_word_embeddings": False}, tie_word_embeddings=True)
    result = compare(untied, tied)
    assert result.same_tensors
    assert result.total.identical
    assert "lm_head.weight" in by_name(result.differences)


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    """Alike in both they are no difference; in one alone they are counted, and the rest is still measured."""
    base = np.array([1, 2, np.nan, np.inf, -np.inf, 3, 4, 1e30], np.float32)
    other = np.array([1, 2, np.nan, np.inf, np.inf, np.nan, 5, 1e30], np.float32)
    for name, values in {"a": base, "b": other}.items():
        save_file({"w": values}, tmp_path / f"{name}.safetensors")
    (found,) = compare(tmp_path / "b.safetensors", tmp_path / "a.safetensors").differences
    assert (found.nonfinite, found.max_error, found.identical) == (2, 1.0, False)
    assert found.squared_error == 1.0
    assert found.squared_reference == pytest.approx(1e60, rel=1e-6), "beyond float32"
    (same,) = compare(tmp_path / "a.safetensors", tmp_path / "a.safetensors").differences
    assert (same.identical, same.nonfinite, same.relative_rms, same.sqnr_db) == (True, 0, 0.0, None)


def test_zeros_and_small_types(tmp_path: Path) -> None:
    tensors = {"z": np.zeros(4, np.float16), "i": np.arange(4, dtype=np.uint8), "t": np.array([True, False])}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(tensors | {"z": np.ones(4, np.float16)}, tmp_path / "b.safetensors")
    found = by_name(compare(tmp_path / "b.safetensors", tmp_path / "a.safetensors").differences)
    assert (found["z"].relative_rms, found["z"].sqnr_db, found["z"].max_error) == (None, None, 1.0)
    assert found["i"].identical
    assert found["t"].identical


def test_kinds_that_share_no_names(tiny: Callable[..., Path], changed: Callable[..., Path], convert: Convert, tmp_path: Path):
    output = convert(tiny("llama"), tmp_path / "m.gguf").output
    with pytest.raises(UnsupportedError, match="model_type 'mamba'"):
        compare(output, changed("llama", config={"model_type": "mamba"}))


def test_packed_folders_of_one_layout_are_compared_by_value(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """GPTQ v1 keeps its zeros one lower than v2: other words under the same names, the same weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    source = tiny("llama", **sizes)
    v1 = make_packed_model(source, tmp_path / "v1", Choices("gptq", 4, 64, symmetric=False))
    v2 = tmp_path / "v2"
    write_packed(plan_packed(v1, "gptq"), v2)
    zeros = "model.layers.0.mlp.up_proj.qzeros"
    assert (load_file(v1 / "model.safetensors")[zeros] != load_file(v2 / "model.safetensors")[zeros]).any()
    assert compare(v2, v1).total.identical
    finer = make_packed_model(source, tmp_path / "finer", Choices("gptq", 4, 32, symmetric=False))
    assert not (found := compare(finer, v1)).misshapen
    assert 0 < found.total.max_error < 1

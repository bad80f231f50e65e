"""Importance matrices: both forms of file, what they are refused for, and what rounding makes of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmctl.errors import FormatError, ModelNotFoundError, UsageError
from llmctl.kernels.formats.codecs import quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.convert import make_plan, plan_warnings, write
from llmctl.quant.imatrix import ImportanceMatrix, read_imatrix
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.runtime.checkpoint import open_checkpoint

Sums = dict[str, tuple[np.ndarray, list[float]]]


def write_gguf(path: Path, entries: Sums, *, counts: bool = True, **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "none")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", keys.get("datasets", ["wiki.txt", "more.txt"]))
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, calls) in entries.items():
        writer.add_tensor(f"{name}.in_sum2", np.asarray(sums, np.float32))
        if counts:
            writer.add_tensor(f"{name}.counts", np.asarray(calls, np.float32)[:, None])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_legacy(path: Path, entries: Sums, tail: bytes = b"") -> Path:
    parts = [struct.pack("<i", len(entries))]
    for name, (sums, calls) in entries.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", int(calls[0]), np.size(sums))]
        parts.append(np.asarray(sums, "<f4").tobytes())
    path.write_bytes(b"".join(parts) + tail)
    return path


SUMS = np.arange(64, dtype=np.float32)


def test_gguf_holds_sums_and_counts(tmp_path: Path) -> None:
    stack = np.stack([SUMS, SUMS, SUMS])
    found = read_imatrix(write_gguf(tmp_path / "i.gguf", {"one": (SUMS[None], [4]), "stack": (stack, [2, 0, 3])}))
    assert (found.dataset, found.chunks) == ("wiki.txt", 7)
    assert np.array_equal(found.columns("one", (9, 64)), SUMS / np.float32(4))
    assert np.array_equal(found.columns("stack", (3, 9, 64)), [SUMS / np.float32(2), np.ones(64), SUMS / np.float32(3)])
    assert found.columns("two", (9, 64)) is None
    metadata = {key: value.value for key, value in found.metadata().items()}
    assert metadata == {
        "quantize.imatrix.file": str(tmp_path / "i.gguf")[:127],
        "quantize.imatrix.dataset": "wiki.txt",
        "quantize.imatrix.entries_count": 2,
        "quantize.imatrix.chunks_count": 7,
    }


def test_the_older_form_holds_sums_by_calls(tmp_path: Path) -> None:
    tail = struct.pack("<ii", 5, 8) + b"wiki.txt"
    found = read_imatrix(write_legacy(tmp_path / "i.dat", {"one": (SUMS, [4]), "none": (SUMS, [0])}, tail))
    assert (found.dataset, found.chunks) == ("wiki.txt", 5)
    assert np.array_equal(found.columns("one", (9, 64)), SUMS / np.float32(4))
    assert np.array_equal(found.columns("one", (2, 9, 32)), (SUMS / np.float32(4)).reshape(2, 32))
    assert np.array_equal(found.columns("none", (9, 64)), SUMS)
    bare = read_imatrix(write_legacy(tmp_path / "bare.dat", {"one": (SUMS, [4])}))
    assert (bare.dataset, bare.chunks) == (None, 0)
    assert set(bare.metadata()) == {"quantize.imatrix.file", "quantize.imatrix.entries_count"}


@pytest.mark.parametrize("bad", [-1, np.nan, np.inf])
def test_values_that_are_no_weights_are_refused(tmp_path: Path, bad: float) -> None:
    sums = SUMS.copy()
    sums[3] = bad
    for path in (write_gguf(tmp_path / "i", {"one": (sums[None], [4])}), write_legacy(tmp_path / "l", {"one": (sums, [4])})):
        with pytest.raises(FormatError, match="values for 'one' must be finite and not negative"):
            read_imatrix(path)


def test_other_files_are_refused(tmp_path: Path, tiny: Callable[..., Path], convert: Callable[..., Any]) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        read_imatrix(tmp_path / "missing")
    with pytest.raises(FormatError, match=r"no tensor is called NAME\.in_sum2"):
        read_imatrix(convert(tiny("llama"), tmp_path / "model.gguf").output)
    with pytest.raises(FormatError, match=r"needs one\.in_sum2 and one\.counts in F32"):
        read_imatrix(write_gguf(tmp_path / "i.gguf", {"one": (SUMS[None], [4])}, counts=False))
    with pytest.raises(FormatError, match=r"one\.in_sum2 has 64 values for 3 counts"):
        read_imatrix(write_gguf(tmp_path / "j.gguf", {"one": (SUMS[None], [4, 5, 6])}))
    whole = write_legacy(tmp_path / "l", {"one": (SUMS, [4])}).read_bytes()
    for size in (0, 3, 4, 9, 20, len(whole) - 1):
        (tmp_path / "short").write_bytes(whole[:size])
        with pytest.raises(FormatError, match="is no importance matrix: it ends, or makes no sense"):
            read_imatrix(tmp_path / "short")
    for text in (b"\0" * 4, b"\xff" * 40, b"text that is no matrix at all"):
        (tmp_path / "text").write_bytes(text)
        with pytest.raises(FormatError, match="is no importance matrix"):
            read_imatrix(tmp_path / "text")


def everything(path: Path, source: Any, **changes: np.ndarray | None) -> ImportanceMatrix:
    """Weights for all matrices of a model but the embedding."""
    rng = np.random.default_rng(3)
    names = {t.name: t.shape for t in source.tensors if len(t.shape) > 1 and t.name != "token_embd.weight"}
    weights = {name: rng.random((1, shape[-1])).astype(np.float32) for name, shape in names.items()}
    return ImportanceMatrix(path, {name: w for name, w in {**weights, **changes}.items() if w is not None}, "wiki.txt", 3)


def test_tensors_are_rounded_with_their_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(tiny("llama"))
    importance = everything(tmp_path / "i.gguf", source)
    plan = make_plan(source, recipe_by_name("Q4_0"), importance=importance)
    (unweighted,) = [text for text in plan_warnings(plan) if "importance" in text]
    assert unweighted == f"1 tensor is rounded without importance, which {tmp_path}/i.gguf has not for: token_embd.weight"
    checkpoint = open_checkpoint(write(plan, tmp_path / "out.gguf").output)
    for tensor in source.tensors:
        if tensor.name in importance.weights:
            stored, form = checkpoint.read(tensor.name), checkpoint.entry(tensor.name).format
            expected = quantize(tensor.read(), form, importance.columns(tensor.name, tensor.shape))
            assert np.array_equal(stored.blocks, expected.blocks), tensor.name
    assert checkpoint.metadata["quantize.imatrix.dataset"] == "wiki.txt"
    assert checkpoint.metadata["quantize.imatrix.entries_count"] == len(importance.weights)


def test_a_matrix_of_another_model_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source, path = open_source(tiny("llama")), tmp_path / "i.gguf"
    recipe = recipe_by_name("Q4_0")
    for name, weights, message in (
        ("blk.99.ffn_up.weight", SUMS, "'blk.99.ffn_up.weight', which the model has not: it is of another model"),
        ("blk.0.ffn_up.weight", SUMS[:5], "has 5 values for 'blk.0.ffn_up.weight', which needs"),
    ):
        with pytest.raises(FormatError, match=message):
            make_plan(source, recipe, importance=everything(path, source, **{name: weights}))


def test_where_an_importance_has_no_use_or_is_needed(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = open_source(tiny("llama"))
    importance = everything(tmp_path / "i.gguf", source)
    for type_name in ("auto", "F16"):
        with pytest.raises(UsageError, match="--imatrix is for types with few bits"):
            make_plan(source, recipe_by_name(type_name), importance=importance)
    incomplete = everything(tmp_path / "i.gguf", source, **{"blk.0.attn_q.weight": None})
    plan = make_plan(source, recipe_by_name("Q4_0"), importance=incomplete)
    assert "blk.0.attn_q.weight" in [tensor.source.name for tensor in plan.unweighted]
    with pytest.raises(UsageError, match="Q2_K_S has too few bits to do without"):
        make_plan(source, recipe_by_name("Q2_K_S"))


def test_experts_have_weights_of_their_own(tmp_path: Path) -> None:
    from llmctl.quant.rtn import round_to_nearest

    rng = np.random.default_rng(4)
    stack, weights = rng.standard_normal((3, 7, 64)).astype(np.float32), rng.random((3, 64)).astype(np.float32)
    found = round_to_nearest(stack, FORMATS["Q4_1"], weights).tensor.blocks
    for expert in range(3):
        assert np.array_equal(found[expert], quantize(stack[expert], FORMATS["Q4_1"], weights[expert]).blocks)

"""From GGUF to GGUF: everything but the types asked for stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmctl.errors import UnsupportedError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.convert import Written, make_plan, plan_warnings
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType

Convert = Callable[..., Written]
METADATA = {
    "general.architecture": "unheard-of",
    "general.file_type": Typed(1, ValueType.U32),
    "a.u8": Typed(7, ValueType.U8),
    "a.i64": Typed(-7, ValueType.I64),
    "a.f64": Typed(0.1, ValueType.F64),
    "a.bool": True,
    "a.strings": ["x", "", "ü"],
    "a.numbers": np.array([1, 2, 3], np.int16),
    "a.nested": [[1, 2], [3]],
}


def write_gguf(path: Path, tensors: dict[str, np.ndarray], formats: dict[str, str], metadata: dict[str, Any] = METADATA) -> Path:
    with GgufWriter(path, metadata) as writer:
        for name, tensor in tensors.items():
            writer.declare(name, FORMATS[formats[name]], tensor.shape)
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return path


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file of an architecture nobody knows, with an alignment of its own."""
    rng = np.random.default_rng(3)
    tensors = {
        "token_embd.weight": rng.standard_normal((40, 64)).astype(np.float16),
        "blk.0.mix.weight": rng.standard_normal((4, 64)).astype(np.float16),
        "blk.0.mix_norm.weight": rng.standard_normal((4, 64)).astype(np.float32),
        "blk.0.table.weight": np.arange(64, dtype=np.int32).reshape(1, 64),
        "blk.0.odd.weight": rng.standard_normal((4, 33)).astype(np.float16),
    }
    names = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
    formats = {name: names[tensor.dtype] for name, tensor in tensors.items()}
    return write_gguf(tmp_path / "foreign.gguf", tensors, formats, METADATA | {"general.alignment": 64})


def test_kept_as_it_is_the_file_is_the_same(foreign: Path, convert: Convert, tmp_path: Path) -> None:
    output = convert(foreign, tmp_path / "out.gguf").output
    expected, found = open_checkpoint(foreign), open_checkpoint(output)
    added = {"general.quantization_version"}
    assert {key: repr(found.metadata[key]) for key in found.metadata if key not in added} == {
        key: repr(value) for key, value in expected.metadata.items()
    }
    assert {k: t for k, t in found.metadata_types.items() if k not in added} == expected.metadata_types
    assert found.alignment == 64
    again = convert(output, tmp_path / "again.gguf").output
    assert again.read_bytes() == output.read_bytes()


def test_only_weights_change_their_type(foreign: Path, convert: Convert, tmp_path: Path) -> None:
    output = convert(foreign, tmp_path / "out.gguf", "Q4_0").output
    with open_checkpoint(output) as found, open_checkpoint(foreign) as source:
        assert {entry.name: entry.format.name for entry in found.entries()} == {
            "token_embd.weight": "Q8_0",
            "blk.0.mix.weight": "Q4_0",
            "blk.0.mix_norm.weight": "F32",
            "blk.0.table.weight": "I32",
            "blk.0.odd.weight": "F16",
        }
        for name in ("blk.0.mix_norm.weight", "blk.0.table.weight", "blk.0.odd.weight"):
            np.testing.assert_array_equal(found.read(name), source.read(name))
        assert found.metadata["general.file_type"] == 2
        assert found.metadata["a.f64"] == 0.1


def test_what_falls_back_is_reported(foreign: Path) -> None:
    plan = make_plan(open_source(foreign), recipe_by_name("Q4_0"))
    assert list(plan_warnings(plan)) == [
        "1 tensor is in F16 instead of Q4_0, which needs rows that are a multiple of 32: blk.0.odd.weight",
        "1 tensor is in Q8_0 instead of Q6_K, which needs rows that are a multiple of 256: token_embd.weight",
    ]
    assert [tensor.source.name for tensor in plan.substitutions] == ["token_embd.weight", "blk.0.odd.weight"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_step_or_two(tiny: Callable[..., Path], convert: Convert, tmp_path: Path, family: str) -> None:
    """A folder in one pass gives the very file that the way over F16 gives."""
    folder = tiny(family, dtype="float16")
    direct = convert(folder, tmp_path / "direct.gguf", "Q4_0").output
    half = convert(folder, tmp_path / "half.gguf", "F16").output
    assert convert(half, tmp_path / "after.gguf", "Q4_0").output.read_bytes() == direct.read_bytes()


def test_rounding_twice_is_allowed_and_said(tiny: Callable[..., Path], convert: Convert, logits: Any, tmp_path: Path) -> None:
    folder = tiny("llama")
    eight = convert(folder, tmp_path / "eight.gguf", "Q8_0").output
    plan = make_plan(open_source(eight), recipe_by_name("Q4_0"))
    assert list(plan_warnings(plan)) == [
        "1 tensor is in Q8_0 instead of Q6_K, which needs rows that are a multiple of 256: output.weight",
        "22 tensors are quantized already (Q8_0) and rounded a second time: the original weights give a better result",
    ]
    assert not make_plan(open_source(eight), recipe_by_name("F16")).requantized
    four = convert(eight, tmp_path / "four.gguf", "Q4_0", measure=True)
    head = next(rounded for tensor, rounded in four.rounded if tensor.source.name == "output.weight")
    assert head.relative_error == 0, "Q8_0 before and after"
    expected = logits(folder)
    eight_off, four_off = (np.std(logits(path) - expected) / np.std(expected) for path in (eight, four.output))
    assert eight_off < 0.15 < four_off < 1, "random weights are hard to round: 0.07 and 0.7 when this was written"


def test_a_split_model_becomes_one_file(tmp_path: Path, convert: Convert) -> None:
    rng = np.random.default_rng(4)
    tensors = [{f"blk.{n}.w.weight": rng.standard_normal((4, 32)).astype(np.float32)} for n in range(2)]
    for number, part in enumerate(tensors):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
        path = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
        write_gguf(path, part, dict.fromkeys(part, "F32"), METADATA | split)
    output = convert(tmp_path / "m-00002-of-00002.gguf", tmp_path / "whole.gguf", "F16").output
    with open_checkpoint(output) as whole:
        assert whole.names() == ["blk.0.w.weight", "blk.1.w.weight"]
        assert not [key for key in whole.metadata if key.startswith("split.")]
        np.testing.assert_array_equal(whole.read("blk.1.w.weight"), tensors[1]["blk.1.w.weight"].astype(np.float16))


def test_another_splitting_rule(tiny: Callable[..., Path], convert: Convert, tmp_path: Path) -> None:
    byte_level = convert(tiny("llama"), tmp_path / "bpe.gguf").output
    assert open_source(byte_level, pre="smollm").metadata["tokenizer.ggml.pre"] == "smollm"
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer rule 'x'"):
        open_source(byte_level, pre="x")
    spm = convert(tiny("gemma3"), tmp_path / "spm.gguf").output
    with pytest.raises(UnsupportedError, match=r"--pre is for byte-level BPE \(gpt2\), the tokenizer's model is 'llama'"):
        open_source(spm, pre="smollm")

"""Packed integers and small floats to GGUF: the same codes where a type holds them, else rounded again, and said so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from make_packed_model import Choices, make_packed_model
from safetensors.numpy import load_file

from llmctl.quant.convert import make_plan, plan_warnings, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.report import document
from llmctl.quant.source import open_source

Tiny = Callable[..., Path]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
UP, QUERY = "blk.1.ffn_up.weight", "blk.1.attn_q.weight"


@pytest.fixture
def convert_packed(tiny: Tiny, tmp_path: Path) -> Callable[..., Any]:
    """Makes a packed model and converts it: the report, the tensors as gguf-py reads them, and the packed weights' values."""

    def run(choices: Choices, type_name: str = "auto") -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
        source = make_packed_model(tiny("llama", **SIZES), tmp_path / "packed", choices, values=tmp_path / "values")
        plan = make_plan(open_source(source), recipe_by_name(type_name))
        warnings = list(plan_warnings(plan))
        written = write(plan, tmp_path / "out.gguf")
        report = document(plan, written, warnings)
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
        return report, tensors, load_file(tmp_path / "values" / "model.safetensors")

    return run


def values(tensor: Any) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def interleaved(weight: np.ndarray, heads: int = 4) -> np.ndarray:
    size = len(weight) // heads
    return weight[[h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in range(2)]]


EXACT = [
    (Choices("gptq", 4, 64), "auto", "Q4_0"),
    (Choices("gptq", 4, 32, signed_scales=True), "auto", "Q4_0"),
    (Choices("gptq", 4, 128), "auto", "Q4_0"),  # the last group of down_proj is half as long
    (Choices("gptq", 3, 32), "auto", "Q4_0"),
    (Choices("gptq_v2", 2, 32, symmetric=False), "auto", "Q4_0"),
    (Choices("gptq", 8, -1), "auto", "Q8_0"),
    (Choices("awq", 4, 32), "auto", "Q4_0"),
    (Choices("awq", 4, 32, symmetric=False), "Q5_0", "Q5_0"),
    (Choices("awq", 4, 32, symmetric=False), "Q8_0", "Q8_0"),
    (Choices("compressed-tensors", 5, 32), "auto", "Q5_0"),
    (Choices("compressed-tensors", 7, 32, symmetric=False), "auto", "Q8_0"),
    (Choices("compressed-tensors", 4, 32, scale_dtype="bfloat16"), "auto", "Q4_0"),
    (Choices("mxfp4"), "auto", "MXFP4"),
    (Choices("fp8"), "F32", "F32"),
]


@pytest.mark.parametrize(("choices", "asked", "type_name"), EXACT)
def test_not_a_value_changes(convert_packed: Callable[..., Any], choices: Choices, asked: str, type_name: str) -> None:
    report, tensors, expected = convert_packed(choices, asked)
    assert tensors[UP].tensor_type.name == type_name
    assert np.array_equal(values(tensors[UP]), expected["model.layers.1.mlp.up_proj.weight"])
    assert np.array_equal(values(tensors[QUERY]), interleaved(expected["model.layers.1.self_attn.q_proj.weight"]))
    assert not report["requantized"]
    if not type_name.startswith("F"):
        kept = {entry["name"]: entry for entry in report["kept_codes"]}
        assert kept[UP] == {"name": UP, "type": type_name, "rounding": 0.0}


def test_asymmetric_codes_in_q4_1_with_rounded_offsets(convert_packed: Callable[..., Any]) -> None:
    report, tensors, expected = convert_packed(Choices("awq", 4, 32, symmetric=False))
    weight = expected["model.layers.1.mlp.up_proj.weight"]
    assert tensors[UP].tensor_type.name == "Q4_1"
    kept = {entry["name"]: entry for entry in report["kept_codes"]}
    assert 0 < kept[UP]["rounding"] <= 15 * 2**-11
    steps = tensors[UP].data.reshape(len(weight), -1, 20)[:, :, :2].copy().view(np.float16).astype(np.float32)
    error = np.abs(values(tensors[UP]) - weight).reshape(len(weight), -1, 32) / np.abs(steps)
    assert error.max() <= kept[UP]["rounding"] * 1.001 + 1e-6
    said = next(warning for warning in report["warnings"] if "Q4_1 with unchanged codes, offsets rounded" in warning)
    assert "--type Q5_0 holds them exactly" in said
    assert not report["requantized"]


@pytest.mark.parametrize(
    ("choices", "asked", "type_name", "reason"),
    [
        (Choices("gptq", 4, 32, act_order=True), "auto", "Q8_0", "activation order"),
        (Choices("gptq", 4, 16), "auto", "Q8_0", "groups of 16 columns are no blocks of 32"),
        (Choices("gptq_v2", 8, 32, symmetric=False), "auto", "Q8_0", "no type has offsets for codes of 8 bits"),
        (Choices("gptq", 8, 32), "Q4_0", "Q4_0", None),
        (Choices("awq", 4, 32, symmetric=False), "Q4_0", "Q4_0", None),
    ],
)
def test_else_they_are_rounded_again_and_it_is_said(
    convert_packed: Callable[..., Any], choices: Choices, asked: str, type_name: str, reason: str | None
) -> None:
    report, tensors, expected = convert_packed(choices, asked)
    weight = expected["model.layers.1.mlp.up_proj.weight"]
    assert tensors[UP].tensor_type.name == type_name
    error = np.sqrt(((values(tensors[UP]) - weight) ** 2).sum() / (weight**2).sum())
    assert 0 < error < (0.01 if type_name == "Q8_0" else 0.15)
    assert UP in report["requantized"]
    assert any("quantized already" in warning for warning in report["warnings"])
    assert reason is None or any(reason in warning for warning in report["warnings"])


def test_float8_is_rounded_to_bfloat16_and_said(convert_packed: Callable[..., Any]) -> None:
    report, tensors, expected = convert_packed(Choices("fp8", scales="channel"))
    assert tensors[UP].tensor_type.name == "BF16"
    weight = expected["model.layers.1.mlp.up_proj.weight"]
    assert np.abs(values(tensors[UP]) - weight).max() <= 2.0**-8 * np.abs(weight).max()
    assert any("float8 times a scale, rounded to BF16; --type F32 keeps every value" in w for w in report["warnings"])


def test_the_report_counts_the_source_as_stored(convert_packed: Callable[..., Any], tmp_path: Path) -> None:
    report, _, _ = convert_packed(Choices("gptq", 4, 64))
    entry = next(entry for entry in report["tensors"] if entry["name"] == UP)
    assert entry["source_type"] == "INT4"
    stored = load_file(tmp_path / "packed" / "model.safetensors")
    assert entry["bytes_before"] == sum(t.nbytes for name, t in stored.items() if name.startswith("model.layers.1.mlp.up_proj."))

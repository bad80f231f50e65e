"""Modules packed by AutoGPTQ, AutoAWQ and compressed-tensors themselves: every code, zero point and scale, and back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_packed_model import save

from llmctl.quant.packed_folder import plan_packed, write_packed
from llmctl.runtime.checkpoint.packed import find_packed
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint

CASES = json.loads((Path(__file__).parents[2] / "golden" / "packed.json").read_text("utf-8"))["cases"]
MODULE = "model.layers.0.mlp.up_proj"


def array(stored: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(stored["data"]), stored["dtype"]).reshape(stored["shape"])


@pytest.fixture(params=CASES, ids=lambda case: case["tool"].partition(" ")[0])
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def folder(case: dict[str, Any], tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    save({f"{MODULE}.{suffix}": array(tensor) for suffix, tensor in case["tensors"].items()}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"quantization_config": case["config"]}))
    return source


def test_every_number_is_read(case: dict[str, Any], folder: Path) -> None:
    stored = find_packed(SafetensorsCheckpoint(folder)).modules[f"{MODULE}.weight"].read()
    assert np.array_equal(stored.codes(), array(case["codes"]))
    assert np.array_equal(stored.all_zero_points(), array(case["zeros"]))
    assert np.array_equal(stored.scales, array(case["scales"]))


def test_the_tools_tensors_are_written(case: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Over another layout and back: what the tool wrote, bit for bit. GPTQ with zero points of its own is written as version 2,
    whose zero points are larger by one in every field."""
    method = case["config"]["quant_method"]
    over = "gptq" if method != "gptq" and case["config"].get("bits", 0) == 4 else "compressed-tensors"
    write_packed(plan_packed(folder, over), tmp_path / "over")
    write_packed(plan_packed(tmp_path / "over", method), tmp_path / "back")
    checkpoint = SafetensorsCheckpoint(tmp_path / "back")
    for suffix, expected in case["tensors"].items():
        if suffix != "qzeros" or method != "gptq":
            assert np.array_equal(checkpoint.read(f"{MODULE}.{suffix}"), array(expected)), suffix

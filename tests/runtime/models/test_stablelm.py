"""StableLM 2 12B keeps the norm of every head as a tensor of its own: they are read as one, and written apart again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError
from llmctl.quant.convert import make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.quant.to_folder import plan_folder, write_folder
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.loading import load_model

NORM = "model.layers.1.self_attn.q_layernorm.norms.2.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "stablelm", tokenizer="bpe", qk_layernorm=True, use_parallel_residual=True)


def test_norms_come_back_as_they_were(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write(make_plan(open_source(folder), recipe_by_name("F32")), file)
    assert open_checkpoint(file).entry("blk.1.attn_q_norm.weight").shape == (6, 32)
    assert open_checkpoint(file).entry("blk.1.attn_k_norm.weight").shape == (2, 32)
    write_folder(plan_folder(file), tmp_path / "back")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "back"))
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], values) for name, values in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), "there is none with the number 2"),
        (lambda tensors: tensors.update({NORM: np.ones(31, np.float32)}), r"q_layernorm.norms.2.weight' is F32 of shape \(31,\)"),
        (lambda tensors: tensors.update({NORM.replace(".2.", ".6."): np.ones(32, np.float32)}), r"shape \(7, 32\)"),
    ],
)
def test_norms_that_are_not_those_of_the_heads(folder: Path, change: Callable[[dict], object], message: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FormatError, match=message):
        load_model(folder)

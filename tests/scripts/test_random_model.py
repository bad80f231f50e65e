"""Random models: files that load, in llama.cpp's mix, with logits that a trained model might have."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from make_random_model import Shape, main, make_random_model, random_tensor
from random_deepseek import DeepSeekShape

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model

SMALL = Shape(hidden=256, layers=8, heads=4, kv_heads=2, intermediate=512, context=64)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_matrices_have_unit_gain(name):
    values = dequantize(random_tensor(FORMATS[name], (64, 4096), np.random.default_rng(3)))
    assert np.isfinite(values).all()
    assert abs(values.mean()) * 64 < 0.15
    assert 0.9 < values.std() * 64 < 1.2


def test_the_mix_is_llama_cpps_and_the_model_runs(tmp_path, smollm2_gguf):
    path = make_random_model(tmp_path / "random.gguf", smollm2_gguf, SMALL)
    with open_checkpoint(path) as checkpoint:
        types = {entry.name: entry.format.name for entry in checkpoint.entries()}
    more = [i for i in range(8) if types[f"blk.{i}.ffn_down.weight"] == "Q6_K"]
    assert more == [0, 3, 6, 7]
    assert [i for i in range(8) if types[f"blk.{i}.attn_v.weight"] == "Q6_K"] == more
    assert types["token_embd.weight"] == "Q6_K"
    assert "output.weight" not in types
    assert types["blk.0.attn_q.weight"] == "Q4_K"
    model = load_model(path)
    logits = compute_logits(model, model.tokenizer.encode("The house stands where the river turns."))
    assert logits.shape[1] == 49152
    assert 0.3 < logits.std() < 3


def test_a_deepseek_runs_in_llama_cpps_mix(tmp_path, smollm2_gguf):
    """Matrices of every head whose rows are no whole blocks of 256 give way as llama-quantize's do."""
    shape = DeepSeekShape(hidden=256, layers=2, heads=2, intermediate=512, rank=256, query_rank=256, experts=8, expert_size=256)
    shape = replace(shape, groups=4, top_groups=2, top_k=3)
    path = make_random_model(tmp_path / "random.gguf", smollm2_gguf, shape)
    with open_checkpoint(path) as checkpoint:
        types = {entry.name: entry.format.name for entry in checkpoint.entries()}
    assert (types["blk.1.attn_k_b.weight"], types["blk.1.attn_v_b.weight"]) == ("Q5_0", "Q4_K")
    assert (types["blk.1.ffn_gate_inp.weight"], types["blk.1.exp_probs_b.bias"]) == ("F32", "F32")
    model = load_model(path)
    assert 0.3 < compute_logits(model, model.tokenizer.encode("The house stands where the river turns.")).std() < 3


def test_a_head_of_its_own_and_one_type_for_all(tmp_path, smollm2_gguf):
    shape = Shape(**{**vars(SMALL), "layers": 1, "tied": False})
    with open_checkpoint(make_random_model(tmp_path / "random.gguf", smollm2_gguf, shape, "q8_0")) as checkpoint:
        types = {entry.name: entry.format.name for entry in checkpoint.entries()}
    assert {types["output.weight"], types["token_embd.weight"]} == {"Q8_0"}
    assert set(types.values()) == {"Q8_0", "F32"}


def test_same_arguments_same_bytes(tmp_path, smollm2_gguf):
    shape = Shape(**{**vars(SMALL), "layers": 1})
    made = [make_random_model(tmp_path / str(i) / "random.gguf", smollm2_gguf, shape, seed=seed) for i, seed in folders(tmp_path)]
    first, second, other = (path.read_bytes() for path in made)
    assert first == second
    assert first != other


def folders(root: Path) -> list[tuple[int, int]]:
    """(folder, seed): two of the same seed, one of another."""
    chosen = [(0, 0), (1, 0), (2, 1)]
    for number, _ in chosen:
        (root / str(number)).mkdir()
    return chosen


@pytest.mark.parametrize(
    ("shape", "type", "error"),
    [
        ({"heads": 3}, "Q4_K_M", UsageError),
        ({"kv_heads": 3}, "Q4_K_M", UsageError),
        ({}, "MXFP4", UnsupportedError),
        ({}, "Q9_Z", UnsupportedError),
    ],
)
def test_what_cannot_be_made(tmp_path, smollm2_gguf, shape, type, error):
    with pytest.raises(error):
        make_random_model(tmp_path / "random.gguf", smollm2_gguf, Shape(**{**vars(SMALL), **shape}), type)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line(tmp_path, smollm2_gguf, capsys):
    shape = ["--hidden", "256", "--layers", "1", "--heads", "4", "--kv-heads", "2", "--intermediate", "256"]
    assert main([str(tmp_path / "a.gguf"), "--tokenizer", str(smollm2_gguf), "--type", "Q4_0", *shape]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'a.gguf'}\n"
    script = Path(__file__).parents[2] / "scripts" / "make_random_model.py"
    bad = [sys.executable, script, tmp_path / "b.gguf", "--tokenizer", smollm2_gguf, "--heads", "3"]
    done = subprocess.run(bad, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("make_random_model: 3 heads do not divide")

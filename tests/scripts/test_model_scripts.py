"""The scripts that make models for the other tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import get_models
import make_dithered_model
import numpy as np
import pytest
import sentencepiece
import torch
from make_tiny_model import FAMILIES, make_tiny_model

from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS

ROOT = Path(__file__).parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path, family: str) -> None:
    made = [make_tiny_model(tmp_path / str(i), family, seed=seed) for i, seed in enumerate((1, 1, 2))]
    first, again, other = map(contents, made)
    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
    assert first["config.json"] == other["config.json"]


def test_a_choice_the_config_class_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="slidng_window"):
        make_tiny_model(tmp_path, "gemma3", slidng_window=4)


def test_the_command_line_of_make_tiny_model(tmp_path: Path) -> None:
    options = ["--rope", "yarn", "--tokenizer", "bpe", "--dtype", "float16", "--set", "attention_bias=true"]
    command = [sys.executable, ROOT / "scripts" / "make_tiny_model.py", tmp_path / "made", "llama", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["rope_parameters"]["rope_type"], config["attention_bias"]) == ("yarn", True)
    assert config["dtype"] == "float16"
    assert (tmp_path / "made" / "tokenizer.json").is_file()


def test_get_models_takes_the_file_from_the_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = tmp_path / "store.gguf"
    stored.write_bytes(b"GGUF")
    pulls: list[str] = []

    class Stored:
        path = stored

    def pull(name: str) -> type[Stored]:
        pulls.append(name)
        return Stored

    monkeypatch.setattr("llmctl.runtime.store.pull_model", pull)
    paths = {get_models.ensure_gguf(tmp_path / "out", "smollm2") for _ in range(2)}
    assert paths == {tmp_path / "out" / "SmolLM2-135M-Instruct.Q4_1.gguf"}
    assert paths.pop().read_bytes() == b"GGUF"
    assert pulls == ["smollm2"]


def test_a_half_made_folder_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_models, "ensure_gguf", lambda out, model: out / "x.gguf")

    def killed(gguf_path: Path, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(get_models, "unfold", killed)
    with pytest.raises(KeyboardInterrupt):
        get_models.ensure_fp16(tmp_path, "smollm2")
    monkeypatch.setattr(get_models, "unfold", lambda gguf_path, folder: folder.mkdir())
    assert get_models.ensure_fp16(tmp_path, "smollm2").is_dir()
    visible = [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    assert visible == ["smollm2-135m-fp16"]


def test_two_processes_make_one_folder(tmp_path: Path) -> None:
    """The second waits for the first and then finds its work done."""
    program = (
        "import sys, time, pathlib, get_models\n"
        "def unfold(gguf_path, folder):\n    folder.mkdir()\n    time.sleep(1)\n    print('made')\n"
        "get_models.unfold, get_models.ensure_gguf = unfold, lambda out, model: out / 'x.gguf'\n"
        "get_models.ensure_fp16(pathlib.Path(sys.argv[1]), 'smollm2')\n"
    )
    command = [sys.executable, "-c", program, tmp_path]
    running = [
        subprocess.Popen(command, cwd=ROOT / "scripts", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60) for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    assert sorted(out for out, _ in answers) == ["", "made\n"]


def test_the_rebuilt_sentencepiece_model_reads_text_as_transformers_does(gemma3_fp16: Path) -> None:
    recorded = json.loads((ROOT / "tests" / "golden" / "gemma3-270m.json").read_text(encoding="utf-8"))["prompts"]
    processor = sentencepiece.SentencePieceProcessor(model_file=str(gemma3_fp16 / "tokenizer.model"))
    for name, prompt in recorded.items():
        assert [processor.bos_id(), *processor.encode(prompt["text"])] == prompt["ids"], name


def test_both_real_models_are_complete(
    smollm2_gguf: Path, gemma3_gguf: Path, smollm2_fp16: Path, gemma3_fp16: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run again where everything is there, it changes nothing and prints every path."""
    before = smollm2_fp16.stat().st_mtime_ns, gemma3_fp16.stat().st_mtime_ns
    assert get_models.main([str(smollm2_gguf.parent), "--fp16"]) == 0
    assert capsys.readouterr().out.split() == [str(p) for p in (smollm2_gguf, smollm2_fp16, gemma3_gguf, gemma3_fp16)]
    assert (smollm2_fp16.stat().st_mtime_ns, gemma3_fp16.stat().st_mtime_ns) == before
    for folder, tokenizer in ((smollm2_fp16, "tokenizer.json"), (gemma3_fp16, "tokenizer.model")):
        for name in ("config.json", "model.safetensors", "tokenizer_config.json", tokenizer):
            assert (folder / name).is_file()


def test_noise_reaches_half_a_step_of_each_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    stored = quantize(rng.normal(size=(8, 64)).astype(np.float32), FORMATS["Q4_1"])
    steps = make_dithered_model.steps_of(stored)
    grid = dequantize(stored)
    assert np.allclose(np.diff(np.unique(grid[3, 32:])).min(), steps[3, 63], rtol=1e-3)
    moved = make_dithered_model.dithered(torch.from_numpy(grid).half(), steps, torch.Generator().manual_seed(1)).numpy()
    noise = (moved - grid) / steps
    assert np.abs(noise).max() <= 0.51  # the weights are rounded to float16
    assert np.abs(noise).mean() == pytest.approx(0.25, abs=0.03)

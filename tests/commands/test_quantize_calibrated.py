"""`llmctl quantize` with methods that look at text: the files, what is said of them, and that a killed run goes on as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.cli import main
from llmctl.quant.calibration import read_calibration
from llmctl.quant.imatrix import read_imatrix
from llmctl.quant.statistics import Importances, write_imatrix
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model
from llmctl.runtime.models.weights import ModelWeights
from llmctl.runtime.tokenizer import load_tokenizer

IDS = np.random.default_rng(5).integers(3, 250, 40).tolist()
SHORT = ["--num-samples", "6", "--seq-len", "40", "--no-check", "--threads", "1"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("calibrated") / "tiny-llama", "llama", tokenizer="bpe", num_hidden_layers=2)


@pytest.fixture
def quantize(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs the command with --json in this process; gives the document, with what went to stderr as "stderr"."""

    def run(model: Path, *options: str, expected: int = 0) -> dict[str, Any]:
        code = main(["quantize", str(model), *SHORT, "--json", *options])
        out, err = capsys.readouterr()
        assert code == expected, err
        return {**(json.loads(out) if out else {}), "stderr": err}

    return run


def logits(path: Path, ids: list[int] = IDS) -> np.ndarray:
    return np.asarray(compute_logits(load_model(path), ids))


def distance(path: Path, other: Path, ids: list[int] = IDS) -> float:
    return float(np.abs(logits(path, ids) - logits(other, ids)).mean())


@pytest.mark.parametrize(
    ("method", "form", "more"),
    [
        ("gptq", "gptq", ()),
        ("gptq", "compressed-tensors", ("--asymmetric", "--bits", "3")),
        ("gptq", "awq", ("--asymmetric",)),
        ("awq", "awq", ()),
        ("awq", "gptq", ("--symmetric",)),
        ("ptq", "compressed-tensors", ("--bits", "8")),
        ("ptq", "gptq", ("--bits", "8", "--per-tensor")),
        ("ptq", "gguf", ("--type", "Q4_1")),
        ("gptq", "gguf", ("--type", "Q4_0")),
        ("awq", "gguf", ("--type", "Q4_1")),
        ("rtn", "gptq", ("--group-size", "-1")),
    ],
)
def test_every_method_in_every_format_can_be_run(
    tiny: Path, quantize: Callable[..., dict[str, Any]], method: str, form: str, more: tuple[str, ...]
) -> None:
    """The file holds exactly what the report says was searched, and it is close to the model."""
    output = Path("out.gguf" if form == "gguf" else "out")
    found = quantize(tiny, "--method", method, "--format", form, "-o", str(output), *more)
    assert found["output"] == str(output)
    source, made = ModelWeights(open_checkpoint(tiny)), ModelWeights(open_checkpoint(output))
    assert len(found["modules"]) == (16 if form == "gguf" else 14)  # with the embedding and the head
    for module in found["modules"]:
        assert module["bits_per_weight"] < 9
        name = module["name"] + ".weight"
        weight, stored = (np.asarray(one.read(name) if one is source else values(one, name)) for one in (source, made))
        if method != "awq":
            error = np.linalg.norm(stored - weight) / np.linalg.norm(weight)
            assert error == pytest.approx(module["relative_rms_error"], rel=1e-4)
    scale = float(np.abs(logits(tiny)).mean())
    assert distance(output, tiny) < (1.1 if "--per-tensor" in more or "3" in more or "-1" in more else 0.7) * scale
    assert not list(Path().glob(".*"))


def values(weights: ModelWeights, name: str) -> np.ndarray:
    from llmctl.kernels.formats.codecs import dequantize

    return dequantize(weights.read(name))


@pytest.mark.parametrize("options", [("--method", "gptq"), ("--method", "awq"), ("--method", "gptq", "--format", "gguf")])
def test_experts_that_no_token_chose_are_listed(
    tmp_path_factory: pytest.TempPathFactory, quantize: Callable[..., dict[str, Any]], options: tuple[str, ...]
) -> None:
    """The router never chooses the fourth: what it reads is taken from all tokens, and it is made of numbers."""
    folder = tmp_path_factory.mktemp("experts") / "tiny-mixtral"
    make_tiny_model(folder, "mixtral", tokenizer="bpe", num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.gate.weight") or name.endswith("block_sparse_moe.gate.weight"))
    weights[name][1:], weights[name][1] = 0, -weights[name][0]  # one of the first two is above zero, and the third comes next
    save_file(weights, folder / "model.safetensors")
    output = Path("out.gguf" if "gguf" in options else "out")
    found = quantize(folder, *options, "-o", str(output))
    unseen = {module["name"]: module["fallback"] for module in found["modules"] if module.get("tokens") == 0}
    assert {int(name.rpartition(".experts.")[2].partition(".")[0]) for name in unseen} == set(range(3, len(weights[name])))
    for module, fallback in unseen.items():
        what = "its weights alone" if "down" in module else "what all tokens bring"
        assert fallback == f"no token reached it: fitted to {what}"
    assert np.isfinite(logits(output)).all()


def test_gptq_is_closer_than_rounding(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    """On text that it has not seen."""
    for method in ("rtn", "gptq"):
        quantize(tiny, "--method", method, "--format", "gptq", "--bits", "3", "-o", method, "--num-samples", "60")
    tokenizer = load_tokenizer(open_checkpoint(tiny))
    text = read_calibration(None, tokenizer, num_samples=60, row_length=40, seed=0, num_held_out=4).held_out
    gptq, rtn = (sum(distance(Path(name), tiny, ids) for ids in text) for name in ("gptq", "rtn"))
    assert gptq < 0.85 * rtn


def test_no_module_is_worse_than_rounded(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    for module in quantize(tiny, "--method", "gptq", "--bits", "2", "-o", "out")["modules"]:
        assert module["method"] == "gptq"
        assert module["loss"] <= module["loss_rtn"]
        assert module["tokens"] == 240


def test_the_importance_matrix_is_llama_cpps(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    quantize(tiny, "--method", "ptq", "-o", "out", "--save-imatrix", "i.gguf")
    found = read_imatrix(Path("i.gguf"))
    assert len(found.weights) == 14
    assert found.weights["blk.1.ffn_down.weight"].shape == (1, 160)
    again = quantize(tiny, "--method", "rtn", "--format", "gguf", "--type", "Q4_0", "--imatrix", "i.gguf", "-o", "o.gguf")
    assert again["imatrix"] == "i.gguf"


def test_both_forms_of_the_importance_matrix_say_the_same(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    for form in ("gguf", "dat"):
        quantize(tiny, "--method", "ptq", "-o", form, "--save-imatrix", f"i.{form}")
    new, old = (read_imatrix(Path(f"i.{form}")) for form in ("gguf", "dat"))
    assert new.weights.keys() == old.weights.keys()
    assert (new.chunks, new.dataset) == (old.chunks, old.dataset)
    for name, weights in new.weights.items():
        np.testing.assert_allclose(old.weights[name], weights[0], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ("--method", "ptq", "--format", "gguf", "--type", "Q4_0"),
        ("--method", "gptq", "--format", "gguf", "--type", "Q4_0"),
        ("--method", "ptq", "--bits", "3"),
        ("--method", "awq"),
    ],
    ids=str,
)
def test_an_importance_matrix_says_which_columns_are_spared(
    tiny: Path, quantize: Callable[..., dict[str, Any]], options: tuple[str, ...]
) -> None:
    """Of a file that knows only every second column, whatever the text says."""
    name = "blk.1.ffn_down.weight"
    sums = np.tile(np.array([[1e4, 1e-4]], np.float32), (1, 80))
    write_imatrix(Path("half.dat"), Importances({name: sums}, {name: np.array([1])}), ["odd"], 1, 1)
    errors = []
    for imatrix in ((), ("--imatrix", "half.dat")):
        output = Path(f"out{len(imatrix)}{'.gguf' if 'gguf' in options else ''}")
        found = quantize(tiny, *options, "-o", str(output), *imatrix)
        hf_name = "model.layers.1.mlp.down_proj.weight"
        source, made = ModelWeights(open_checkpoint(tiny)), ModelWeights(open_checkpoint(output))
        difference = values(made, hf_name) - values(source, hf_name)
        errors.append(float(np.square(difference[:, ::2]).sum()))
    assert "says nothing of model.layers.0" in found["stderr"]
    assert found["imatrix"] == "half.dat"
    if "awq" in options:  # whose scales move all columns
        assert errors[1] != errors[0]
    else:  # GPTQ searches scales by it, and then makes up for errors on the text
        assert errors[1] < (1 if "gptq" in options else 0.97) * errors[0]


def test_an_importance_matrix_of_another_model_is_refused(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    for name, columns, message in (("blk.1.ffn_down.weight", 96, "which needs 160"), ("blk.9.x.weight", 8, "names no matrix of")):
        sums = np.ones((1, columns), np.float32)
        write_imatrix(Path("other.gguf"), Importances({name: sums}, {name: np.array([1])}), ["odd"], 1, 1)
        found = quantize(tiny, "--method", "gptq", "-o", "out", "--imatrix", "other.gguf", expected=1)
        assert message in found["stderr"]


def test_the_report_says_how_close_the_result_is(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    options = ("--method", "gptq", "--check", "-o", "out", "--report", "r.html")
    found = quantize(tiny, *options)
    page = Path("r.html").read_text("utf-8")
    assert page.count("<rect") == 14
    assert page.count("<tr>") == 15
    assert all(module["name"] in page for module in found["modules"])
    for part in ("calibration", "held_out"):
        assert 0 < found["check"][part]["kl"] < 2
        assert f"KL divergence {found['check'][part]['kl']:.5f}" in page
    assert "KL divergence, held-out text" in found["stderr"]


def test_the_plan_is_what_is_done(tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path) -> None:
    plan = quantize(tiny, "--method", "awq", "--dry-run")
    assert plan["output"] == "tiny-llama-AWQ-4bit"
    assert {kind["type"] for kind in plan["kinds"]} == {"INT4 asymmetric, 32"}
    assert plan["loads_in"] == ["llmctl", "transformers with AutoAWQ or GPTQModel", "vLLM"]
    assert plan["totals"]["seconds"] > 0
    assert list(here.iterdir()) == []
    done = quantize(tiny, "--method", "awq")
    assert done["totals"]["bytes"] == plan["totals"]["bytes"]
    assert done["calibration"] == plan["calibration"] == {**plan["calibration"], "rows": 6, "tokens": 240}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "magic"), "there is no such method; methods are rtn, ptq, gptq, awq"),
        (("--format", "onnx"), "there is no such format; formats are gguf, gptq, awq, compressed-tensors"),
        (("--method", "rtn", "--save-imatrix", "x"), "--save-imatrix: rtn looks at no text"),
        (("--method", "awq", "--damping", "0.1"), "--damping is for --method gptq, not awq"),
        (("--method", "gptq", "--format", "gguf", "--group-size", "32"), "--group-size: the types of GGUF files"),
        (("--method", "gptq", "--type", "Q4_0"), "--type is for GGUF files, not --format gptq"),
        (("--method", "gptq", "--per-tensor"), "--per-tensor is for --method rtn and ptq, not gptq"),
        (("--method", "gptq", "--group-size", "64"), "--group-size 64 does not divide the 96 columns of"),
        (("--method", "awq", "--bits", "8"), "AWQ has 4-bit codes, these have 8"),
        (("--method", "gptq", "--seq-len", "129"), "--seq-len 129 is more than the 128 tokens the model was trained with"),
        (("--method", "gptq", "--max-ram", "100M"), "calibration needs 0.39 GB at least"),
        (("--method", "gptq", "--max-ram", "lots"), "--max-ram lots: expected a size like 500M or 2G"),
        (("--method", "gptq", "--report", "r.txt"), "expected a name that ends in .json or .html"),
        (("--method", "gptq", "--resume"), "--resume: there is no unfinished run for"),
        (("--resume",), "--resume: rounding to a GGUF file takes seconds"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path, options: tuple[str, ...], message: str
) -> None:
    expected = 1 if "needs" in message or "AWQ" in message else 2
    assert message in quantize(tiny, *options, expected=expected)["stderr"]
    assert list(here.iterdir()) == []


def test_a_source_with_a_number_that_is_none_is_refused_first(
    tiny: Path, tmp_path: Path, quantize: Callable[..., dict[str, Any]]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(weights, broken / "model.safetensors")
    found = quantize(broken, "--method", "gptq", "-o", "out", expected=1)
    assert "tensor 'model.layers.1.mlp.up_proj.weight' holds NaN or infinity in row 3, column 4" in found["stderr"]
    assert "Layer" not in found["stderr"]


def test_a_killed_run_goes_on_to_the_same_bytes(tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path) -> None:
    command = [sys.executable, "-m", "llmctl", "quantize", str(tiny), *SHORT, "--method", "gptq", "-o", "out"]
    quantize(tiny, "--method", "gptq", "-o", "whole")
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    first, deadline = here / ".out.work" / "layer-00000.npz", time.monotonic() + 120
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (here / "out").exists()
    if not (here / ".out.work" / "layer-00001.npz").exists():
        other = quantize(tiny, "--method", "gptq", "-o", "out", "--resume", "--bits", "3", expected=2)
        assert "different: targets" in other["stderr"]
    quantize(tiny, "--method", "gptq", "-o", "out", "--resume")
    names = sorted(path.name for path in (here / "whole").iterdir())
    assert names == sorted(path.name for path in (here / "out").iterdir())
    assert all((here / "whole" / name).read_bytes() == (here / "out" / name).read_bytes() for name in names)
    assert not (here / ".out.work").exists()


def test_activations_on_disk_and_one_lane_give_a_model_as_good(tiny: Path, quantize: Callable[..., dict[str, Any]]) -> None:
    plenty = quantize(tiny, "--method", "gptq", "-o", "plenty", "--threads", "2")
    options = ("--method", "gptq", "-o", "little", "--threads", "2")
    plan = quantize(tiny, *options, "--dry-run")
    while not plan["totals"]["activations_on_disk"]:
        limit = str(plan["totals"]["memory_bytes"] - 1)
        plan = quantize(tiny, *options, "--dry-run", "--max-ram", limit)
        assert plan["totals"]["memory_bytes"] <= int(limit)
    little = quantize(tiny, *options, "--max-ram", limit)
    assert "activations on disk" in little["stderr"]
    assert "activations on disk" not in plenty["stderr"]
    losses = [sum(module["loss"] for module in found["modules"]) for found in (plenty, little)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (("--method", "gptq"), None),
        (("--method", "gptq"), 1),
        (("--method", "awq"), None),
        (("--method", "ptq"), None),
        (("--method", "gptq", "--format", "gguf", "--type", "Q4_K_M"), None),
    ],
    ids=["gptq", "gptq with little", "awq", "ptq", "gguf"],
)
def test_no_more_memory_is_taken_than_was_planned(
    tmp_path_factory: pytest.TempPathFactory, here: Path, options: tuple[str, ...], limit: int | None
) -> None:
    """Of a model whose sums over inputs are what takes most: 4608 channels are 85 MB a sum, and there are several of them."""
    folder = tmp_path_factory.mktemp("wide") / "wide"
    make_tiny_model(folder, "llama", tokenizer="bpe", num_hidden_layers=1, intermediate_size=4608)
    command = [sys.executable, "-m", "llmctl", "quantize", str(folder), *SHORT, *options, "--threads", "2", "-o", "out", "--json"]
    if limit is not None:
        plan = json.loads(subprocess.run([*command, "--dry-run"], capture_output=True, check=True).stdout)
        command += ["--max-ram", str(plan["totals"]["memory_bytes"] - limit)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    totals = json.loads(done.stdout)["totals"]
    assert totals["peak_memory_bytes"] <= totals["memory_bytes"]
    assert totals["peak_memory_bytes"] > 0.75 * totals["memory_bytes"], "nor much less"
    if limit is not None:
        assert totals["memory_bytes"] <= int(command[-1])


def test_a_size_decides_the_types(tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path) -> None:
    quantize(tiny, "--method", "gptq", "--format", "gguf", "--type", "Q5_0", "-o", "uniform.gguf")
    size = (here / "uniform.gguf").stat().st_size + 1000
    found = quantize(tiny, "--method", "gptq", "--format", "gguf", "--target-size", f"{size / 1000}K", "-o", "fitted.gguf")
    assert 0.98 * size < (here / "fitted.gguf").stat().st_size <= size
    assert "Types by measurement" in found["stderr"]
    types = {entry.format.name for entry in open_checkpoint(here / "fitted.gguf").entries()} - {"F32"}
    assert len(types) > 1
    assert distance(here / "fitted.gguf", tiny) < 1.1 * distance(here / "uniform.gguf", tiny)


def test_bits_a_weight_and_a_plan_for_them(tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path) -> None:
    options = ("--method", "ptq", "--format", "gguf", "--target-bpw", "6", "-o", "out.gguf")
    quantize(tiny, *options, "--dry-run")
    assert not (here / "out.gguf").exists()
    quantize(tiny, *options)
    entries = list(open_checkpoint(here / "out.gguf").entries())
    assert 5.9 < 8 * sum(entry.nbytes for entry in entries) / sum(int(np.prod(entry.shape)) for entry in entries) <= 6


@pytest.mark.parametrize(("family", "method"), [("mixtral", "ptq"), ("qwen3_moe", "gptq"), ("deepseek_v3", "ptq")])
def test_a_size_decides_the_types_of_experts(
    tmp_path_factory: pytest.TempPathFactory, quantize: Callable[..., dict[str, Any]], here: Path, family: str, method: str
) -> None:
    """The experts of a layer are one tensor in the file, of one type, and it computes what the model does."""
    sliding = {"use_sliding_window": False, "mlp_only_layers": []} if family == "qwen3_moe" else {}
    folder = tmp_path_factory.mktemp("sized") / family
    make_tiny_model(folder, family, tokenizer="bpe", num_hidden_layers=2, **sliding)
    plain = quantize(folder, "--method", method, "--format", "gguf", "--type", "Q5_0", "-o", "plain.gguf")
    size = (here / "plain.gguf").stat().st_size + 1000
    found = quantize(folder, "--method", method, "--format", "gguf", "--target-size", f"{size / 1000}K", "-o", "sized.gguf")
    assert 0.97 * size < (here / "sized.gguf").stat().st_size <= size
    assert {module["name"] for module in found["modules"]} == {module["name"] for module in plain["modules"]}
    entries = {entry.name: entry.format.name for entry in open_checkpoint(here / "sized.gguf").entries()}
    assert entries["blk.1.ffn_gate_exps.weight"] == entries["blk.1.ffn_up_exps.weight"]
    assert distance(here / "sized.gguf", folder) < 1.2 * distance(here / "plain.gguf", folder)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--method", "rtn", "--target-size", "1M"), "rtn does not"),
        (("--method", "gptq", "--target-size", "1M"), "--target-size is for GGUF files"),
        (("--method", "gptq", "--format", "gguf", "--target-size", "1M", "--target-bpw", "4.5"), "contradict each other"),
        (("--method", "gptq", "--format", "gguf", "--target-bpw", "4.5", "--type", "Q4_0"), "contradict each other"),
        (("--method", "gptq", "--format", "gguf", "--target-size", "1K"), "than the size that was asked for"),
        (("--method", "gptq", "--format", "gguf", "--target-size", "much"), "expected a size like"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    tiny: Path, quantize: Callable[..., dict[str, Any]], options: tuple[str, ...], expected: str
) -> None:
    assert expected in quantize(tiny, *options, expected=2)["stderr"]


def test_the_head_is_fitted_too(tiny: Path, quantize: Callable[..., dict[str, Any]], here: Path) -> None:
    for method in ("rtn", "gptq"):
        options = () if method == "rtn" else ("--format", "gguf")
        code = main(["quantize", str(tiny), "--method", method, *options, "--type", "Q4_0", "--pure", "-o", f"{method}.gguf",
                     *(SHORT if method == "gptq" else [])])  # fmt: skip
        assert code == 0
    heads = [open_checkpoint(here / f"{method}.gguf").read("output.weight").blocks for method in ("rtn", "gptq")]
    assert not np.array_equal(*heads)

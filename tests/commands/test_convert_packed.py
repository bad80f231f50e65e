"""Packed checkpoints on the command line: run on either backend, measured, turned into each other and into GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from make_packed_model import Choices, make_packed_model
from make_tiny_model import make_tiny_model

RunLlmctl = Callable[..., "CompletedProcess[str]"]
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    tiny = make_tiny_model(folder / "tiny", "llama", tokenizer="bpe", **SIZES)
    choices = {
        "awq": Choices("awq", 4, 32, symmetric=False),
        "gptq": Choices("gptq", 4, 64),
        "ordered": Choices("gptq", 4, 32, act_order=True),
        "fp8": Choices("fp8", scales="block"),
    }
    made = {name: make_packed_model(tiny, folder / name, one, values=folder / f"{name}-values") for name, one in choices.items()}
    return made | {f"{name}-values": folder / f"{name}-values" for name in choices}


@pytest.mark.parametrize("name", ["awq", "ordered", "fp8"])
def test_run_says_the_same_on_both_backends(llmctl: RunLlmctl, models: dict[str, Path], name: str) -> None:
    ask = ("the house in", "--temp", 0, "-n", 6, "--no-chat", "-q")
    expected = llmctl("run", models[f"{name}-values"], *ask, "--backend", "reference")
    assert expected.returncode == 0, expected.stderr
    for choices in (("--backend", "reference"), ("--backend", "native", "--activations", "float", "--kv-type", "f32")):
        done = llmctl("run", models[name], *ask, *choices)
        assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr


def test_what_float8_costs_is_on_stderr(llmctl: RunLlmctl, models: dict[str, Path]) -> None:
    done = llmctl("run", models["fp8"], "the", "--temp", 0, "-n", 2, "--no-chat", "--backend", "native")
    assert done.returncode == 0
    assert "no kernel reads F8_E4M3 as it is stored here: unpacked to float32" in done.stderr


def test_eval_finds_no_difference_to_the_values(llmctl: RunLlmctl, models: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the house in the wood is old and the house is near the wood " * 12)
    options = ("--text", text, "-c", 32, "--chunks", 2, "--backend", "reference", "--json")
    done = llmctl("eval", models["ordered"], "--against", models["ordered-values"], *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["comparison"]["kl_max"] < 1e-9


def test_bench_and_inspect_count_weights(llmctl: RunLlmctl, models: dict[str, Path]) -> None:
    found = json.loads(llmctl("inspect", models["gptq"], "--json").stdout)
    plain = json.loads(llmctl("inspect", models["gptq-values"], "--json").stdout)
    assert found["parameters"] == plain["parameters"]
    assert {"INT4"} < {entry["type"] for entry in found["types"]}
    done = llmctl("bench", models["gptq"], "-p", 8, "-n", 0, "-r", 1, "-o", "json")
    row = json.loads(done.stdout)
    row = row["results"][0] if isinstance(row, dict) else row[0]
    assert row["model_n_params"] == plain["parameters"]


def test_convert_between_layouts(llmctl: RunLlmctl, models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    planned = llmctl("convert", models["awq"], "--to", "gptq", "-o", output, "--dry-run")
    assert planned.returncode == 0
    assert planned.stdout.startswith(f"would write {output}: ")
    assert "4 bits in groups of 32) from awq as gptq, no value changed" in planned.stdout
    assert not output.exists()
    done = llmctl("convert", models["awq"], "--to", "gptq", "-o", output)
    assert (done.returncode, done.stdout) == (0, f"{output}\n")
    again = llmctl("convert", output, "--to", "awq", "-o", tmp_path / "back", "--json")
    report = json.loads(again.stdout)
    assert (report["layout"], report["source_layout"], report["lossless"]) == ("awq", "gptq", True)
    same = llmctl("verify", tmp_path / "back", "--against", models["awq"])
    assert same.returncode == 0, same.stdout
    assert "identical" in same.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("ordered", "--to", "awq"), 1, "AWQ has no activation order"),
        (("fp8", "--to", "gptq"), 1, "holds F8_E4M3, gptq is of whole numbers"),
        (("gptq-values", "--to", "awq"), 1, "no weight here is quantized"),
        (("gptq", "--to", "awq", "--type", "Q4_0"), 2, "--to awq keeps the codes as they are"),
        (("gptq", "--to", "exl2"), 2, "--to exl2"),
    ],
)
def test_refusals_are_one_line(
    llmctl: RunLlmctl, models: dict[str, Path], tmp_path: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = llmctl("convert", models[arguments[0]], *arguments[1:], "-o", tmp_path / "out")
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_convert_to_gguf_reports_what_became_of_the_codes(llmctl: RunLlmctl, models: dict[str, Path], tmp_path: Path) -> None:
    done = llmctl("convert", models["gptq"], "-o", tmp_path / "exact.gguf", "--json")
    report = json.loads(done.stdout)
    assert {entry["type"] for entry in report["kept_codes"]} == {"Q4_0"}
    assert not any(entry["rounding"] for entry in report["kept_codes"])
    assert not report["requantized"]
    done = llmctl("convert", models["ordered"], "-o", tmp_path / "again.gguf", "--json")
    report = json.loads(done.stdout)
    assert len(report["requantized"]) == len({*report["requantized"]}) > 0
    assert not report["kept_codes"]
    assert "activation order" in done.stderr

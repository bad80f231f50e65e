"""On a CPU with the native kernels no command imports torch, which alone takes longer than a first answer should."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.kernels.backend import default_kv_type
from llmctl.kernels.native import why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="the native extension is not built")
Try = Callable[..., str]


@pytest.fixture
def trap(tmp_path: Path) -> dict[str, str]:
    """An environment in which importing torch or triton ends the program there and then."""
    for name in ("torch", "triton"):
        (tmp_path / f"{name}.py").write_text(f"import os; os.write(2, b'{name} was imported'); os._exit(97)")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def without_torch(llmctl, trap: dict[str, str], scripted: Path, tmp_path: Path) -> Try:
    """Runs the console script in the trap and returns its stdout."""

    def run(*arguments: object, **options: object) -> str:
        done = llmctl(*arguments, env={**trap, "LLMCTL_MODEL": str(scripted)}, cwd=tmp_path, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_the_trap_works(llmctl, trap: dict[str, str], scripted: Path) -> None:
    done = llmctl("run", scripted, "What?", "--backend", "reference", env=trap)
    assert (done.returncode, done.stderr) == (97, "torch was imported")


def test_run(without_torch: Try, scripted: Path) -> None:
    assert without_torch("run", scripted, "What?", "-q") == "Paris is the answer.\n"
    answer = json.loads(without_torch("run", scripted, "What?", "--json", "--temp", "0.7", "--top-k", "5", "--seed", "3"))
    assert (answer["backend"], answer["activations"], answer["kv_type"]) == ("native", "int8", default_kv_type("native"))
    assert without_torch("run", scripted, "-q", input="What?") == "Paris is the answer.\n"


@pytest.mark.parametrize("choice", [("--kv-type", "f32"), ("--activations", "float"), ("-t", "1"), ("--backend", "native")])
def test_run_with_choices(without_torch: Try, scripted: Path, choice: tuple[str, str]) -> None:
    assert without_torch("run", scripted, "What?", "-q", *choice) == "Paris is the answer.\n"


def test_verify(without_torch: Try, scripted: Path) -> None:
    assert "tokenizer  ok" in without_torch("verify", scripted)
    assert without_torch("verify", scripted, "--against", scripted, "-q").splitlines()[-1].split()[-1] == "identical"


def test_bench(without_torch: Try, scripted: Path) -> None:
    rows = json.loads(without_torch("bench", scripted, "-p", "4", "-n", "2", "-r", "1", "-o", "json", "-q"))
    assert [row["backends"] for row in rows] == ["native", "native"]


def test_eval(without_torch: Try, scripted: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three " * 20)
    options = ("--text", "text.txt", "-c", "32", "--chunks", "1", "--json", "-q")
    report = json.loads(without_torch("eval", scripted, *options, "--against-activations", "float"))
    assert report["comparison"]["kl"]["value"] >= 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        *((command, "--help") for command in ("run", "bench", "eval", "quantize", "convert", "inspect", "doctor")),
        ("doctor",),
        ("inspect",),
        ("inspect-kv",),
        ("models", "list", "--json"),  # which says something of an empty store, too
    ],
)
def test_what_computes_nothing(without_torch: Try, arguments: tuple[str, ...]) -> None:
    assert without_torch(*arguments)


def test_quantize_and_convert(without_torch: Try, scripted: Path, tmp_path: Path) -> None:
    without_torch("convert", scripted, "-o", "converted.gguf", "-q")
    without_torch("quantize", scripted, "--method", "rtn", "--bits", "8", "-o", "quantized.gguf", "-q")
    assert (tmp_path / "converted.gguf").exists()
    assert (tmp_path / "quantized.gguf").exists()

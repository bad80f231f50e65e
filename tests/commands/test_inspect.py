"""`llmctl inspect` as a process, on files the test wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter

HOSTILE = "\x1b]0;owned\x07\x1b[2Jline\nbreak\u202ereversed\x9b31m"


def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llmctl", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, encoding="utf-8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """96 elements as Q4_0 (54 bytes) and 3 as F32 (12 bytes)."""
    metadata = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.tokens": [f"token{n}" for n in range(17)],
        "tokenizer.ggml.scores": np.arange(17, dtype=np.float32),
        "short": [1, 2],
        "tokenizer.chat_template": "{{ messages }}" * 50,
        f"key {HOSTILE}": f"value {HOSTILE}",
    }
    path = tmp_path / "model.gguf"
    with GgufWriter(path, metadata) as writer:
        writer.declare("w\x1b[31m", FORMATS["Q4_0"], (3, 32))
        writer.declare("norm", FORMATS["F32"], (3,))
        writer.write("w\x1b[31m", QuantTensor(FORMATS["Q4_0"], (3, 32), np.zeros((3, 18), np.uint8)))
        writer.write("norm", np.ones(3, np.float32))
    return path


def test_text(model: Path) -> None:
    done = inspect(model, "--tensors")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    for expected in [
        "path " + str(model),
        "kind gguf version 3, alignment 32",
        "architecture llama",
        f"files 1, {model.stat().st_size / 1000:.1f} kB ({model.stat().st_size} bytes)",
        "tensors 2, 66 B",
        "parameters 99 (0.00 M)",
        "bits/weight 5.33",
        "Q4_0 1 96 54 B 4.50",
        "F32 1 3 12 B 32.00",
        "llama.attention.layer_norm_rms_epsilon 1e-06",
        "short [1, 2]",
        "norm F32 3 12",
        "'w\\x1b[31m' Q4_0 3 × 32 54",
    ]:
        assert expected.split() in lines
    assert "string[17]: 'token0', 'token1', " in done.stdout
    assert "'token7', …" in done.stdout
    assert "token8" not in done.stdout
    assert "float32[17]: 0.0, 1.0" in done.stdout
    assert "(700 characters)" in done.stdout


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(model: Path) -> None:
    done = inspect(model, "--tensors")
    assert not set(done.stdout) & set("\x1b\x07\x9b\u202e\r")
    assert r"'key \x1b]0;owned\x07\x1b[2Jline\nbreak\u202ereversed\x9b31m'" in done.stdout


def test_json(model: Path) -> None:
    done = inspect(model, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["version"] == 1
    assert {key: report[key] for key in ("path", "kind", "architecture", "gguf_version", "alignment")} == {
        "path": str(model), "kind": "gguf", "architecture": "llama", "gguf_version": 3, "alignment": 32,
    }  # fmt: skip
    assert (report["parameters"], report["tensor_bytes"]) == (99, 66)
    assert report["bits_per_weight"] == pytest.approx(66 * 8 / 99)
    assert report["files"] == [{"path": str(model), "bytes": model.stat().st_size}]
    assert report["types"][0] == {"type": "Q4_0", "tensors": 1, "parameters": 96, "bytes": 54, "bits_per_weight": 4.5}
    tensor = report["tensors"][1]
    assert (tensor["name"], tensor["type"], tensor["shape"], tensor["bytes"]) == ("norm", "F32", [3], 12)
    assert model.read_bytes()[tensor["offset"] : tensor["offset"] + 12] == np.ones(3, np.float32).tobytes()
    metadata = report["metadata"]
    assert metadata["short"] == [1, 2]
    assert metadata["tokenizer.ggml.tokens"] == {
        "array": "string", "length": 17, "first": [f"token{n}" for n in range(8)],
    }  # fmt: skip
    assert len(metadata["tokenizer.chat_template"]) == 700
    assert metadata[f"key {HOSTILE}"] == f"value {HOSTILE}"


def test_hugging_face_folder(tmp_path: Path) -> None:
    save_file({"w": np.zeros((2, 4), np.float16)}, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "head_dim": 256}')
    report = json.loads(inspect(tmp_path, "--json").stdout)
    assert (report["kind"], report["architecture"], report["parameters"]) == ("safetensors", "gemma3_text", 8)
    assert report["config"] == {"model_type": "gemma3_text", "head_dim": 256}
    assert report["metadata"] == {"format": "pt"}
    done = inspect(tmp_path)
    assert "head_dim    256" in done.stdout
    assert "gguf" not in done.stdout


def test_no_tensors_and_no_architecture(tmp_path: Path) -> None:
    with GgufWriter(tmp_path / "vocabulary.gguf", {}):
        pass
    done = inspect(tmp_path / "vocabulary.gguf")
    assert done.returncode == 0
    assert "bits/weight   none" in done.stdout
    assert "architecture  not stated" in done.stdout


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "the file is empty (0 bytes)"),
    (b"GGUF" + bytes(4), "GGUF version 0 is not read"),
    (b"hello", "this is a text file, not a model"),
])  # fmt: skip
def test_errors_are_one_line_on_stderr(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    done = inspect(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"llmctl: error: {path}: {reason}")
    assert done.stderr.count("\n") == 1

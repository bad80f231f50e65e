"""`llmctl verify`: streams, exit codes, JSON, manifests, comparison."""

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
from safetensors.numpy import load_file, save_file


@pytest.fixture
def folder(scripted: Path, tmp_path: Path) -> Path:
    """A copy of the scripted model without its zeros, which may be changed."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in scripted.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change(copy, **{name: weight + np.float32(1e-3) for name, weight in load_file(copy / "model.safetensors").items()})
    return copy


def change(folder: Path, **tensors: np.ndarray) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **tensors}, folder / "model.safetensors")


def test_a_sound_model(call: Callable[..., Any], folder: Path) -> None:
    done = call("verify", folder)
    assert done.code == 0, done.err
    lines = [line.split(maxsplit=1) for line in done.out.splitlines()]
    assert [name for name, _ in lines] == ["CHECK", "structure", "values", "groups", "model", "tokenizer", "manifest"]
    assert lines[1][1].startswith("ok: safetensors, 1 file, 12 tensors, ")
    assert {text for _, text in lines[2:6]} == {"ok"}
    assert done.err == f"Checking {folder}\n"
    assert call("verify", folder, "--quiet").err == ""


def test_a_damaged_model(call: Callable[..., Any], folder: Path) -> None:
    weight = load_file(folder / "model.safetensors")["model.norm.weight"]
    weight[5] = np.nan
    change(folder, **{"model.norm.weight": weight})
    done = call("verify", folder, "-q")
    assert done.code == 1
    assert "error: tensor 'model.norm.weight': F32: 1 of " in done.out
    assert done.err == f"llmctl: error: {folder}: not sound: 1 error\n"
    report = json.loads(call("verify", folder, "--json").out)
    assert (report["version"], report["ok"], report["kind"]) == (1, False, "safetensors")
    assert [found["tensor"] for found in report["findings"]] == ["model.norm.weight"]
    assert {check["name"]: check["status"] for check in report["checks"]}["values"] == "error"


def test_zeros_are_no_error(call: Callable[..., Any], scripted: Path) -> None:
    done = call("verify", scripted)
    assert done.code == 0
    assert "warning: tensor 'model.layers.0.mlp.down_proj.weight': F32: all zeros" in done.out


@pytest.mark.parametrize("content", [b"", b"GGUF", b"{}", b"\x80\x04."])
def test_files_that_are_no_model(call: Callable[..., Any], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)
    done = call("verify", tmp_path / "bad.gguf", "-q")
    assert done.code == 1
    assert "structure  1 error" in done.out
    assert len(done.err.splitlines()) == 1
    assert json.loads(call("verify", tmp_path / "bad.gguf", "--json").out)["ok"] is False


def test_wrong_usage(call: Callable[..., Any], folder: Path) -> None:
    missing = call("verify", folder / "nothing.gguf")
    assert (missing.code, missing.out) == (1, "")
    assert call("verify", folder, "other.json").code == 2
    assert call("verify", folder, "--against", folder, "--write-manifest").code == 2
    assert call("verify", folder, "--force").code == 2
    assert call("verify", folder, "--manifest", folder / "nothing.json").code == 1
    assert "no such file" in call("verify", folder, "--manifest", folder / "nothing.json").err


def test_manifests(call: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    target = folder / "model.safetensors.manifest.json"
    assert call("verify", folder, "--write-manifest", "-q") == (0, f"{target}\n", "")
    assert f"ok: as {target} says" in call("verify", folder).out
    assert "exists already; --force replaces it" in call("verify", folder, "--write-manifest").err
    assert call("verify", folder, "--write-manifest", "--force").code == 0
    assert call("verify", folder, "--write-manifest", tmp_path / "x.json", "-q").out == f"{tmp_path / 'x.json'}\n"
    target.unlink()
    change(folder, **{"model.norm.weight": load_file(folder / "model.safetensors")["model.norm.weight"] * 2})
    done = call("verify", folder, "--manifest", tmp_path / "x.json")
    assert done.code == 1
    assert "error: tensor 'model.norm.weight': its bytes have changed" in done.out
    assert call("verify", folder, "--manifest", tmp_path / "x.json", "--json").code == 1


def test_no_manifest_of_a_damaged_model(call: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    """It would say of the damage that it is how the file should be."""
    change(folder, **{"model.norm.weight": np.full(272, np.nan, np.float32)})
    assert call("verify", folder, "--write-manifest", tmp_path / "x.json").code == 1
    assert not (tmp_path / "x.json").exists()


def test_comparison(call: Callable[..., Any], folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "q.gguf"
    assert call("convert", folder, "-o", output, "--type", "Q8_0").code == 0
    done = call("verify", output, "--against", folder, "-q")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].split() == ["TENSOR", "TYPE", "AGAINST", "MAX", "ERROR", "RELATIVE", "RMS", "SQNR", "dB"]
    assert lines[-1].startswith("all 12 ")
    report = json.loads(call("verify", output, "--against", folder, "--json").out)
    assert (report["same_tensors"], report["identical"], report["totals"]["tensors"]) == (True, False, 12)
    norm = next(found for found in report["tensors"] if found["name"] == "model.norm.weight")
    assert norm == {
        "name": "model.norm.weight", "type": "F32", "against_type": "F32", "shape": [272],
        "identical": True, "max_error": 0.0, "relative_rms": 0.0, "sqnr_db": None, "nonfinite": 0,
    }  # fmt: skip


def test_comparison_of_models_with_other_tensors(call: Callable[..., Any], folder: Path, scripted: Path) -> None:
    change(folder, **{"extra.weight": np.ones((2, 2), np.float32)})
    done = call("verify", folder, "--against", scripted, "-q")
    assert done.code == 1
    assert f"only in {folder}: extra.weight" in done.out
    assert "1 tensors are not in both files or not of one shape" in done.err


def test_interrupt(tmp_path: Path, llmctl_script: Path) -> None:
    """Ctrl-C ends it at once, silently, with 130, whatever the threads are at."""
    save_file({f"w{i}": np.ones((4096, 4096), np.float32) for i in range(4)}, tmp_path / "m.safetensors")
    command = [llmctl_script, "verify", tmp_path / "m.safetensors", "--write-manifest", "-t", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "Hashing" not in process.stderr.readline():
        pass
    started = time.perf_counter()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")
    assert time.perf_counter() - started < 2
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_memory_is_a_few_slices(tmp_path: Path) -> None:
    """Half a gigabyte of tensors, checked and hashed by a process that may not have much more than it began with."""
    with (tmp_path / "m.safetensors").open("wb") as file:
        size = 512 << 20
        header = json.dumps({"w": {"dtype": "F16", "shape": [1 << 14, 1 << 14], "data_offsets": [0, size]}}).encode()
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    script = (
        "import sys\nfrom pathlib import Path\nfrom llmctl.quant.verify import verify\n"
        "peak = lambda: int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) << 10\n"
        "before = peak(); report = verify(Path(sys.argv[1]), threads=2); print(report.ok, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "m.safetensors"], capture_output=True, text=True, check=True)
    ok, grown = done.stdout.split()
    assert ok == "True"
    assert int(grown) < 64 << 20


def test_closed_output(folder: Path, llmctl_script: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([llmctl_script, "verify", folder, "-q"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")

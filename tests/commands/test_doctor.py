"""llmctl doctor tells the truth about this machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from llmctl.commands import options
from llmctl.kernels import backend

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_document_is_true(llmctl: Run, tmp_path: Path) -> None:
    done = llmctl("doctor", "--json", env={"LLMCTL_HOME": str(tmp_path / "not" / "there")})
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["version"] == 1
    assert report["llmctl"] == importlib.metadata.version("llmctl")
    assert Path(report["executable"]).samefile(sys.executable)
    assert report["cpu"]["usable_cores"] == len(os.sched_getaffinity(0))
    assert report["memory_bytes"]["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert report["store"]["folder"] == str(tmp_path / "not" / "there" / "models")
    assert abs(report["store"]["free_bytes"] - shutil.disk_usage(tmp_path).free) < 2**33
    assert report["packages"]["torch"] == importlib.metadata.version("torch")
    assert "pytest" not in report["packages"]
    assert report["cuda_devices"] is None, "not asked"
    assert report["capabilities"] == json.loads(json.dumps([asdict(c) for c in backend.capabilities()]))


def test_deep_asks_torch(llmctl: Run) -> None:
    report = json.loads(llmctl("doctor", "--deep", "--json").stdout)
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert (len(report["cuda_devices"]), report["torch_error"]) == (devices, None)


def test_a_broken_torch_is_a_finding(llmctl: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    done = llmctl("doctor", "--deep", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch cannot be used: ImportError: libcudart.so.13: cannot open" in done.stdout


def test_without_deep_torch_is_not_imported(llmctl: Run, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = llmctl("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_has_every_op_with_its_formats(llmctl: Run) -> None:
    lines = llmctl("doctor").stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("OP "))
    assert lines[header].split() == ["OP", "BACKEND", "HERE", "BY", "FORMATS"]
    expected = [(c.op, c.backend, list(c.formats)) for c in backend.capabilities()]
    rows = [line.split() for line in lines[header + 1 :]]
    assert [
        (row[0], row[1], row[-len(formats) :]) for row, (_, _, formats) in zip(rows, expected, strict=True)
    ] == expected


def test_the_shared_options_name_what_the_kernels_have() -> None:
    assert get_args(options.Backend) == backend.BACKENDS
    assert get_args(options.KvType) == backend.KV_TYPES

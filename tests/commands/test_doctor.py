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
from llmctl.kernels.kv_types import KV_TYPES
from llmctl.runtime import machine

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_the_document_is_true(llmctl: Run, tmp_path: Path) -> None:
    done = llmctl("doctor", "--json", env={"LLMCTL_HOME": str(tmp_path / "not" / "there")})
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["version"] == 1
    assert report["llmctl"] == importlib.metadata.version("llmctl")
    assert Path(report["executable"]).samefile(sys.executable)
    assert report["cpu"]["usable_cores"] == len(os.sched_getaffinity(0)) >= report["cpu"]["physical_cores"] >= 1
    assert report["default_threads"] == machine.default_threads()
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
    assert lines[header].split() == ["OP", "BACKEND", "HERE", "FORMATS"]
    expected = [[c.op, c.backend, "yes" if c.available else "no", *c.formats] for c in backend.capabilities()]
    assert [line.split() for line in lines[header + 1 :]] == expected


def test_every_backend_has_a_line_that_says_what_serves_it_or_why_nothing_does(llmctl: Run) -> None:
    lines = [line.split(maxsplit=1) for line in llmctl("doctor").stdout.splitlines() if line]
    for capability in backend.capabilities():
        assert [capability.backend, ("" if capability.available else "no: ") + capability.reason] in lines


def test_an_extension_that_cannot_be_loaded_is_named_with_its_fault(llmctl: Run, broken_extension: dict[str, str]) -> None:
    lines = llmctl("doctor", env=broken_extension).stdout.splitlines()
    assert any(line.startswith("native ") and "no: " in line and "the fault of the test" in line for line in lines)
    assert [line.split()[2] for line in lines if line.split()[1:2] == ["native"]] == ["no"] * 11


def test_the_shared_options_name_what_the_kernels_have() -> None:
    assert get_args(options.Backend) == (backend.AUTO, *backend.BACKENDS)
    assert set(options.KV_TYPE_SYNTAX.removesuffix(" or k=TYPE,v=TYPE").split("|")) == set(KV_TYPES)
    assert get_args(options.Activations) == backend.ACTIVATIONS
    assert get_args(options.Dtype) == backend.DTYPES

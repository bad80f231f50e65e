"""Where quickstart takes torch from, on machines of every kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch_source

ROOT = Path(__file__).parents[2]
OFFERED = ["2.14.0", "2.13.0", "2.12.1", "2.10.0"]


@pytest.fixture
def bare_linux(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Linux machine without torch, without a GPU, whose pip knows plain builds only, and with a reachable index."""
    for name, answer in {
        "is_installed": False,
        "has_nvidia_device": False,
        "available_versions": OFFERED,
        "is_reachable": True,
    }.items():
        monkeypatch.setattr(torch_source, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch_source.platform, "system", lambda: "Linux")
    return monkeypatch


def test_a_bare_linux_machine_asks_the_index_of_cpu_builds(bare_linux: pytest.MonkeyPatch) -> None:
    assert torch_source.cpu_index("torch>=2.11,<2.14") == torch_source.CPU_INDEX


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("is_installed", True),
        ("has_nvidia_device", True),
        ("is_reachable", False),
        ("available_versions", ["2.13.0+cpu", *OFFERED]),
    ],
)
def test_otherwise_pip_is_left_alone(bare_linux: pytest.MonkeyPatch, name: str, answer: object) -> None:
    bare_linux.setattr(torch_source, name, lambda *_: answer)
    assert torch_source.cpu_index("torch>=2.11,<2.14") is None


def test_off_linux_the_plain_build_is_the_cpu_build(bare_linux: pytest.MonkeyPatch) -> None:
    bare_linux.setattr(torch_source.platform, "system", lambda: "Darwin")
    assert torch_source.cpu_index("torch>=2.11,<2.14") is None


def test_a_cpu_build_outside_the_range_does_not_count(bare_linux: pytest.MonkeyPatch) -> None:
    bare_linux.setattr(torch_source, "available_versions", lambda _: ["2.14.0+cpu", *OFFERED])
    assert torch_source.cpu_index("torch>=2.11,<2.14") == torch_source.CPU_INDEX


def test_versions_are_compared_as_pip_does() -> None:
    assert torch_source.best_version("torch>=2.9,<2.14", ["2.9.1", "2.13.0", "2.13.0+cpu", "2.14.0"]) == "2.13.0+cpu"
    assert torch_source.best_version("torch>=3", OFFERED) is None


def test_an_index_that_does_not_answer_is_not_reachable() -> None:
    assert not torch_source.is_reachable("http://127.0.0.1:9")


def test_the_requirement_is_read_from_the_project() -> None:
    command = [sys.executable, ROOT / "scripts" / "torch_source.py"]
    done = subprocess.run([*command, "requirement", ROOT / "pyproject.toml"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch>=2.")
    done = subprocess.run([*command, "index", done.stdout.strip()], capture_output=True, text=True, check=True)
    assert done.stdout == "\n", "torch is installed here: nothing to choose"

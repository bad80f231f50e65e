#!/usr/bin/env python3
"""Where torch should come from. Runs in a fresh virtual environment: needs nothing but Python and its pip.

    torch_source.py requirement PYPROJECT    prints the torch requirement of a pyproject.toml
    torch_source.py index REQUIREMENT        prints an extra package index with CPU builds, or nothing where none is
                                             needed: torch is there, a GPU is there, pip's own sources have a CPU build,
                                             or the index cannot be reached

The CUDA build that pip takes otherwise works on a CPU too, but weighs gigabytes.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PROBE_SECONDS = 5


def torch_requirement(pyproject: Path) -> str:
    """The line of the dependencies that asks for torch (read as text: Python 3.10 has no TOML reader)."""
    found = re.search(r'^\s*"(torch\s*[<>=!~][^"]*)"', pyproject.read_text("utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{pyproject}: no torch requirement found")
    return found[1]


def best_version(requirement: str, available: list[str]) -> str | None:
    """The newest version that the requirement admits, local builds (+cpu) before the plain one, as pip chooses."""
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.version import Version

    admitted = Requirement(requirement).specifier.filter(available)
    return max(admitted, key=Version, default=None)


def available_versions(package: str) -> list[str]:
    """What pip's configured sources offer; empty if they cannot be asked."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def has_nvidia_device() -> bool:
    """Whether a driver and a device are there."""
    if Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists():  # the second is a GPU under WSL
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def is_installed(requirement: str) -> bool:
    """Whether a torch that the requirement admits is installed already."""
    try:
        return best_version(requirement, [importlib.metadata.version("torch")]) is not None
    except importlib.metadata.PackageNotFoundError:
        return False


def is_reachable(index: str) -> bool:
    """Whether the index answers soon for torch."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=PROBE_SECONDS) as answer:
            return answer.status == 200
    except OSError:
        return False


def cpu_index(requirement: str) -> str | None:
    """The extra index to take torch from, None where pip does right by itself."""
    if platform.system() != "Linux" or is_installed(requirement) or has_nvidia_device():
        return None  # off Linux the plain build is the CPU build
    best = best_version(requirement, available_versions("torch"))
    if best is not None and best.endswith("+cpu"):
        return None
    return CPU_INDEX if is_reachable(CPU_INDEX) else None


def main(arguments: list[str]) -> int:
    """Answer one question on stdout."""
    question, value = arguments
    print(torch_requirement(Path(value)) if question == "requirement" else cpu_index(value) or "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

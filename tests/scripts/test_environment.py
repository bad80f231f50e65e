"""What the two scripts do before they start the work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script after scripts/environment.sh, under the options both scripts set."""
    code = f'set -euo pipefail; source "{ROOT}/scripts/environment.sh"; {script}'
    return subprocess.run(["/bin/bash", "-c", code], capture_output=True, text=True, env=env, check=False)


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A PATH with no Python on it."""
    for tool in ("dirname", "cat"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or "")
    return tmp_path


def add_python(folder: Path, name: str, version: str) -> None:
    """A stand-in that answers the suitability check as a Python of this version would."""
    fake = f"import sys; sys.version_info = {tuple(map(int, version.split('.')))}; exec(sys.argv[2])"
    script = f'#!/bin/bash\nexec {sys.executable} -c "{fake}" "$@"\n'
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def test_without_a_suitable_python_it_says_what_is_missing(bin_folder: Path) -> None:
    add_python(bin_folder, "python3", "3.9.18")
    done = bash("find_python", PATH=str(bin_folder))
    assert (done.returncode, done.stdout) == (1, "")
    assert "No suitable Python: 3.10 to 3.14 with venv and pip is needed" in done.stderr


def test_the_first_suitable_python_is_taken(bin_folder: Path) -> None:
    add_python(bin_folder, "python3", "3.9.18")
    add_python(bin_folder, "python3.12", "3.12.1")
    add_python(bin_folder, "other", "3.11.0")
    assert bash("find_python", PATH=str(bin_folder)).stdout == f"{bin_folder}/python3.12\n"
    assert bash("find_python", PATH=str(bin_folder), PYTHON="other").stdout == f"{bin_folder}/other\n"


@pytest.fixture
def ensure(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs ensure_environment twice in a folder of its own, where pip and the choice of torch only say that they were called
    (pip also leaves an extension): what is tested is when."""
    native = tmp_path / "llmctl/kernels/native"
    native.mkdir(parents=True)
    (tmp_path / "hatch_build.py").write_text("")

    def run(pyproject: str = "one", source: str = "one", **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "pyproject.toml").write_text(pyproject)
        (native / "kernel.cpp").write_text(source)
        pip = f'echo "pip $3" $(echo "$*" | grep -o -- --no-deps); touch {native}/_native.so'
        script = f"root={tmp_path}; venv={tmp_path}; python=fake_python; install_torch() {{ echo torch; }}; "
        script += f'fake_python() {{ case "$2" in pip) {pip};; *) {sys.executable} "$@";; esac; }}; '
        script += "make_venv() { :; }; ensure_environment test; ensure_environment test"
        return bash(script, **{"PATH": os.environ["PATH"], **env})

    return run


Ensure = Callable[..., "subprocess.CompletedProcess[str]"]


def test_an_environment_that_is_up_to_date_is_left_alone(ensure: Ensure) -> None:
    first = ensure()
    assert (first.returncode, first.stdout) == (0, "torch\npip install\n"), first.stderr
    assert ensure().stdout == ""
    assert ensure(pyproject="two").stdout == "torch\npip install\n"


def test_a_changed_kernel_is_built_anew_and_nothing_else_is_installed(ensure: Ensure) -> None:
    ensure()
    changed = ensure(source="two")
    assert (changed.returncode, changed.stdout) == (0, "pip install --no-deps\n"), changed.stderr
    assert ensure(source="two").stdout == ""


def test_a_compiler_that_has_come_since_or_a_lost_extension_means_to_build(ensure: Ensure, tmp_path: Path) -> None:
    ensure()
    compiler = tmp_path / "a compiler"
    compiler.write_text("#!/bin/sh")
    compiler.chmod(0o755)
    assert ensure(CXX=str(compiler)).stdout == "pip install --no-deps\n"
    assert ensure(CXX=str(compiler)).stdout == ""
    (tmp_path / "llmctl/kernels/native/_native.so").unlink()
    assert ensure(CXX=str(compiler)).stdout == "pip install --no-deps\n"


def test_kernels_that_were_not_built_are_named_with_the_reason(ensure: Ensure, tmp_path: Path) -> None:
    (tmp_path / "llmctl/kernels/native/_not_built.txt").write_text("no compiler\n")
    assert "runs without its native kernels, slowly: no compiler" in ensure().stderr

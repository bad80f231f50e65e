"""What the two scripts do before they start the work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


def test_an_environment_that_is_up_to_date_is_left_alone(tmp_path: Path) -> None:
    def run(pyproject: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "pyproject.toml").write_text(pyproject)
        # pip and the choice of torch are replaced: what is tested is when they are called
        script = f"root={tmp_path}; venv={tmp_path}; python=fake_python; install_torch() {{ echo torch; }}; "
        script += f'fake_python() {{ case "$2" in pip) echo "pip $3";; *) {sys.executable} "$@";; esac; }}; '
        return bash(
            script + "make_venv() { :; }; ensure_environment test; ensure_environment test", PATH=os.environ["PATH"]
        )

    first = run("one")
    assert (first.returncode, first.stdout) == (0, "torch\npip install\n"), first.stderr
    assert run("one").stdout == ""
    assert run("two").stdout == "torch\npip install\n"

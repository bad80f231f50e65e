"""scripts/build_tools.sh: what a build lacks is installed, and what cannot be had is named in a line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
case "$*" in
    "-c ") exit 0 ;;
    *"import nanobind"*) exit {has_nanobind} ;;
    *pip*) echo "$@" >"{log}"; exit {pip} ;;
esac
exit 9
"""


@pytest.fixture
def ensure(tmp_path):
    """Runs ensure_build_tools with a Python that has nanobind or not, and beside it the tools named."""

    def run(*tools: str, has_nanobind: bool, pip: int = 0) -> tuple[int, str, str]:
        folder, log = tmp_path / "bin", tmp_path / "pip"
        folder.mkdir()
        (folder / "python").write_text(STUB.format(has_nanobind=int(not has_nanobind), log=log, pip=pip))
        for name in ("dirname", "sed"):
            (folder / name).symlink_to(f"/usr/bin/{name}")
        for tool in tools:
            (folder / tool).write_text("#!/bin/sh\n")
        for path in folder.iterdir():
            path.chmod(0o755)
        script = f'source "{ROOT}/scripts/build_tools.sh"; ensure_build_tools "{ROOT}" "{folder}/python"'
        command = ["/bin/bash", "-euo", "pipefail", "-c", script]
        done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr, log.read_text() if log.exists() else ""

    return run


def test_nothing_is_installed_where_all_is_there(ensure):
    assert ensure("cmake", "ninja", has_nanobind=True) == (0, "", "")


def test_what_is_missing_is_installed_as_the_project_asks_for_it(ensure):
    code, err, installed = ensure("cmake", has_nanobind=False)
    assert (code, len(err.splitlines())) == (0, 1)
    assert installed.split()[-2:] == ["nanobind>=2.4", "ninja"]


def test_what_cannot_be_installed_is_named(ensure):
    code, err, _ = ensure("cmake", "ninja", has_nanobind=False, pip=1)
    assert code == 1
    assert "need nanobind>=2.4 to be built" in err.splitlines()[-1]


def test_a_python_that_is_not_there_is_named():
    script = f'source "{ROOT}/scripts/build_tools.sh"; ensure_build_tools "{ROOT}" /nowhere/python'
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        ["No Python at /nowhere/python: run scripts/quickstart first, or set PYTHON to one."],
    )

"""The Triton kernels under triton's interpreter. Each file of cases runs in a process of its own: a process that interprets
kernels cannot compile them, and this one may have to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = sorted((Path(__file__).parent / "triton").glob("cases_*.py"))


@pytest.mark.parametrize("file", CASES, ids=[file.stem.removeprefix("cases_") for file in CASES])
def test_interpreted(file: Path) -> None:
    """All cases of the file pass; none is skipped, none is missing."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(file)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=file.parents[3], env=variables | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"\d+ passed in .*", summary), summary

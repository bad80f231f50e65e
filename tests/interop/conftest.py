"""The other engine, as a function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("ik_llama.py")
RunIkLlama = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def run_ik_llama() -> RunIkLlama:
    """Runs ik_llama.py: `run(path, prompts, max_tokens, texts=[…])` gives its answer; it failing fails the test."""

    def run(path: Path, prompts: list[list[int]], max_tokens: int, texts: tuple[str, ...] = ()) -> dict[str, Any]:
        request = {"path": str(path), "prompts": prompts, "max_tokens": max_tokens, "texts": texts}
        done = subprocess.run(
            [sys.executable, PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        )
        assert done.returncode == 0, f"ik_llama.cpp, exit {done.returncode}:\n{done.stderr[-3000:]}"
        return json.loads(done.stdout)

    return run

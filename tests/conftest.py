"""What every test may use: a clean environment, the two real models, and the command line as a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, whatever else the machine is doing: a red run means a changed program.
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

ROOT = Path(__file__).parents[1]
# Downloads are kept between runs; several clones may share one folder.
CACHE = Path(os.environ.get("LLMCTL_TEST_CACHE") or ROOT / ".cache").absolute()
MODELS = CACHE / "models"

# No test reads the user's own store, settings or hub cache, and none reaches the network unless it pulls a model.
for _name in ("LLMCTL_MODEL", "LLMCTL_DEBUG", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "HF_TOKEN", "HF_ENDPOINT"):
    os.environ.pop(_name, None)
os.environ |= {"LLMCTL_HOME": str(CACHE / "home"), "HF_HOME": str(CACHE / "huggingface"), "HF_HUB_OFFLINE": "1"}

RunLlmctl = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """scripts/test --all-kernels"""
    parser.addoption("--all-kernels", action="store_true", help="compile every configuration of the Triton kernels")


@pytest.fixture(scope="session")
def llmctl_script() -> Path:
    """The installed console script."""
    script = Path(sys.executable).with_name("llmctl")
    assert script.exists(), f"{script} is missing: install the package first (scripts/test does)"
    return script


@pytest.fixture(scope="session")
def llmctl(llmctl_script: Path) -> RunLlmctl:
    """Runs llmctl with arguments, off a terminal: `llmctl("models", "list", env={...}, input="…", cwd=…)`."""

    def run(
        *arguments: object, env: dict[str, str] | None = None, **options: object
    ) -> subprocess.CompletedProcess[str]:
        options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
        options = {"encoding": "utf-8", "timeout": 240, "check": False, **options}
        if "stdout" not in options and "stderr" not in options:
            options["capture_output"] = True
        command = [llmctl_script, *map(str, arguments)]
        return subprocess.run(command, env={**os.environ, **(env or {})}, **options)

    return run


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2 135M Instruct, Q4_1: llama family, byte-level BPE, ChatML template."""
    return _make_models("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M: gemma3 family, sliding window, SentencePiece with 262k pieces."""
    return _make_models("gemma-3-270m-Q4_K_M.gguf")


@pytest.fixture(scope="session")
def smollm2_fp16() -> Path:
    """The same SmolLM2 as a Hugging Face folder of float16 safetensors."""
    return _make_models("smollm2-135m-fp16", "--fp16")


@pytest.fixture(scope="session")
def gemma3_fp16() -> Path:
    """The same Gemma 3 as a Hugging Face folder of float16 safetensors, with tokenizer.model."""
    return _make_models("gemma3-270m-fp16", "--fp16")


def _make_models(name: str, *options: str) -> Path:
    """One of the models, made by scripts/get_models.py if it is not there yet (it locks and lands by rename)."""
    path = MODELS / name
    if not path.exists():
        command = [sys.executable, ROOT / "scripts" / "get_models.py", MODELS, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name} could not be made:\n{done.stdout}{done.stderr}"
    return path

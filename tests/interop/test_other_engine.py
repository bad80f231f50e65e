"""What `llmctl convert` and `llmctl quantize` write, read by ik_llama.cpp.

F16: the same greedy text as transformers and we give for the folder. Q8_0 and Q4_0: the other engine rounds activations to
8 bits where we compute in float32, so texts part where two tokens are close; there the logits after the prompt are compared,
by the standard deviation of the difference over their own. Measured: 0.0002 for F16, 0.02 to 0.07 for both quantized types,
while the Q4_0 model itself is 0.17 to 0.53 away from the F16 one.
"""

from __future__ import annotations

import gc
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {"smollm2": "smollm2_fp16", "gemma3-270m": "gemma3_fp16"}
# Chat with an end token, code, another script; for Gemma one that leaves the sliding window while decoding.
CHOSEN = {"smollm2": ("chat", "code", "arabic", "german"), "gemma3-270m": ("short", "code", "chinese", "crossing")}
MAX_TOKENS = 24
F16_TOLERANCE = 0.01  # largest difference of a logit; 0.004 measured
ROUNDED_ACTIVATIONS = 0.1  # relative distance, see above

pytestmark = pytest.mark.skipif(
    not (sys.platform == "linux" and platform.machine() == "x86_64"), reason="ik-llama-cpp-python has no wheel here"
)


@pytest.fixture(params=sorted(FOLDERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def folder(request: pytest.FixtureRequest, name: str) -> Path:
    return request.getfixturevalue(FOLDERS[name])


@pytest.fixture
def prompts(name: str) -> dict[str, dict[str, Any]]:
    recorded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["prompts"]
    return {key: recorded[key] for key in CHOSEN[name]}


@pytest.fixture
def f16_logits(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Prompt → ids and the logits transformers gives them after the prompt's last token, from the float16 folder."""
    with np.load(GOLDEN / f"{name}-fp16.npz") as arrays:
        return {key: (arrays[f"{key}/ids"][-1], arrays[f"{key}/logits"][-1]) for key in CHOSEN[name]}


@pytest.fixture
def written(tmp_path: Path, llmctl: Callable[..., Any]) -> Any:
    """Runs a command that writes one GGUF file and gives its path; the file does not outlive the test."""
    path = tmp_path / "written.gguf"

    def write(*arguments: object) -> Path:
        done = llmctl(*arguments, "-o", path)
        assert done.returncode == 0, done.stderr
        return path

    yield write
    path.unlink(missing_ok=True)  # half a gigabyte, which pytest would keep for three runs


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviation of the difference of two rows of logits, over that of the second."""
    return float(np.std(found - expected) / np.std(expected))


def test_f16_text_and_logits_are_the_same(
    folder: Path, prompts: dict[str, Any], f16_logits: dict[str, Any], written: Any, run_ik_llama: Any
) -> None:
    path = written("convert", folder, "--type", "F16")
    answer = run_ik_llama(path, [prompt["ids"] for prompt in prompts.values()], MAX_TOKENS)
    found = {key: given["token_ids"] for key, given in zip(prompts, answer["prompts"], strict=True)}
    assert found == {key: prompt["fp16"]["greedy"][:MAX_TOKENS] for key, prompt in prompts.items()}
    for key, given in zip(prompts, answer["prompts"], strict=True):
        ids, expected = f16_logits[key]
        np.testing.assert_allclose(np.asarray(given["logits"])[ids], expected, atol=F16_TOLERANCE, rtol=0, err_msg=key)


def test_the_converted_tokenizer_gives_the_same_ids(name: str, folder: Path, written: Any, run_ik_llama: Any) -> None:
    path = written("convert", folder, "--type", "Q8_0")
    recorded = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["prompts"]
    plain = {key: prompt for key, prompt in recorded.items() if prompt["text"] is not None}
    answer = run_ik_llama(path, [[1, 2, 3]], 1, [prompt["text"] for prompt in plain.values()])
    assert dict(zip(plain, answer["texts"], strict=True)) == {key: prompt["ids"] for key, prompt in plain.items()}


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_logits_are_the_same_up_to_rounded_activations(
    bits: int, folder: Path, prompts: dict[str, Any], f16_logits: dict[str, Any], written: Any, run_ik_llama: Any
) -> None:
    path = written("quantize", folder, "--method", "rtn", "--bits", bits)
    short = [key for key in prompts if len(prompts[key]["ids"]) < 100]
    answer = run_ik_llama(path, [prompts[key]["ids"] for key in short], 1)
    model = load_model(path, ctx_size=1024)
    for key, given in zip(short, answer["prompts"], strict=True):
        found, expected = np.asarray(given["logits"]), compute_logits(model, prompts[key]["ids"])[-1]
        assert distance(found, expected) < ROUNDED_ACTIVATIONS, key
        ids, unquantized = f16_logits[key]
        if bits == 4:  # near to our reading of this very file, not just to the model it was made of
            assert 2 * distance(found[ids], expected[ids]) < distance(found[ids], unquantized), key
    del model
    gc.collect()

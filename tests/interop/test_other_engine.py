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
from make_tiny_model import make_tiny_model

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
def recorded(name: str) -> dict[str, dict[str, Any]]:
    """Prompt → text, ids and transformers' continuations."""
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["prompts"]


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
    folder: Path, recorded: dict[str, Any], f16_logits: dict[str, Any], written: Any, run_ik_llama: Any
) -> None:
    path = written("convert", folder, "--type", "F16")
    answer = run_ik_llama(path, [recorded[key]["ids"] for key in f16_logits], MAX_TOKENS)
    for (key, (ids, expected)), given in zip(f16_logits.items(), answer["prompts"], strict=True):
        assert given["token_ids"] == recorded[key]["fp16"]["greedy"][:MAX_TOKENS], key
        np.testing.assert_allclose(np.asarray(given["logits"])[ids], expected, atol=F16_TOLERANCE, rtol=0, err_msg=key)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_files_are_read_alike(
    bits: int, folder: Path, recorded: dict[str, Any], f16_logits: dict[str, Any], written: Any, run_ik_llama: Any
) -> None:
    path = written("quantize", folder, "--method", "rtn", "--bits", bits)
    short = [key for key in f16_logits if len(recorded[key]["ids"]) < 100]
    plain = {key: prompt for key, prompt in recorded.items() if prompt["text"] is not None}
    texts = [prompt["text"] for prompt in plain.values()]
    answer = run_ik_llama(path, [recorded[key]["ids"] for key in short], 1, texts)
    assert dict(zip(plain, answer["texts"], strict=True)) == {key: prompt["ids"] for key, prompt in plain.items()}
    model = load_model(path, ctx_size=1024)
    for key, given in zip(short, answer["prompts"], strict=True):
        found, expected = np.asarray(given["logits"]), compute_logits(model, recorded[key]["ids"])[-1]
        assert distance(found, expected) < ROUNDED_ACTIVATIONS, key
        ids, unquantized = f16_logits[key]
        if bits == 4:  # near to our reading of this very file, not just to the model it was made of
            assert 2 * distance(found[ids], expected[ids]) < distance(found[ids], unquantized), key
    del model
    gc.collect()


# What both readers know: ik_llama.cpp has no longrope for these families and ignores llama3's table of factors.
PATTERN = [*["sliding_attention"] * 5, "full_attention", "sliding_attention"]  # GGUF knows no other for gemma3
GEMMA3 = {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": PATTERN}
TINY = {
    "llama-default": ("llama", {}),
    "llama-linear": ("llama", {"rope": "linear"}),
    "llama-yarn": ("llama", {"rope": "yarn"}),
    "llama-bias": ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3-default": ("gemma3", GEMMA3),
    "gemma3-linear": ("gemma3", {"rope": "linear", **GEMMA3}),
    "gemma3-yarn": ("gemma3", {"rope": "yarn", **GEMMA3}),
}
TOKENIZERS = {"llama": "bpe", "gemma3": "sentencepiece"}


@pytest.mark.parametrize("case", sorted(TINY))
def test_uneven_heads_and_scaled_rope_survive_conversion(
    tmp_path: Path, case: str, written: Any, run_ik_llama: Any
) -> None:
    family, choices = TINY[case]
    folder = make_tiny_model(tmp_path / "tiny", family, tokenizer=TOKENIZERS[family], **choices)
    path = written("convert", folder, "--type", "F32")
    ids = np.random.default_rng(5).integers(3, 384, 49).tolist()  # beyond the original context and the window
    found = run_ik_llama(path, [ids], 1)["prompts"][0]["logits"]
    np.testing.assert_allclose(found, compute_logits(load_model(folder), ids)[-1], atol=F16_TOLERANCE, rtol=0)

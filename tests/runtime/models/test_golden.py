"""The two real models, from GGUF and from float16 safetensors, against the recorded answers of transformers.

Float32 weights and cache. Logits within 1e-3 at every recorded position; greedy text identical up to 64 tokens or the end
token, all ten prompts in one batch and one of them alone. See tests/golden/README.md.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmctl.runtime.engine.engine import Engine
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.tokenizer.chat_template import encode_chat

GOLDEN = Path(__file__).parents[2] / "golden"
TOLERANCE = 1e-3
MAX_TOKENS = 64
PROMPTS = 10
ALONE = ("code",)  # also decoded by itself: in the batch its neighbours are longer and shorter
SOURCES = {
    "smollm2-gguf": "smollm2_gguf",
    "smollm2-fp16": "smollm2_fp16",
    "gemma3-270m-gguf": "gemma3_gguf",
    "gemma3-270m-fp16": "gemma3_fp16",
}


@dataclass
class Case:
    """One model from one source, loaded, beside what transformers said."""

    model: LoadedModel
    prompts: dict[str, dict[str, Any]]
    logits: dict[str, np.ndarray]
    source: str

    def greedy(self, name: str) -> list[int]:
        return self.prompts[name][self.source]["greedy"]


@pytest.fixture(scope="module", params=sorted(SOURCES))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    name, _, source = request.param.rpartition("-")
    path = request.getfixturevalue(SOURCES[request.param])
    with np.load(GOLDEN / f"{request.param}.npz") as arrays:
        logits = dict(arrays)
    prompts = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["prompts"]
    case = Case(load_model(path, ctx_size=1024), prompts, logits, source)
    assert len(prompts) == PROMPTS
    yield case
    del case.model
    gc.collect()  # a gigabyte of weights must be gone before the next model is loaded


def engine_greedy(model: LoadedModel, prompts: list[list[int]], together: int) -> list[list[int]]:
    """Greedy continuations, end token included, at most `together` sequences in a batch."""
    engine = Engine(model, max_num_seqs=together)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    sequences = [engine.add(ids, params) for ids in prompts]
    while engine.has_work:
        engine.step()
    return [sequence.completion_token_ids for sequence in sequences]


def test_our_tokenizer_gives_the_recorded_ids(case: Case) -> None:
    tokenizer = case.model.tokenizer
    for name, prompt in case.prompts.items():
        if prompt["messages"] is not None:
            ids = encode_chat(tokenizer, prompt["messages"], add_generation_prompt=True)
        else:
            ids = tokenizer.encode(prompt["text"])
        assert ids == prompt["ids"], name


def test_our_tokenizer_gives_the_recorded_text(case: Case) -> None:
    for name, prompt in case.prompts.items():
        assert case.model.tokenizer.decode(case.greedy(name)) == prompt[case.source]["text"], name


def test_logits_equal_transformers(case: Case) -> None:
    for name, prompt in case.prompts.items():
        rows = compute_logits(case.model, prompt["ids"])[case.logits[f"{name}/positions"]]
        found = np.take_along_axis(rows, case.logits[f"{name}/ids"].astype(np.int64), axis=1)
        np.testing.assert_allclose(found, case.logits[f"{name}/logits"], atol=TOLERANCE, rtol=0, err_msg=name)
        total = np.logaddexp.reduce(rows.astype(np.float64), axis=1)
        np.testing.assert_allclose(total, case.logits[f"{name}/logsumexp"], atol=TOLERANCE, rtol=0, err_msg=name)


def test_greedy_text_in_one_batch(case: Case) -> None:
    found = engine_greedy(case.model, [prompt["ids"] for prompt in case.prompts.values()], together=PROMPTS)
    assert dict(zip(case.prompts, found, strict=True)) == {name: case.greedy(name) for name in case.prompts}


@pytest.mark.parametrize("name", ALONE)
def test_greedy_text_one_at_a_time(case: Case, name: str) -> None:
    assert engine_greedy(case.model, [case.prompts[name]["ids"]], together=1) == [case.greedy(name)]


def test_the_records_reach_past_the_sliding_window(case: Case) -> None:
    """The long prompts leave Gemma's window of 512 behind, one of them only while decoding."""
    lengths = [len(prompt["ids"]) for prompt in case.prompts.values()]
    assert max(lengths) > 700
    windows = {layer.sliding_window for layer in case.model.config.layers} - {None}
    assert all(any(n < window < n + MAX_TOKENS for n in lengths) for window in windows)

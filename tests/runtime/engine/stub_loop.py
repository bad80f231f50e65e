"""Logits for stub models, and an engine run to its end: what the tests of the loop share."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.runtime.engine import Engine
from llmctl.runtime.sampling.params import SamplingParams

VOCAB = 32


def mixed(ids: list[int]) -> np.ndarray:
    """Logits in which every token of the context counts, with its position."""
    state = 7
    for token_id in ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return np.random.default_rng(state).normal(size=VOCAB)


def drain(engine: Engine, limit: int = 10_000) -> None:
    """Step until nothing is left to do."""
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    pytest.fail("the engine never ends")


def completion(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    """What one prompt alone is answered with."""
    sequence = engine.add(prompt, params)
    drain(engine)
    return sequence.completion_token_ids

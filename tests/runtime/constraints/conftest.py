"""A real vocabulary, and answers drawn from it by a model that knows nothing."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler
from llmctl.runtime.tokenizer import load_tokenizer


@pytest.fixture(scope="session")
def vocabulary(smollm2_gguf) -> SimpleNamespace:
    """SmolLM2's tokenizer; .num_tokens, .ends."""
    with open_checkpoint(smollm2_gguf) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    return SimpleNamespace(tokenizer=tokenizer, num_tokens=tokenizer.vocab_size, ends=tokenizer.eos_token_ids)


@pytest.fixture(scope="session")
def babble(vocabulary) -> Callable[..., list[int]]:
    """Draws tokens at random, with nothing but a constraint to guide them: `babble(maker, seed, limit)` gives their ids, up to
    and with an end token."""

    rows = np.random.default_rng(0).normal(size=(8, vocabulary.num_tokens)).astype(np.float32)

    def say(maker: Any, seed: int, limit: int = 300, **values: Any) -> list[int]:
        random = np.random.default_rng(seed)
        chosen = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "seed": seed, **values}
        sampler, ids = Sampler(SamplingParams(constraints=(maker,), **chosen)), []
        while len(ids) < limit and (not ids or ids[-1] not in vocabulary.ends):
            row = np.roll(rows[random.integers(8)], random.integers(vocabulary.num_tokens))
            ids.append(sampler.sample(row, ids).token_id)
        return ids

    return say

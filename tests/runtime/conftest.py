"""A model whose logits the test writes, over the real cache pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmctl.kernels.attention import BatchDescription
from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.loading import LoadedModel

NextLogits = Callable[[list[int]], np.ndarray]


class NumpyOps:
    """The few ops that the engine itself asks for."""

    name, device, dtype, threads = "stub", "cpu", "float32", 1

    def kv_pages(self, num_blocks: int, block_size: int, *_: Any) -> tuple[np.ndarray, np.ndarray]:
        # A page that is read before it is written shows.
        return np.full(num_blocks * block_size, np.nan), np.full(num_blocks * block_size, np.nan)

    def compile(self, forward: Callable[..., np.ndarray], rotary_halves: list[int]) -> Callable[..., np.ndarray]:
        return forward

    def interrupt(self) -> None:
        pass


class StubDecoder:
    """Stores ids in the key pages and positions in the value pages, and reads a sequence back through its block table."""

    def __init__(self, next_logits: NextLogits) -> None:
        self.next_logits = next_logits
        self.tables = SimpleNamespace(ropes=[], frequencies=lambda lengths: [])
        self.steps: list[list[int]] = []  # tokens of each sequence, per step

    def forward(self, batch: BatchDescription, cache: Any, rows: np.ndarray) -> np.ndarray:
        keys, values = cache.layer(0)
        assert len(set(batch.slot_mapping.tolist())) == len(batch.token_ids), "two tokens share a slot"
        keys[batch.slot_mapping], values[batch.slot_mapping] = batch.token_ids, batch.positions
        self.steps.append([b - a for a, b in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)])
        return np.stack([self._row(batch, keys, values, int(row)) for row in rows]) if len(rows) else np.zeros((0, 0))

    def _row(self, batch: BatchDescription, keys: np.ndarray, values: np.ndarray, row: int) -> np.ndarray:
        sequence = next(s for s, end in enumerate(batch.cu_seqlens_q[1:]) if row < end)
        length = batch.context_lens[sequence] - (batch.cu_seqlens_q[sequence + 1] - 1 - row)
        table, size = batch.block_tables[sequence], batch.block_size
        slots = [table[i // size] * size + i % size for i in range(length)]
        assert values[slots].tolist() == list(range(length)), "a position lies in the wrong place"
        return np.asarray(self.next_logits([int(token_id) for token_id in keys[slots]]), dtype=np.float32)


@pytest.fixture(scope="session")
def stub_model() -> Callable[..., LoadedModel]:
    """Makes a model: `stub_model(next_logits, vocab_size=…, context_length=…, eos_token_ids=…)`."""

    def make(
        next_logits: NextLogits,
        *,
        vocab_size: int = 32,
        context_length: int = 256,
        eos_token_ids: tuple[int, ...] = (),
        num_tokens: int | None = None,
        max_cache_tokens: int = 1 << 20,
    ) -> LoadedModel:
        return LoadedModel(
            config=SimpleNamespace(vocab_size=vocab_size, kv_layers=lambda: (LayerShape(1, 1),)),
            decoder=StubDecoder(next_logits),
            ops=NumpyOps(),
            checkpoint=SimpleNamespace(path=Path("stub")),
            tokenizer=None,
            kv_type="f32",
            activations=None,
            context_length=context_length,
            max_cache_tokens=max_cache_tokens,
            eos_token_ids=frozenset(eos_token_ids),
            num_tokens=vocab_size if num_tokens is None else num_tokens,
        )

    return make

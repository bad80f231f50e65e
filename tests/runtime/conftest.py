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

    name, device, dtype, threads, is_row_invariant = "stub", "cpu", "float32", 1, True

    def kv_pages(self, num_blocks: int, block_size: int, *_: Any) -> tuple[np.ndarray, np.ndarray]:
        # A page that is read before it is written shows.
        return np.full(num_blocks * block_size, np.nan), np.full(num_blocks * block_size, np.nan)

    def compile(self, forward: Callable[..., np.ndarray], rotary_halves: list[int]) -> Callable[..., np.ndarray]:
        return forward

    def copy_page(self, pages: tuple[np.ndarray, np.ndarray], source: int, target: int) -> None:
        for side in pages:
            side[16 * target : 16 * target + 16] = side[16 * source : 16 * source + 16]

    def interrupt(self) -> None:
        pass


class StubDecoder:
    """Stores ids in the key pages and positions in the value pages of every layer, and reads a sequence back through the block
    tables: the whole text from the layers that keep it, the end of it from those with a window."""

    def __init__(self, next_logits: NextLogits, layers: tuple[LayerShape, ...]) -> None:
        self.next_logits, self.layers = next_logits, layers
        self.tables = SimpleNamespace(ropes=[], frequencies=lambda lengths: [])
        self.steps: list[list[int]] = []  # tokens of each sequence, per step

    def forward(self, batch: BatchDescription, cache: Any, rows: np.ndarray) -> np.ndarray:
        for number in range(len(self.layers)):
            keys, values = cache.layer(number)
            slots = batch.of_group(cache.group(number)).slot_mapping
            assert len(set(slots.tolist())) == len(batch.token_ids), "two tokens share a slot"
            keys[slots], values[slots] = batch.token_ids, batch.positions
        self.steps.append([b - a for a, b in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], strict=False)])
        for row in range(len(batch.token_ids)):  # those without logits attend as well
            for number in range(len(self.layers)):
                self._seen(batch, cache, number, row)
        return np.stack([self._logits(batch, cache, int(row)) for row in rows]) if len(rows) else np.zeros((0, 0))

    def _logits(self, batch: BatchDescription, cache: Any, row: int) -> np.ndarray:
        longest = max((self._seen(batch, cache, number, row) for number in range(len(self.layers))), key=len)
        return np.asarray(self.next_logits(longest), dtype=np.float32)

    def _seen(self, batch: BatchDescription, cache: Any, number: int, row: int) -> list[int]:
        """The ids that a token sees in a layer."""
        batch = batch.of_group(cache.group(number))
        sequence = next(s for s, end in enumerate(batch.cu_seqlens_q[1:]) if row < end)
        length = batch.context_lens[sequence] - (batch.cu_seqlens_q[sequence + 1] - 1 - row)
        table, size, (keys, values) = batch.block_tables[sequence], batch.block_size, cache.layer(number)
        first = max(0, length - (self.layers[number].sliding_window or length))
        assert (table[first // size : -(-length // size)] >= 0).all(), "a page that is seen is gone"
        slots = [table[i // size] * size + i % size for i in range(first, length)]
        assert values[slots].tolist() == list(range(first, length)), "a position lies in the wrong place"
        return [int(token_id) for token_id in keys[slots]]


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
        max_cache_bytes: int | None = 1 << 23,
        layers: tuple[LayerShape, ...] = (LayerShape(1, 1),),
    ) -> LoadedModel:
        return LoadedModel(
            config=SimpleNamespace(vocab_size=vocab_size, kv_layers=lambda: layers),
            decoder=StubDecoder(next_logits, layers),
            ops=NumpyOps(),
            checkpoint=SimpleNamespace(path=Path("stub")),
            tokenizer=None,
            kv_type="f32",
            activations=None,
            context_length=context_length,
            max_cache_bytes=max_cache_bytes,
            eos_token_ids=frozenset(eos_token_ids),
            num_tokens=vocab_size if num_tokens is None else num_tokens,
        )

    return make

"""ModelRunner: describes a batch to the decoder and brings its logits back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.ops import Array
from llmctl.runtime.cache.block_manager import BlockManager, PageCopy
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.cache.memory import BLOCK_SIZE, PREFILL_CHUNK, CachePlan, Demand, plan_cache
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

Forward = Callable[[BatchDescription, KvCache, Array], Array]
"""A forward pass: of a batch over a cache, what it makes of the tokens numbered `rows`, [rows, numbers]."""


def describe(chunks: list[ScheduledChunk], num_groups: int, tables: RotaryTables) -> BatchDescription:
    """The chunks of a step, laid end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    cu_seqlens_q = [0]
    for chunk in chunks:
        begin, end = chunk.begin, chunk.end
        token_ids += chunk.token_ids
        positions += range(begin, end)
        cu_seqlens_q.append(len(token_ids))
    return BatchDescription(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        inv_freqs=tables.frequencies(lambda: _rope_lengths(chunks)),
        cu_seqlens_q=cu_seqlens_q,
        page_maps=[_page_map(chunks, group) for group in range(num_groups)],
        block_size=BLOCK_SIZE,
    )


def _page_map(chunks: list[ScheduledChunk], group: int) -> PageMap:
    """Where the layers of one group find the chunks' tokens."""
    slots: list[int] = []
    tables = [chunk.sequence.pages.tables[group].array for chunk in chunks]
    for chunk, table in zip(chunks, tables, strict=True):
        first = chunk.begin // BLOCK_SIZE
        pages = table[first : -(-chunk.end // BLOCK_SIZE)].tolist()
        slots += [pages[i // BLOCK_SIZE - first] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(chunk.begin, chunk.end)]
    return PageMap(np.array(slots, np.int64), [chunk.end for chunk in chunks], tables)


def _rope_lengths(chunks: list[ScheduledChunk]) -> np.ndarray:
    """What length-dependent ropes see at every token of the step."""
    return np.array([chunk.sequence.rope_length(i) for chunk in chunks for i in range(chunk.begin, chunk.end)])


class ModelRunner:
    """Runs chunks through one model over one cache. forward: what is computed, None for the decoder's logits."""

    def __init__(self, model: LoadedModel, plan: CachePlan, forward: Forward | None = None) -> None:
        self.model = model
        self.cache = cache = KvCache(model.ops, model.config.kv_layers(), plan, model.kv_type)
        self._tables = model.decoder.tables
        self._forward = model.ops.compile(
            lambda batch, rows: (forward or model.decoder.forward)(batch, cache, rows),
            [rope.rotary_dim // 2 for rope in self._tables.ropes],
        )

    def copy_pages(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages, before the step that writes the copies."""
        self.cache.copy(copies)

    def run(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """Compute the chunks. Returns float32 logits, in order: for each chunk that ends its sequence one row, and one for every
        drafted token in it. They are valid until the next call."""
        batch = self._describe(chunks)
        ends = [(batch.cu_seqlens_q[i + 1], chunk) for i, chunk in enumerate(chunks) if chunk.is_last]
        rows = [row for end, chunk in ends for row in range(end - 1 - chunk.num_drafted, end)]
        return self._forward(batch, np.array(rows, np.int64))

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""
        self.model.ops.interrupt()

    def run_all(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """As `run`, but with a row of logits for every token."""
        batch = self._describe(chunks)
        return self._forward(batch, np.arange(batch.cu_seqlens_q[-1], dtype=np.int64))

    def _describe(self, chunks: list[ScheduledChunk]) -> BatchDescription:
        return describe(chunks, len(self.cache.plan.groups), self._tables)


class LogitsReader:
    """Logits of one model for texts of up to `length` tokens, one after the other, over the same cache pages.

    chunk: most tokens in a step. forward: what is read instead of logits.
    """

    def __init__(
        self, model: LoadedModel, length: int, chunk: int = PREFILL_CHUNK, forward: Forward | None = None
    ) -> None:
        self.num_tokens, self._chunk = model.num_tokens, chunk
        plan = plan_cache(model.config.kv_layers(), model.kv_type, Demand(length, prefill_chunk=chunk))
        self._blocks, self._runner = BlockManager(plan, reuse_tokens=None), ModelRunner(model, plan, forward)

    def rows(self, ids: list[int], first: int = 0, step: int | None = None) -> Iterator[np.ndarray]:
        """Logits [n, vocab_size] after the tokens from number `first` on, in order, at most `step` and at most a chunk of them at
        once; they are valid until the next."""
        params = SamplingParams(temperature=0)
        sequence = Sequence(ids, params, Sampler(params))
        sequence.pages = self._blocks.new_pages()
        while sequence.num_computed < first:
            self._run(sequence, min(self._chunk, first - sequence.num_computed), self._runner.run)
        while sequence.num_uncomputed:
            count = min(step or self._chunk, self._chunk, sequence.num_uncomputed)
            yield self._run(sequence, count, self._runner.run_all)
        self._blocks.release(sequence.pages)

    def _run(self, sequence: Sequence, count: int, run: Callable[[list[ScheduledChunk]], np.ndarray]) -> np.ndarray:
        assert sequence.pages is not None
        self._blocks.grow(sequence.pages, sequence.num_computed, sequence.num_computed + count)
        logits = run([ScheduledChunk(sequence, count)])
        sequence.num_computed += count
        return logits


def compute_logits(model: LoadedModel, token_ids: list[int], chunk: int | None = None) -> np.ndarray:
    """Logits float32 [T, vocab_size] after every token of one sequence, fed `chunk` tokens at a time (None: all at once)."""
    reader = LogitsReader(model, len(token_ids), chunk or len(token_ids))
    return np.concatenate([np.array(rows) for rows in reader.rows(token_ids)])

"""ModelRunner: describes a batch to the decoder and brings its logits back."""

from __future__ import annotations

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

BLOCK_SIZE = 16


def describe(chunks: list[ScheduledChunk], block_size: int, tables: RotaryTables) -> BatchDescription:
    """The chunks of a step, laid end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens_q, context_lens, block_tables = [0], [], []
    for chunk in chunks:
        sequence, table = chunk.sequence, chunk.sequence.block_table
        begin, end = sequence.num_computed, sequence.num_computed + chunk.num_tokens
        token_ids += sequence.token_ids[begin:end]
        positions += range(begin, end)
        first = begin // block_size
        pages = table.array[first : -(-end // block_size)].tolist()
        slots += [pages[i // block_size - first] * block_size + i % block_size for i in range(begin, end)]
        cu_seqlens_q.append(len(token_ids))
        context_lens.append(end)
        block_tables.append(table.array)
    return BatchDescription(
        token_ids=np.array(token_ids, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        inv_freqs=tables.frequencies(lambda: _rope_lengths(chunks)),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=block_tables,
        block_size=block_size,
    )


def _rope_lengths(chunks: list[ScheduledChunk]) -> np.ndarray:
    """What length-dependent ropes see at every token of the step."""
    lengths: list[int] = []
    for chunk in chunks:
        begin = chunk.sequence.num_computed
        lengths += [chunk.sequence.rope_length(i) for i in range(begin, begin + chunk.num_tokens)]
    return np.array(lengths)


class ModelRunner:
    """Runs chunks through one model over one cache."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self.model = model
        self.cache = cache = KvCache(model.ops, model.config.kv_layers(), num_blocks, BLOCK_SIZE, model.kv_type)
        self._tables = model.decoder.tables
        self._forward = model.ops.compile(
            lambda batch, rows: model.decoder.forward(batch, cache, rows),
            [rope.rotary_dim // 2 for rope in self._tables.ropes],
        )

    def run(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """Compute the chunks. Returns float32 logits, one row for each chunk that ends its sequence, in order; they are valid
        until the next call."""
        batch = self._describe(chunks)
        rows = [batch.cu_seqlens_q[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.is_last]
        return self._forward(batch, np.array(rows, np.int64))

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""
        self.model.ops.interrupt()

    def run_all(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """As `run`, but with a row of logits for every token."""
        batch = self._describe(chunks)
        return self._forward(batch, np.arange(batch.cu_seqlens_q[-1], dtype=np.int64))

    def _describe(self, chunks: list[ScheduledChunk]) -> BatchDescription:
        return describe(chunks, BLOCK_SIZE, self._tables)


def compute_logits(model: LoadedModel, token_ids: list[int], chunk: int | None = None) -> np.ndarray:
    """Logits float32 [T, vocab_size] after every token of one sequence, fed `chunk` tokens at a time (None: all at once)."""
    blocks = BlockManager(-(-len(token_ids) // BLOCK_SIZE), BLOCK_SIZE)
    runner = ModelRunner(model, blocks.num_free)
    params = SamplingParams(temperature=0)
    sequence = Sequence(token_ids, params, Sampler(params))
    blocks.grow(sequence.block_table, len(token_ids))
    parts = []
    while sequence.num_uncomputed:
        step = ScheduledChunk(sequence, min(chunk or len(token_ids), sequence.num_uncomputed))
        parts.append(np.array(runner.run_all([step])))
        sequence.num_computed += step.num_tokens
    return np.concatenate(parts)

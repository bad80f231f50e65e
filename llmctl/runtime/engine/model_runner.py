"""ModelRunner: describes a batch to the decoder and brings its logits back."""

from __future__ import annotations

import numpy as np

from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.ops import Ops
from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.cache.kv_cache import KvCache
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

BLOCK_SIZE = 16


def describe(ops: Ops, chunks: list[ScheduledChunk], block_size: int) -> BatchDescription:
    """The chunks of a step, laid end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    slots: list[int] = []
    cu_seqlens_q, context_lens = [0], []
    for chunk in chunks:
        sequence, begin = chunk.sequence, chunk.sequence.num_computed
        end = begin + chunk.num_tokens
        token_ids += sequence.token_ids[begin:end]
        positions += range(begin, end)
        lengths += [sequence.rope_length(i) for i in range(begin, end)]
        slots += [sequence.block_table[i // block_size] * block_size + i % block_size for i in range(begin, end)]
        cu_seqlens_q.append(len(token_ids))
        context_lens.append(end)

    def upload(values: list[int]) -> object:
        return ops.from_host(np.asarray(values, dtype=np.int64))

    return BatchDescription(
        token_ids=upload(token_ids),
        positions=upload(positions),
        rope_lengths=np.asarray(lengths),
        slot_mapping=upload(slots),
        cu_seqlens_q=cu_seqlens_q,
        context_lens=context_lens,
        block_tables=[upload(chunk.sequence.block_table) for chunk in chunks],
        block_size=block_size,
    )


class ModelRunner:
    """Runs chunks through one model over one cache."""

    def __init__(self, model: LoadedModel, num_blocks: int) -> None:
        self.model = model
        self.cache = KvCache(model.ops, model.config.kv_layers(), num_blocks, BLOCK_SIZE, model.kv_type)

    def run(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """Compute the chunks. Returns float32 logits, one row for each chunk that ends its sequence, in order."""
        batch = describe(self.model.ops, chunks, BLOCK_SIZE)
        rows = [batch.cu_seqlens_q[i + 1] - 1 for i, chunk in enumerate(chunks) if chunk.is_last]
        return self._forward(batch, rows)

    def run_all(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """As `run`, but with a row of logits for every token."""
        batch = describe(self.model.ops, chunks, BLOCK_SIZE)
        return self._forward(batch, list(range(batch.cu_seqlens_q[-1])))

    def _forward(self, batch: BatchDescription, rows: list[int]) -> np.ndarray:
        ops = self.model.ops
        logits = self.model.decoder.forward(batch, self.cache, ops.from_host(np.asarray(rows, dtype=np.int64)))
        return ops.to_host(logits)


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
        parts.append(runner.run_all([step]))
        sequence.num_computed += step.num_tokens
    return np.concatenate(parts)

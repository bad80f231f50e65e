"""ModelRunner: describes a batch to the decoder and brings its logits back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import replace

import numpy as np

from llmctl.errors import UnsupportedError
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.ops import Array
from llmctl.runtime.cache.block_manager import BlockManager, PageCopy
from llmctl.runtime.cache.kept import KeptTokens
from llmctl.runtime.cache.kv_cache import KvCache, QueryStore
from llmctl.runtime.cache.memory import BLOCK_SIZE, PREFILL_CHUNK, CachePlan, Demand, LayerGroup, plan_cache
from llmctl.runtime.cache.snapkv import planned, select
from llmctl.runtime.engine.scheduler import ScheduledChunk
from llmctl.runtime.engine.sequence import Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.models.rotary_tables import RotaryTables
from llmctl.runtime.models.split_decoder import SplitDecoder
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import Sampler

Forward = Callable[[BatchDescription, KvCache, Array], Array]
"""A forward pass: of a batch over a cache, what it makes of the tokens numbered `rows`, [rows, numbers]."""


def describe(chunks: list[ScheduledChunk], groups: Items[LayerGroup], tables: RotaryTables) -> BatchDescription:
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
        page_maps=[_page_map(chunks, number, group.window) for number, group in enumerate(groups)],
        block_size=BLOCK_SIZE,
    )


def _page_map(chunks: list[ScheduledChunk], group: int, window: int | None) -> PageMap:
    """Where the layers of one group find the chunks' tokens."""
    slots: list[int] = []
    tables = [chunk.sequence.pages.tables[group].array for chunk in chunks]
    ends = [chunk.sequence.pages.cached(window, chunk.end) for chunk in chunks]
    for chunk, end, table in zip(chunks, ends, tables, strict=True):
        begin = end - chunk.num_tokens
        first = begin // BLOCK_SIZE
        pages = table[first : -(-end // BLOCK_SIZE)].tolist()
        slots += [pages[i // BLOCK_SIZE - first] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(begin, end)]
    return PageMap(np.array(slots, np.int64), ends, tables)


def slots_of(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The cache slots of places in a block table."""
    return table[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE


def _rope_lengths(chunks: list[ScheduledChunk]) -> np.ndarray:
    """What length-dependent ropes see at every token of the step."""
    return np.array([chunk.sequence.rope_length(i) for chunk in chunks for i in range(chunk.begin, chunk.end)])


class ModelRunner:
    """Runs chunks through one model over one cache. forward: what is computed, None for the decoder's logits."""

    def __init__(self, model: LoadedModel, plan: CachePlan, forward: Forward | None = None) -> None:
        self.model = model
        self._observed = ObservedPlaces(plan.demand.sequences, model.kv_policy.window) if model.kv_policy.compresses else None
        store = self._observed and QueryStore(model.config.num_heads, self._observed.num_places)
        self.layers = model.kv_layers(plan.demand.context)
        self.cache = cache = KvCache(model.ops, self.layers, plan, model.kv_type, store)
        self._tables = model.decoder.tables
        self._forward = _compiled(model, cache, forward)

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
        batch = describe(chunks, self.cache.plan.groups, self._tables)
        if self._observed is None:
            return batch
        return replace(batch, page_maps=[*batch.page_maps, self._observed.page_map(chunks)])

    def compress(self, sequence: Sequence, blocks: BlockManager) -> None:
        """Keep of a prompt what its last queries look at: `Compression`. The pages for it are there."""
        todo, pages = sequence.to_compress, sequence.pages
        assert todo is not None
        assert pages is not None
        assert self._observed is not None
        whole = [(number, group.layers) for number, group in enumerate(self.cache.plan.groups) if group.window is None]
        places = self._observed.release(sequence)
        positions = {}
        for number, layers in whole:
            for layer in layers:
                votes = self._votes(layer, places, pages.tables[number].array, todo.num_tokens)
                positions[layer] = select(votes, todo.num_kept, self.model.kv_policy)

        def move(before: list[np.ndarray | None]) -> None:
            for number, layers in whole:
                old, new = before[number], pages.tables[number].array
                assert old is not None
                targets = slots_of(new, np.arange(todo.num_kept))
                for layer in layers:
                    self.cache.ops(layer).move_tokens(self.cache.layer(layer), slots_of(old, positions[layer]), targets)

        blocks.compress(pages, todo.num_tokens, todo.num_kept, move)
        sequence.compression = replace(todo, positions=positions)

    def _votes(self, layer: int, places: np.ndarray, table: np.ndarray, num_tokens: int) -> np.ndarray:
        """What the queries at these places of a layer give to each token of their sequence: float32 [kv heads, num_tokens]."""
        attention, queries = self.model.decoder.layers[layer].attention, self.cache.kept_queries(layer, places)
        scale, softcap = attention.config.attention_scale, attention.config.attention_softcap
        pages = self.cache.layer(layer)
        return self.cache.ops(layer).attention_votes(queries, pages, table, num_tokens, scale, softcap, attention.sinks)

    def share_queries(self, sequence: Sequence, other: Sequence) -> None:
        """A sequence was forked from another one whose prompt is still to be compressed."""
        if self._observed is not None and sequence.to_compress is not None:
            self._observed.share(sequence, other)

    def kept(self, sequence: Sequence) -> KeptTokens:
        """What the cache has of a sequence."""
        return KeptTokens(sequence.num_computed, self.layers, self.model.kv_type, sequence.compression)


def _compiled(
    model: LoadedModel, cache: KvCache, forward: Forward | None
) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
    """The forward pass over this cache, ready to run; UnsupportedError for another than the decoder's on two backends."""
    decoder = model.decoder
    if isinstance(decoder, SplitDecoder):
        if forward is not None:
            raise UnsupportedError("a model whose layers are split between GPU and CPU cannot be looked into: --device cpu does")
        return decoder.compile(cache)
    halves = [rope.rotary_dim // 2 for rope in decoder.tables.ropes]
    return model.ops.compile(lambda batch, rows: (forward or decoder.forward)(batch, cache, rows), halves)


class ObservedPlaces:
    """Where the queries of the last tokens of prompts go until these are compressed: `window` places a sequence."""

    def __init__(self, sequences: int, window: int) -> None:
        self._window, self._free = window, list(range(sequences))
        self._ranges: dict[Sequence, int] = {}
        self.num_places = sequences * window

    def page_map(self, chunks: list[ScheduledChunk]) -> PageMap:
        """As slots the place of every token's query, −1 for those that nobody asks for."""
        slots = np.concatenate([self._slots(chunk) for chunk in chunks])
        counts = [chunk.num_tokens for chunk in chunks]
        return PageMap(slots, counts, [np.zeros(-(-count // BLOCK_SIZE), np.int64) for count in counts])

    def _slots(self, chunk: ScheduledChunk) -> np.ndarray:
        todo = chunk.sequence.to_compress
        if todo is None or chunk.end <= todo.first_observed:
            return np.full(chunk.num_tokens, -1, np.int64)
        places = np.arange(chunk.begin, chunk.end) - todo.first_observed
        return np.where(places >= 0, places + self._range(chunk.sequence) * self._window, -1)

    def _range(self, sequence: Sequence) -> int:
        if sequence not in self._ranges:
            for gone in [each for each in self._ranges if each.pages is None or each.to_compress is None]:
                self.release(gone)
            self._ranges[sequence] = self._free.pop()
        return self._ranges[sequence]

    def share(self, sequence: Sequence, other: Sequence) -> None:
        """Another sequence has the same prompt."""
        self._ranges[other] = self._ranges[sequence]

    def release(self, sequence: Sequence) -> np.ndarray:
        """The places of a sequence, which others may use from the next step on."""
        number = self._ranges.pop(sequence)
        if number not in self._ranges.values():
            self._free.append(number)
        return np.arange(number * self._window, (number + 1) * self._window)


class LogitsReader:
    """Logits of one model for texts of up to `length` tokens, one after the other, over the same cache pages.

    chunk: most tokens in a step. forward: what is read instead of logits. kept: what the cache had of the last text when it was
    done.
    """

    def __init__(
        self, model: LoadedModel, length: int, chunk: int = PREFILL_CHUNK, forward: Forward | None = None
    ) -> None:
        self.num_tokens, self._chunk, self._policy = model.num_tokens, chunk, model.kv_policy
        plan = plan_cache(model.kv_layers(length), model.kv_type, Demand(length, prefill_chunk=chunk))
        self._blocks, self._runner = BlockManager(plan, reuse_tokens=None), ModelRunner(model, plan, forward)
        self.kept: KeptTokens | None = None

    def rows(self, ids: list[int], first: int = 0, step: int | None = None) -> Iterator[np.ndarray]:
        """Logits [n, vocab_size] after the tokens from number `first` on, in order, at most `step` and at most a chunk of them at
        once; they are valid until the next. A policy that compresses takes the first `first` tokens for the prompt."""
        params = SamplingParams(temperature=0)
        sequence = Sequence(ids, params, Sampler(params))
        sequence.pages, sequence.compression = self._blocks.new_pages(), planned(self._policy, first)
        while sequence.num_computed < first:
            self._run(sequence, min(self._chunk, first - sequence.num_computed), self._runner.run)
        if sequence.to_compress is not None:
            self._runner.compress(sequence, self._blocks)
        while sequence.num_uncomputed:
            count = min(step or self._chunk, self._chunk, sequence.num_uncomputed)
            yield self._run(sequence, count, self._runner.run_all)
        self.kept = self._runner.kept(sequence)
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

"""Engine: the loop that turns queued sequences into tokens, several at once."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from llmctl.errors import ContextLengthError, LlmctlError, UsageError
from llmctl.kernels.ops import StepInterrupted
from llmctl.runtime.cache.block_manager import BlockManager, GroupStats, PageUse, ReuseStats
from llmctl.runtime.cache.kept import KeptTokens
from llmctl.runtime.cache.memory import BLOCK_SIZE, PREFILL_CHUNK, Demand, plan_cache
from llmctl.runtime.cache.snapkv import planned
from llmctl.runtime.engine.model_runner import ModelRunner
from llmctl.runtime.engine.scheduler import ScheduledChunk, Scheduler
from llmctl.runtime.engine.sequence import FinishReason, Sequence
from llmctl.runtime.engine.speculation import Speculation
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.rejection import Proposal
from llmctl.runtime.sampling.sampler import SampledToken, Sampler


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a sequence; finish_reason is set on its last. A step gives one a sequence, or several where a draft was
    right.

    "stop": the token is an end token. "length": max_tokens or the context is used up. "error": no token could be chosen, and
    `error` says why. There, and where zero tokens were asked for, token is None.
    """

    sequence: Sequence
    token: SampledToken | None
    finish_reason: FinishReason | None
    error: LlmctlError | None = None


class Engine:
    """Continuous batching over one model and one paged cache.

    max_num_seqs: sequences in a step. prefill_chunk: tokens in a step. context_length: prompt and completion of one
    sequence together. num_blocks: pages of the cache (less for windows that need less); None gives every one of max_num_seqs
    sequences a full context, as far as memory allows (LoadedModel.max_cache_bytes), and at least one sequence. speculation:
    what drafts tokens, None for plain decoding. prefix_cache: begin a sequence with what the cache
    still has of its text.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_num_seqs: int = 1,
        prefill_chunk: int = PREFILL_CHUNK,
        num_blocks: int | None = None,
        speculation: Speculation | None = None,
        prefix_cache: bool = True,
    ) -> None:
        self.model, self.context_length, self._prefill_chunk = model, model.context_length, prefill_chunk
        self.speculation = speculation
        longest_draft = speculation.longest if speculation else 0
        demand = Demand(self.context_length, max_num_seqs, prefill_chunk, longest_draft)
        layers, most = model.kv_layers(), model.max_cache_bytes
        plan = plan_cache(layers, model.kv_type, demand, most_bytes=most, most_pages=num_blocks)
        # Where a token's numbers depend on how many share its step, only whole chunks are those of a run without a cache.
        step = BLOCK_SIZE if model.ops.is_row_invariant else math.lcm(prefill_chunk, BLOCK_SIZE)
        self.cache_plan = plan
        self._blocks = BlockManager(plan, step if prefix_cache else None)
        self._runner = ModelRunner(model, plan)
        self._capacity = plan.capacity
        self._scheduler = Scheduler(self._blocks, max_num_seqs, prefill_chunk)
        self._followers: dict[Sequence, list[Sequence]] = {}
        self._twins: dict[Sequence, list[Sequence]] = {}
        self._finished_early: list[TokenOutput] = []

    @property
    def has_work(self) -> bool:
        """True while any sequence is unfinished."""
        return self._scheduler.has_work or bool(self._finished_early)

    def add(self, prompt_token_ids: list[int], params: SamplingParams) -> Sequence:
        """Queue a prompt. ContextLengthError if it leaves no room for one token, UsageError if it is empty or has bad ids."""
        check_prompt(prompt_token_ids, self.model.config.vocab_size, self._capacity)
        sequence = self._sequence(prompt_token_ids, params)
        if params.max_tokens == 0:
            sequence.finish_reason = "length"
            self._finished_early.append(TokenOutput(sequence, None, "length"))
        else:
            self._scheduler.add(sequence)
        return sequence

    def _sequence(self, prompt_token_ids: list[int], params: SamplingParams) -> Sequence:
        compression = planned(self.model.kv_policy, len(prompt_token_ids))
        return Sequence(prompt_token_ids, params, Sampler(params), compression=compression)

    def add_several(self, prompt_token_ids: list[int], params: SamplingParams, count: int) -> list[Sequence]:
        """Queue `count` sequences of one prompt, which is computed once. Errors: as `add`.

        With a seed, the second one has the seed after it, and so on: as many `add` with these seeds give the same ids.
        """
        seeds = [None if params.seed is None else (params.seed + i) % 2**64 for i in range(count)]
        every = [replace(params, seed=seed) for seed in seeds]
        first = self.add(prompt_token_ids, every[0])
        if params.max_tokens == 0:
            return [first, *(self.add(prompt_token_ids, each) for each in every[1:])]
        others = [self._sequence(prompt_token_ids, each) for each in every[1:]]
        if others:
            self._followers[first] = others
        return [first, *others]

    def abort(self, sequence: Sequence, num_unused: int = 0) -> None:
        """Stop a sequence at once; its pages are free again. num_unused: tokens of the last step that nobody took: behind a stop
        string nothing counts as drafted well."""
        if self.speculation:
            self.speculation.take_back(sequence, num_unused)
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = "abort"
        self._remove(sequence)
        for followers in self._followers.values():
            if sequence in followers:
                followers.remove(sequence)
        followers = self._followers.pop(sequence, [])
        if followers:
            self._scheduler.add(followers[0])
            self._followers[followers[0]] = followers[1:]

    def take_out(self, token_ids: list[int]) -> tuple[int, list[int], list[list[bytes]]]:
        """What the cache has of a text: number of tokens (whole pages), the first page kept in each group of layers, and the
        bytes of the pages of every layer from there on."""
        pages = self._blocks.new_pages()
        count = self._blocks.find_prefix(pages, [*token_ids, 0], beyond_windows=True)  # never all: so one more
        found = self._runner.cache.read([table.held for table in pages.tables])
        firsts = [table.first for table in pages.tables]
        self._blocks.release(pages)
        return count, firsts, found

    def put_in(self, token_ids: list[int], firsts: list[int], layers: list[list[bytes]]) -> int:
        """Let a text be found in the cache: the reverse of `take_out`. Returns how many of its tokens will be: none
        where there is no room. Errors: ValueError for pages of another size."""
        count = len(token_ids) // BLOCK_SIZE
        pages = self._blocks.adopt(count, firsts)
        if pages is None:
            return 0
        try:
            self._runner.cache.write([table.held for table in pages.tables], layers)
            self._blocks.remember(pages, token_ids, count * BLOCK_SIZE)
        finally:
            self._blocks.release(pages)
        return count * BLOCK_SIZE

    def kept(self, sequence: Sequence) -> KeptTokens:
        """What the cache has of a sequence, or had when it ended."""
        return self._runner.kept(sequence)

    @property
    def group_stats(self) -> list[GroupStats]:
        """What the pages of every group of layers are used for."""
        running = [(s.pages, s.num_computed) for s in self._scheduler.running if s.pages is not None]
        return self._blocks.stats(running)

    def page_uses(self, sequence: Sequence) -> list[list[PageUse]]:
        """Group by group the pages that a running sequence holds."""
        assert sequence.pages is not None, "a sequence that does not run holds no pages"
        return self._blocks.uses(sequence.pages)

    @property
    def reuse_stats(self) -> ReuseStats:
        """How much of the prompts was in the cache already."""
        return self._blocks.reuse

    def interrupt(self) -> None:
        """Let the step under way in the main thread end early, without an output and its tokens not counted: for signal
        handlers. A short one still runs to its end."""
        self._runner.interrupt()
        if self.speculation:
            self.speculation.drafter.interrupt()

    def step(self, max_tokens: int | None = None) -> list[TokenOutput]:
        """Run one batch. Returns the new tokens, one a sequence and those of its draft that hold; a chunk inside a prompt gives
        none.

        max_tokens: run no more tokens than that, to stop a prompt at a given place (a benchmark does).
        """
        if self._finished_early:
            early, self._finished_early = self._finished_early, []
            return early
        try:
            chunks = self._schedule(max_tokens)
            if not chunks:
                return []
            logits = self._run(chunks)
        except StepInterrupted:
            return []
        ended = [chunk for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            self._count(chunk, alone=len(chunks) == 1)
        outputs, first = [], 0
        for chunk in ended:
            rows = logits[first : first + 1 + chunk.num_drafted]
            first += len(rows)
            outputs += self._settle(chunk, rows)
        self._compress()
        return outputs

    def _compress(self) -> None:
        """Prompts that are computed are compressed before anything follows them; those forked from them share what is kept."""
        for sequence in list(self._scheduler.running):
            todo = sequence.to_compress
            if todo is None or sequence.num_computed < todo.num_tokens or sequence.pages is None:
                continue
            self._scheduler.make_room_to_compress(sequence)
            self._runner.compress(sequence, self._blocks)
            for twin in self._twins.pop(sequence, []):
                if twin.pages is not None and twin.finish_reason is None:
                    self._blocks.release(twin.pages)
                    twin.pages, twin.compression = self._blocks.fork(sequence.pages), sequence.compression
        self._twins.clear()

    def _schedule(self, max_tokens: int | None) -> list[ScheduledChunk]:
        """The next step's chunks, drafts included."""
        if self.speculation:
            room = self._prefill_chunk if max_tokens is None else max_tokens
            ready = [s for s in self._scheduler.running if s.num_uncomputed == 1 and s.num_computed >= s.num_prompt_tokens]
            self.speculation.draft([(s, min(room - 1, self._tokens_left(s) - 1)) for s in ready])
        return self._scheduler.schedule(max_tokens)

    def _tokens_left(self, sequence: Sequence) -> int:
        """How many more a sequence may have."""
        at_most = self._capacity - len(sequence.token_ids)
        if sequence.params.max_tokens is None:
            return at_most
        return min(at_most, sequence.params.max_tokens - len(sequence.completion_token_ids))

    def _run(self, chunks: list[ScheduledChunk]) -> np.ndarray:
        """The logits of a step."""
        self._runner.copy_pages(self._blocks.take_copies())
        begin = time.perf_counter()
        logits = self._runner.run(chunks)
        if self.speculation:
            decoding = [chunk for chunk in chunks if chunk.num_tokens == 1 + chunk.num_drafted]
            seconds = time.perf_counter() - begin if len(decoding) == len(chunks) else None
            self.speculation.record_step([chunk.num_drafted for chunk in decoding], seconds)
        return logits

    def _count(self, chunk: ScheduledChunk, alone: bool) -> None:
        """The chunk's own tokens are computed; others may begin with them where they are what a run without a cache has."""
        sequence, begin, num_tokens = chunk.sequence, chunk.begin, chunk.num_tokens - chunk.num_drafted
        whole = alone and begin % self._prefill_chunk == 0 and num_tokens == self._prefill_chunk
        sequence.num_computed += num_tokens
        assert sequence.pages is not None
        if self.model.ops.is_row_invariant or (whole and sequence.pages.num_remembered == begin // BLOCK_SIZE):
            self._blocks.remember(sequence.pages, sequence.token_ids, sequence.num_computed)

    def _settle(self, chunk: ScheduledChunk, rows: np.ndarray) -> list[TokenOutput]:
        """The new tokens of a sequence and of those forked from it. rows: logits after its last token and each drafted one."""
        sequence, draft = chunk.sequence, chunk.sequence.draft
        outputs = [self._advance(each, rows[0]) for each in self._fork(sequence)]
        sequence.draft, own = [], []
        for row, proposal in zip(rows, [*draft, None], strict=True):
            own.append(self._advance(sequence, row, proposal))
            if own[-1].finish_reason is not None or proposal is None or sequence.token_ids[-1] != proposal.token_id:
                break
            sequence.num_computed += 1
        if draft:
            self._take_back(sequence, draft, own)
        for output in (*outputs, *own):
            if output.finish_reason is not None:
                self._remove(output.sequence)
        return own + outputs

    def _take_back(self, sequence: Sequence, draft: list[Proposal], outputs: list[TokenOutput]) -> None:
        """Forget what was computed of drafted tokens that did not hold."""
        assert sequence.pages is not None
        assert self.speculation is not None
        pairs = zip(draft, outputs, strict=False)
        accepted = sum(output.token is not None and output.token.token_id == proposal.token_id for proposal, output in pairs)
        self.speculation.record(sequence, draft, accepted, sum(output.token is not None for output in outputs))
        self._blocks.rewind(sequence.pages, sequence.num_computed)
        if self.model.ops.is_row_invariant:
            self._blocks.remember(sequence.pages, sequence.token_ids, sequence.num_computed)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.pages is not None and self.model.ops.is_row_invariant:
            self._blocks.remember_rest(sequence.pages, sequence.token_ids, sequence.num_computed)
        self._scheduler.remove(sequence)
        if self.speculation:
            self.speculation.forget(sequence)

    def _fork(self, leader: Sequence) -> list[Sequence]:
        """The sequences that waited for this one's prompt and now go on from its pages. Those there is no room for wait like
        new ones."""
        assert leader.pages is not None
        joined = []
        for follower in self._followers.pop(leader, []):
            if self._scheduler.join(follower):
                follower.pages = self._blocks.fork(leader.pages)
                follower.num_computed, follower.was_begun = leader.num_computed, True
                follower.num_cached_tokens = follower.num_computed
                self._runner.share_queries(leader, follower)
                joined.append(follower)
            else:
                self._scheduler.add(follower)
        if joined and leader.to_compress is not None:
            self._twins[leader] = joined
        return joined

    def _advance(self, sequence: Sequence, logits: np.ndarray, proposal: Proposal | None = None) -> TokenOutput:
        """Sample, append, and say where the sequence must end."""
        try:
            token = sequence.sampler.sample(logits[: self.model.num_tokens], sequence.token_ids, proposal)
        except LlmctlError as error:  # this one's alone: the others go on
            sequence.finish_reason = "error"
            return TokenOutput(sequence, None, "error", error)
        sequence.token_ids.append(token.token_id)
        sequence.finish_reason = self._finish_reason(sequence, token.token_id)
        return TokenOutput(sequence, token, sequence.finish_reason)

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        params = sequence.params
        if token_id in self.model.eos_token_ids and not params.ignore_eos:
            return "stop"
        generated = len(sequence.token_ids) - sequence.num_prompt_tokens
        at_limit = params.max_tokens is not None and generated >= params.max_tokens
        return "length" if at_limit or len(sequence.token_ids) >= self._capacity else None


def check_prompt(token_ids: list[int], num_tokens: int, context_length: int) -> None:
    """What `Engine.add` demands of a prompt, for those who want to know before the weights are loaded.

    Errors: ContextLengthError if the context has no room for it and one token more, UsageError if it is empty or holds ids
    that are none of the `num_tokens` there are.
    """
    if not token_ids:
        raise UsageError("the prompt is empty: there is no token to continue from")
    bad = next((i for i in token_ids if not 0 <= i < num_tokens), None)
    if bad is not None:
        raise UsageError(f"token id {bad} is outside the vocabulary of {num_tokens}")
    if len(token_ids) >= context_length:
        raise ContextLengthError(
            f"the prompt has {len(token_ids)} tokens, the context holds {context_length} (and needs room for an answer): "
            "shorten the prompt or raise --ctx-size"
        )

"""Engine: the loop that turns queued sequences into tokens, several at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from llmctl.errors import ContextLengthError, UsageError
from llmctl.kernels.ops import StepInterrupted
from llmctl.runtime.cache.block_manager import BlockManager
from llmctl.runtime.engine.model_runner import BLOCK_SIZE, ModelRunner
from llmctl.runtime.engine.scheduler import ScheduledChunk, Scheduler
from llmctl.runtime.engine.sequence import FinishReason, Sequence
from llmctl.runtime.loading import LoadedModel
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import SampledToken, Sampler


@dataclass(frozen=True)
class TokenOutput:
    """One new token of a sequence; finish_reason is set on its last.

    "stop": the token is an end token. "length": max_tokens or the context is used up. A sequence asked for zero tokens ends
    with token None.
    """

    sequence: Sequence
    token: SampledToken | None
    finish_reason: FinishReason | None


class Engine:
    """Continuous batching over one model and one paged cache.

    max_num_seqs: sequences in a step. prefill_chunk: tokens in a step. context_length: prompt and completion of one
    sequence together. num_blocks: pages of the cache; None gives every one of max_num_seqs sequences a full context, as
    far as memory allows (LoadedModel.max_cache_tokens), and at least one sequence.
    """

    def __init__(
        self, model: LoadedModel, *, max_num_seqs: int = 1, prefill_chunk: int = 512, num_blocks: int | None = None
    ) -> None:
        self.model, self.context_length = model, model.context_length
        tokens = max(self.context_length, min(max_num_seqs * self.context_length, model.max_cache_tokens))
        self._blocks = BlockManager(num_blocks or -(-tokens // BLOCK_SIZE), BLOCK_SIZE)
        self._runner = ModelRunner(model, self._blocks.num_free)
        self._capacity = min(self.context_length, self._blocks.num_free * BLOCK_SIZE)
        self._scheduler = Scheduler(self._blocks, max_num_seqs, prefill_chunk)
        self._finished_early: list[TokenOutput] = []

    @property
    def has_work(self) -> bool:
        """True while any sequence is unfinished."""
        return self._scheduler.has_work or bool(self._finished_early)

    def add(self, prompt_token_ids: list[int], params: SamplingParams) -> Sequence:
        """Queue a prompt. ContextLengthError if it leaves no room for one token, UsageError if it is empty or has bad ids."""
        check_prompt(prompt_token_ids, self.model.config.vocab_size, self._capacity)
        sequence = Sequence(prompt_token_ids, params, Sampler(params))
        if params.max_tokens == 0:
            sequence.finish_reason = "length"
            self._finished_early.append(TokenOutput(sequence, None, "length"))
        else:
            self._scheduler.add(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Stop a sequence at once; its pages are free again."""
        if sequence.finish_reason is None:
            sequence.finish_reason = "abort"
            self._scheduler.remove(sequence)

    def interrupt(self) -> None:
        """Let the step under way in the main thread end early, without an output and its tokens not counted: for signal
        handlers. A short one still runs to its end."""
        self._runner.interrupt()

    def step(self, max_tokens: int | None = None) -> list[TokenOutput]:
        """Run one batch. Returns the new tokens, at most one a sequence; a chunk inside a prompt gives none.

        max_tokens: run no more tokens than that, to stop a prompt at a given place (a benchmark does).
        """
        if self._finished_early:
            early, self._finished_early = self._finished_early, []
            return early
        chunks = self._scheduler.schedule(max_tokens)
        if not chunks:
            return []
        try:
            logits = self._runner.run(chunks)
        except StepInterrupted:
            return []
        ended = [chunk for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
        return [self._advance(chunk, row) for chunk, row in zip(ended, logits, strict=True)]

    def _advance(self, chunk: ScheduledChunk, logits: np.ndarray) -> TokenOutput:
        """Sample, append, and finish the sequence where it must end."""
        sequence = chunk.sequence
        token = sequence.sampler.sample(logits[: self.model.num_tokens], sequence.token_ids)
        sequence.token_ids.append(token.token_id)
        sequence.finish_reason = self._finish_reason(sequence, token.token_id)
        if sequence.finish_reason is not None:
            self._scheduler.remove(sequence)
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

"""Text over the engine: token ids become text as they arrive, stop strings end it, statistics are kept."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from llmctl.errors import LlmctlError
from llmctl.runtime.engine import Engine, FinishReason, Sequence, TokenOutput
from llmctl.runtime.engine.speculation import SpeculationStats
from llmctl.runtime.sampling.params import SamplingParams
from llmctl.runtime.sampling.sampler import SampledToken
from llmctl.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextEvent:
    """One engine token as text.

    text: what may be shown now (empty while a character or a possible stop string is incomplete). token_id: None on an event
    that only ends the stream. finish_reason: set on the last event; stop_string: the stop string met, error: what went wrong,
    if that was why.
    """

    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    logprob: float | None = None
    top_logprobs: dict[int, float] = field(default_factory=dict)
    error: LlmctlError | None = None


@dataclass
class GenerationStats:
    """Counts and times of one generation. Rates are None where nothing was measured. constraint_s: what of the other two times
    went to grammars and banned strings. speculation: what drafting did, None without a draft."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    constraint_s: float = 0.0
    speculation: SpeculationStats | None = None

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from the request to its first token; None if there was none."""
        return self.prefill_s * 1e3 if self.completion_tokens else None

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second until the first token came."""
        computed = self.prompt_tokens - self.cached_tokens
        return computed / self.prefill_s if self.prefill_s > 0 and computed else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens per second after the first one."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 and self.completion_tokens > 1 else None


class StopFinder:
    """Finds stop strings in a stream: what is shown never holds one, nor the start of one that may still complete.

    The string that is complete first counts (the longest of several that end together), so the result is the same however the
    text is cut into tokens.
    """

    def __init__(self, stop: list[str]) -> None:
        self._stop = [s for s in stop if s]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop string found). After a find nothing more is shown."""
        self._held += text
        places = ((self._held.find(s), s) for s in self._stop if s in self._held)
        found = min(((start + len(s), start, s) for start, s in places), default=None)
        if found is not None:
            shown, self._held = self._held[: found[1]], ""
            return shown, found[2]
        keep = self._ambiguous()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, None

    def _ambiguous(self) -> int:
        """Length of the longest tail of the held text that starts a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0

    def flush(self) -> str:
        """What is still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held


class TextAssembler:
    """One sequence's tokens → text events: detokenizer and stop strings in one place, whoever drives the engine."""

    def __init__(self, tokenizer: Tokenizer, stop: list[str]) -> None:
        self._detokenizer = tokenizer.stream(strip_space=False)  # the completion continues the prompt's text
        self._stop = StopFinder(stop)

    def push(self, output: TokenOutput) -> TextEvent:
        """The event for one engine output; a found stop string makes it the last one."""
        token, reason = output.token, output.finish_reason
        if token is None:
            return self.end(reason or "length", output.error)
        text = "" if reason == "stop" else self._detokenizer.push(token.token_id)  # an end token is never shown
        if reason is not None:
            text += self._detokenizer.flush()
        text, found = self._stop.push(text)
        if found is None and reason is not None:
            text += self._stop.flush()
        reason = "stop" if found is not None else reason
        return TextEvent(text, token.token_id, reason, found, token.logprob, token.top_logprobs)

    def end(self, reason: FinishReason, error: LlmctlError | None = None) -> TextEvent:
        """The last event of a sequence that ends without another token: what was still held back."""
        text, found = self._stop.push(self._detokenizer.flush())
        if found is not None:
            return TextEvent(text, None, "stop", found)
        return TextEvent(text + self._stop.flush(), None, reason, error=error)


class TextStream:
    """Iterator over the events of one generation, which has the engine to itself meanwhile. Closing it early (or leaving the
    loop) frees the sequence's pages. After an event with an error it raises that."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams, stop: list[str]
    ) -> None:
        self.stats = GenerationStats(prompt_tokens=len(prompt_token_ids))
        self._engine, self._cancelled = engine, False
        self._drafted_before = None if engine.speculation is None else replace(engine.speculation.stats)
        self.sequence: Sequence = engine.add(prompt_token_ids, params)
        self._events = self._run(TextAssembler(tokenizer, stop))

    def __iter__(self) -> Iterator[TextEvent]:
        return self._events

    def _run(self, assembler: TextAssembler) -> Iterator[TextEvent]:
        """One engine step after another. Only the engine's time is counted, not what the reader does between two events."""
        begin, num_unused = time.perf_counter(), 0
        try:
            while True:
                outputs = self._engine.step()
                for number, output in enumerate(outputs, 1):
                    assert output.sequence is self.sequence, "a TextStream has its engine alone; to share one use TextAssembler"
                    self._count(output, time.perf_counter() - begin)
                    event = assembler.push(output)
                    yield event
                    if event.error is not None:
                        raise event.error
                    if event.finish_reason is not None:
                        num_unused = len(outputs) - number
                        return
                    begin = time.perf_counter()
                if self._cancelled or self.sequence.finish_reason is not None:
                    yield assembler.end(self.sequence.finish_reason or "abort")
                    return
        finally:
            self._engine.abort(self.sequence, num_unused)
            if self._drafted_before is not None:
                self.stats.speculation = self._engine.speculation.stats.since(self._drafted_before)

    def _count(self, output: TokenOutput, seconds: float) -> None:
        if output.token is None:
            return
        self.stats.completion_tokens += 1
        self.stats.constraint_s = self.sequence.sampler.constraint_s
        if self.stats.completion_tokens == 1:
            self.stats.prefill_s, self.stats.cached_tokens = seconds, self.sequence.num_cached_tokens
        else:
            self.stats.decode_s += seconds

    def cancel(self) -> None:
        """Ask for the end, from a signal handler or another thread: the step under way is the last one, cut short where the
        engine can, and one more event with finish_reason "abort" brings the text that was still held back."""
        self._cancelled = True
        self._engine.interrupt()

    def close(self) -> None:
        """Stop now."""
        self._events.close()
        self._engine.abort(self.sequence)


def generate_text(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    params: SamplingParams,
    stop: list[str] | None = None,
) -> TextStream:
    """Generate from a prompt. Iterate the result for `TextEvent`s; `.stats` holds counts and times, `.sequence` the ids."""
    return TextStream(engine, tokenizer, prompt_token_ids, params, stop or [])


@dataclass(frozen=True)
class TextRequest:
    """One of several prompts that are answered together. count: answers to it, which share its pages; `Engine.add_several`."""

    prompt_token_ids: list[int]
    params: SamplingParams
    stop: list[str]
    count: int = 1


class Batch:
    """Answers requests, several at once, as each alone would be answered.

    width: sequences in the engine; requests are taken from the iterable only as they find room.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, requests: Iterable[TextRequest], width: int) -> None:
        self._engine, self._tokenizer, self._width = engine, tokenizer, width
        self._waiting, self._number = iter(requests), 0
        self._running: dict[Sequence, _Running] = {}
        self._cancelled = False

    def __iter__(self) -> Iterator[tuple[int, Completion]]:
        """The number of each answer, those of a request in a row, and the answer, as they are done."""
        try:
            while not self._cancelled and self._admit():
                outputs = self._engine.step()
                for number, output in enumerate(outputs, 1):
                    if output.sequence not in self._running:
                        continue  # the rest of a draft in which a stop string came
                    done = self._running[output.sequence].push(output)
                    if done is not None:  # a stop string may have come before the engine's own end
                        rest = sum(later.sequence is output.sequence for later in outputs[number:])
                        self._engine.abort(output.sequence, rest)
                        yield self._running.pop(output.sequence).number, done
        finally:
            for sequence in self._running:
                self._engine.abort(sequence)

    def _admit(self) -> bool:
        """Fill the engine; False when there is nothing left to do."""
        while len(self._running) < self._width and (request := next(self._waiting, None)) is not None:
            for sequence in self._engine.add_several(request.prompt_token_ids, request.params, request.count):
                assembler = TextAssembler(self._tokenizer, request.stop)
                self._running[sequence] = _Running(self._number, assembler, Completion(sequence))
                self._number += 1
        return bool(self._running)

    def cancel(self) -> None:
        """Ask for the end, from a signal handler: unfinished answers are given up."""
        self._cancelled = True
        self._engine.interrupt()


class Completion:
    """An answer so far: its text, the tokens as they were drawn, why it ended ("abort": it did not; error: what went wrong).

    stats: of whoever measures them; without, only counts, since times have no meaning for one of several. sequence: the engine's.
    """

    def __init__(self, sequence: Sequence, stats: GenerationStats | None = None) -> None:
        self.sequence, self._stats = sequence, stats
        self.text = ""
        self.tokens: list[SampledToken] = []
        self.finish_reason: FinishReason = "abort"
        self.stop_string: str | None = None
        self.error: LlmctlError | None = None

    @property
    def seed(self) -> int | None:
        """What makes the same answer again; None where nothing does: see `Sampler`."""
        return self.sequence.sampler.seed

    @property
    def stats(self) -> GenerationStats:
        """Counts, and times where they were measured."""
        if self._stats is not None:
            return self._stats
        return GenerationStats(self.sequence.num_prompt_tokens, self.sequence.num_cached_tokens, len(self.tokens))

    @property
    def is_complete(self) -> bool:
        """False where it was cut before it was what a grammar asks for."""
        return self.finish_reason != "length" or self.sequence.sampler.is_complete

    def take(self, event: TextEvent) -> None:
        """Add what came."""
        self.text += event.text
        if event.token_id is not None:
            self.tokens.append(SampledToken(event.token_id, event.logprob, event.top_logprobs))
        if event.finish_reason is not None:
            self.finish_reason, self.stop_string, self.error = event.finish_reason, event.stop_string, event.error


@dataclass
class _Running:
    number: int
    assembler: TextAssembler
    completion: Completion

    def push(self, output: TokenOutput) -> Completion | None:
        """Take in a token; the completion when it was the last."""
        event = self.assembler.push(output)
        self.completion.take(event)
        return None if event.finish_reason is None else self.completion

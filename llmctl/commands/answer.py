"""One answer of a model, shown while it is made: shared by the one-shot run and the chat."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.draft import describe_speculation
from llmctl.commands.signals import on_interrupt

if TYPE_CHECKING:
    from llmctl.runtime.cache.kept import KeptTokens
    from llmctl.runtime.engine import Engine
    from llmctl.runtime.generation import Completion, GenerationStats, TextEvent
    from llmctl.runtime.loading import LoadedModel, OpenedModel
    from llmctl.runtime.sampling.params import SamplingParams
    from llmctl.runtime.tokenizer import Tokenizer


def stream_answer(
    engine: Engine,
    tokenizer: Tokenizer,
    token_ids: list[int],
    params: SamplingParams,
    stop: list[str],
    take: Callable[[TextEvent], None],
) -> Completion:
    """Generate, passing every event to `take` as it comes. Ctrl-C ends the answer, not the program."""
    from llmctl.runtime.generation import Completion, generate_text

    stream = generate_text(engine, tokenizer, token_ids, params, stop)
    answer = Completion(stream.sequence, stream.stats)
    with contextlib.closing(stream), on_interrupt(stream.cancel):
        for event in stream:
            answer.take(event)
            take(event)
    return answer


def show_text(text: str) -> None:
    """Write a piece of the answer to stdout; on a terminal no control character of the model's reaches it."""
    console.result(printable(text) if console.is_terminal(sys.stdout) else text, end="")


def printable(text: str) -> str:
    """The text with control characters replaced, which could do anything to a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" or ord(c) > 0x9F else "\ufffd" for c in text)


def load_weights(opened: OpenedModel, threads: int | None) -> tuple[LoadedModel, float]:
    """Prepare the weights, with a bar if stderr is a terminal. Returns the model and the seconds it took."""
    begin = time.perf_counter()
    with contextlib.ExitStack() as stack:
        bar = None
        if console.is_terminal(sys.stderr):
            bar = stack.enter_context(console.progress("Loading", opened.config.num_layers, unit="layer"))
        model = opened.load(threads=threads, progress=bar.update_to if bar else None)
    return model, time.perf_counter() - begin


def describe_model(name: str, model: LoadedModel) -> list[str]:
    """What answers, for --verbose."""
    ops = model.ops
    activations = f", {model.activations} activations" if model.activations else ""
    policy = "" if model.kv_policy.kind == "full" else f" ({model.kv_policy})"
    return [
        f"model: {name} ({model.config.family}, {model.checkpoint.total_elements / 1e6:.1f} M parameters)",
        f"backend: {ops.name} on {ops.device}, {ops.threads} threads, {ops.dtype}{activations}, {model.kv_type} cache{policy}",
        f"context: {model.context_length} tokens",
    ]


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SHOWN_WHEN_ON = {"dry": 0.0, "typical": 1.0, "xtc": 0.0}
"""Steps of which nothing is said while they are off, and the value that means so."""
_VALUES = {
    "penalties": _PENALTIES,
    "dry": ("dry_multiplier",),
    "typical": ("typical_p",),
    "xtc": ("xtc_probability",),
    "mirostat": ("mirostat_tau",),
}
"""The values a step is described by, where it is not one of the step's own name."""


def order(params: SamplingParams) -> list[str]:
    """The values that shape a token in the order in which runtime/sampling applies them, without the logit bias before."""
    from llmctl.runtime.sampling.params import MIROSTAT_STEPS

    steps = params.samplers if params.mirostat_tau is None else MIROSTAT_STEPS
    return [value for step in steps for value in _VALUES.get(step, (step,))]


def describe_sampling(params: SamplingParams, from_file: dict[str, Any]) -> list[str]:
    """The values used, in the order in which they are applied, for --verbose."""
    off = {value: _SHOWN_WHEN_ON[step] for step in _SHOWN_WHEN_ON for value in _VALUES[step]}
    names = [name for name in order(params) if name not in off or getattr(params, name) != off[name]]
    used = [f"{name} {getattr(params, name)}" for name in names]
    bias = f"logit_bias on {len(params.logit_bias)} tokens -> " if params.logit_bias else ""
    limit = "until the end token" if params.max_tokens is None else f"at most {params.max_tokens} tokens"
    greedy = ", so greedy" if params.is_greedy else ""
    recommended = ", ".join(f"{name} {value:g}" for name, value in from_file.items())
    return [
        f"sampling: {bias}{' -> '.join(used)}{greedy}; penalties over the last {params.repetition_window} tokens; {limit}",
        *([f"of these from the model's file: {recommended}"] if recommended else []),
    ]


def describe_answer(answer: Completion) -> list[str]:
    """Seed, if one makes it again, counts and rates; told once it is whole, since a line in between would tear it."""
    stats = answer.stats
    prompt = f"prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} of them cached"
    prefill, decode, first = stats.prefill_tokens_per_s, stats.decode_tokens_per_s, stats.ttft_ms
    return [
        *([] if answer.seed is None else [f"seed: {answer.seed}"]),
        prompt + (f", {prefill:.1f} tokens/s" if prefill else ""),
        f"generated: {stats.completion_tokens} tokens" + (f", {decode:.1f} tokens/s" if decode else ""),
        *([f"first token after: {first:.0f} ms"] if first is not None else []),
        *(describe_speculation(stats.speculation) if stats.speculation else []),
        *([_describe_constraints(stats)] if stats.constraint_s and stats.completion_tokens else []),
    ]


def describe_experts(counts: list[list[int]]) -> list[str]:
    """How evenly experts were chosen: counts of tokens, layer by layer. Empty without any."""
    layers = [layer for layer in counts if sum(layer)]
    if not layers:
        return []
    busiest = max(max(layer) / sum(layer) for layer in layers)
    idle, total = sum(layer.count(0) for layer in layers), sum(map(len, layers))
    shares = f"the busiest had {busiest:.1%} of its layer's choices (even would be {len(layers) / total:.1%})"
    return [f"experts: {shares}, {idle} of {total} were never chosen"]


def _describe_constraints(stats: GenerationStats) -> str:
    each, share = stats.constraint_s / stats.completion_tokens, stats.constraint_s / (stats.prefill_s + stats.decode_s)
    return f"grammar and banned strings: {each * 1e6:.0f} µs a token, {share:.1%} of the time"


def describe_kept(kept: KeptTokens) -> str:
    """What a policy left of the cache."""
    counts = sorted({kept.num_kept(layer) for layer in range(len(kept.layers))})
    tokens = " or ".join(map(str, counts))
    return (
        f"cache: layers keep {tokens} of {kept.num_tokens} tokens, "
        f"{console.format_bytes(kept.nbytes)} of {console.format_bytes(kept.full_bytes)}"
    )


def describe_limit(answer: Completion, params: SamplingParams, context_length: int) -> str:
    """Why an answer with finish_reason "length" ended."""
    if params.max_tokens is not None and answer.stats.completion_tokens >= params.max_tokens:
        return f"The answer was cut at --max-tokens {params.max_tokens}."
    used = f"{answer.stats.prompt_tokens} of the prompt, {answer.stats.completion_tokens} of the answer"
    return f"The answer was cut: the context of {context_length} tokens is full ({used}); --ctx-size sets it."

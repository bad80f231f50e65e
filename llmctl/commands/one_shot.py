"""One prompt, one answer: text or a JSON document on stdout, everything else on stderr."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from llmctl.commands import console
from llmctl.commands.answer import (
    ORDER,
    Answer,
    describe_limit,
    describe_model,
    describe_sampling,
    describe_stats,
    load_weights,
    show_text,
    stream_answer,
)

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.loading import LoadedModel

INTERRUPTED = 130


def answer_once(session: Session, prompt: str) -> None:
    """Answer and print. Ctrl-C leaves what there is of the answer and exits with 130."""
    from llmctl.runtime.engine import Engine
    from llmctl.runtime.engine.engine import check_prompt

    token_ids = encode(session, prompt)
    check_prompt(token_ids, session.opened.num_tokens, session.opened.context_length)
    model, load_s = load_weights(session.opened, session.request.threads)
    for line in [*describe_model(session.request.name, model), *describe_sampling(session.params, session.from_file)]:
        console.detail(line)
    answer = _generate(session, Engine(model), token_ids)
    if session.request.json:
        console.print_json(_document(session, model, answer, load_s))
    _report(session, model, answer, load_s)
    if answer.finish_reason == "abort":
        raise typer.Exit(INTERRUPTED)


def encode(session: Session, prompt: str) -> list[int]:
    """The prompt as ids: through the chat template, or as raw text where there is none. Errors: ChatTemplateError."""
    from llmctl.runtime.tokenizer.chat_template import encode_chat

    tokenizer, request = session.opened.tokenizer, session.request
    if session.template is None:
        if not request.raw:
            console.info("This model has no chat template: the prompt is completed as raw text, as with --no-chat.")
        return tokenizer.encode(prompt, parse_special=True)
    system = [{"role": "system", "content": request.system}] if request.system is not None else []
    return encode_chat(tokenizer, [*system, {"role": "user", "content": prompt}], template=session.template)


def _generate(session: Session, engine: Any, token_ids: list[int]) -> Answer:
    """Stream the answer to stdout, and end its last line whatever happens. With --json nothing is shown yet."""
    request, tail = session.request, [""]

    def show(text: str) -> None:
        show_text(text)
        tail[0] = text

    tokenizer = session.opened.tokenizer
    if request.json:
        return stream_answer(engine, tokenizer, token_ids, session.params, request.stop, lambda text: None)
    try:
        return stream_answer(engine, tokenizer, token_ids, session.params, request.stop, show)
    except KeyboardInterrupt:  # a second Ctrl-C, before the step under way was done
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if not tail[0].endswith("\n"):
            console.result()


def _report(session: Session, model: LoadedModel, answer: Answer, load_s: float) -> None:
    """What stderr is told after the answer."""
    from llmctl.runtime.machine import peak_memory

    if answer.finish_reason == "length":
        console.info(describe_limit(answer, session.params, model.context_length))
    for line in describe_stats(answer.stats):
        console.detail(line)
    peak = peak_memory()
    console.detail(f"loaded in {load_s:.2f} s" + (f", peak memory {console.format_bytes(peak)}" if peak else ""))


def _document(session: Session, model: LoadedModel, answer: Answer, load_s: float) -> dict[str, Any]:
    from llmctl.runtime.machine import peak_memory

    stats, ops = answer.stats, model.ops
    return {
        "model": session.request.name,
        "path": model.checkpoint.path,
        "family": model.config.family,
        "backend": ops.name,
        "device": ops.device,
        "dtype": ops.dtype,
        "kv_type": model.kv_type,
        "activations": model.activations,
        "threads": ops.threads,
        "context_length": model.context_length,
        "chat_template": session.template is not None,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_string": answer.stop_string,
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "completion_tokens": stats.completion_tokens,
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        },
        "timings": {
            "load_s": load_s,
            "ttft_ms": stats.ttft_ms,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "prefill_tokens_per_s": stats.prefill_tokens_per_s,
            "decode_tokens_per_s": stats.decode_tokens_per_s,
        },
        "peak_memory_bytes": peak_memory(),
        "sampling": {**asdict(session.params), "seed": answer.seed, "stop": session.request.stop, "order": ORDER},
    }

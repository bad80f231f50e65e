"""One prompt, one answer: text, a JSON document or JSON events on stdout, everything else on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from llmctl.commands import answer_json, console
from llmctl.commands.answer import (
    describe_answer,
    describe_experts,
    describe_kept,
    describe_limit,
    describe_model,
    describe_sampling,
    load_weights,
    show_text,
    stream_answer,
)
from llmctl.commands.draft import describe_loss
from llmctl.commands.saved_chat import PromptCache
from llmctl.errors import LlmctlError, StandardOutputError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.generation import Completion, TextEvent
    from llmctl.runtime.loading import LoadedModel

INTERRUPTED = 130


def answer_once(session: Session, prompt: str) -> None:
    """Answer and print. Ctrl-C leaves what there is of the answer and exits with 130.

    Errors: LlmctlError, after the answer, if it was cut before it was what a grammar asks for.
    """
    token_ids = encode_prompt(session, prompt)
    model, load_s = load_weights(session.opened, session.request.threads)
    describe_model_and_sampling(session, model)
    engine = session.engine(model)
    cache = PromptCache(session.request.prompt_cache, engine) if session.request.prompt_cache else None
    if cache is not None:
        cache.load(token_ids)
    answer = _generate(session, engine, token_ids)
    if cache is not None:
        cache.save([*token_ids, *(token.token_id for token in answer.tokens)])
    if session.request.json:
        console.print_json(answer_json.document(session, model, answer, load_s))
    if session.request.json_lines:
        console.print_json({"event": "end", **answer_json.document(session, model, answer, load_s)}, indent=None)
    if model.kv_policy.kind != "full":
        console.detail(describe_kept(engine.kept(answer.sequence)))
    _report(session, model, answer, load_s)
    if answer.finish_reason == "abort":
        raise typer.Exit(INTERRUPTED)


def encode_prompt(session: Session, prompt: str) -> list[int]:
    """The ids of a single prompt, checked against the model. Errors: ChatTemplateError, and those of `check_prompt`."""
    from llmctl.runtime.engine.engine import check_prompt

    tell_missing_template(session)
    messages = None if session.template is None else session.messages(prompt)
    token_ids = encode(session, prompt, messages)
    check_prompt(token_ids, session.opened.num_tokens, session.opened.context_length)
    return token_ids


def describe_model_and_sampling(session: Session, model: LoadedModel) -> None:
    """What answers and how, for --verbose."""
    for line in [*describe_model(session.request.name, model), *describe_sampling(session.params, session.from_file)]:
        console.detail(line)


def tell_missing_template(session: Session) -> None:
    """Say that there is none, unless nobody asked for one."""
    if session.template is None and not session.request.raw:
        console.info("This model has no chat template: the prompt is completed as raw text, as with --no-chat.")


def encode(session: Session, prompt: str, messages: list[dict[str, Any]] | None) -> list[int]:
    """The messages as ids, through the chat template; or, without messages, the prompt as raw text.

    Errors: ChatTemplateError.
    """
    from llmctl.runtime.tokenizer.chat_template import encode_chat

    tokenizer = session.opened.tokenizer
    if messages is not None:
        return encode_chat(tokenizer, messages, template=session.template)
    return tokenizer.encode(prompt, parse_special=True)


def _generate(session: Session, engine: Any, token_ids: list[int]) -> Completion:
    """Stream the answer to stdout, and end its last line whatever happens. With --json nothing is shown yet."""
    request, params, tokenizer = session.request, session.params, session.opened.tokenizer
    if request.json:
        return stream_answer(engine, tokenizer, token_ids, params, request.stop, lambda event: None)
    if request.json_lines:
        return _stream_events(session, engine, token_ids)
    tail = [""]

    def show(event: TextEvent) -> None:
        if event.text:
            show_text(event.text)
            tail[0] = event.text

    try:
        return stream_answer(engine, tokenizer, token_ids, params, request.stop, show)
    except KeyboardInterrupt:  # a second Ctrl-C, before the step under way was done
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if not tail[0].endswith("\n"):
            console.result()


def _stream_events(session: Session, engine: Any, token_ids: list[int]) -> Completion:
    """The lines of --json-lines, but for the last one; an answer that fails has its error there. Errors: LlmctlError."""
    tokenizer, params = session.opened.tokenizer, session.params
    console.print_json({"event": "start", "model": session.request.name, "prompt_tokens": len(token_ids)}, indent=None)

    def write(event: TextEvent) -> None:
        if event.text or event.token_id is not None:
            console.print_json(answer_json.token_event(tokenizer, params, event), indent=None)

    try:
        return stream_answer(engine, tokenizer, token_ids, params, session.request.stop, write)
    except StandardOutputError:  # nobody reads any more
        raise
    except LlmctlError as error:
        console.print_json({"event": "error", "error": str(error)}, indent=None)
        raise


def _report(session: Session, model: LoadedModel, answer: Completion, load_s: float) -> None:
    """What stderr is told after the answer. Errors: LlmctlError, as `answer_once`."""
    from llmctl.runtime.machine import peak_memory

    for line in (*describe_answer(answer), *describe_experts(model.decoder.expert_counts())):
        console.detail(line)
    peak = peak_memory()
    console.detail(f"loaded in {load_s:.2f} s" + (f", peak memory {console.format_bytes(peak)}" if peak else ""))
    if answer.stats.speculation and (hint := describe_loss(answer.stats.speculation, "this answer")):
        console.info(hint)
    if answer.finish_reason != "length":
        return
    limit = describe_limit(answer, session.params, model.context_length)
    if not answer.is_complete:
        raise LlmctlError(f"{limit} It is not yet what {session.request.structure.flag} asks for")
    console.info(limit)

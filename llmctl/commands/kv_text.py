"""The text that `inspect-kv` runs: a prompt as `run` would send it, or what a saved cache holds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.errors import FormatError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.engine import Engine
    from llmctl.runtime.inspection.what_if import Needle
    from llmctl.runtime.loading import LoadedModel
    from llmctl.runtime.saved_cache import SavedCache

_NEEDLE = "\nThe special number is {number}. Remember it.\n"
_QUESTION = "\nWhat is the special number?"
_STARTED = "The special number is"


@dataclass(frozen=True)
class InspectedText:
    """token_ids: what the model is given. source: where it comes from, for people. prompt: where it is one, its text.
    saved: the file of --session, and what is in it."""

    token_ids: list[int]
    source: str
    prompt: str | None = None
    saved: tuple[Path, SavedCache] | None = None


def prompt_text(session: Session, prompt: str) -> InspectedText:
    """The prompt through the chat template, if there is one. Errors: UsageError if it is empty, ChatTemplateError."""
    from llmctl.commands.one_shot import encode, tell_missing_template

    if not prompt:
        raise UsageError("the prompt is empty: there is no token to look at")
    tell_missing_template(session)
    messages = None if session.template is None else session.messages(prompt)
    return InspectedText(encode(session, prompt, messages), "the prompt", prompt)


def saved_text(session: Session, path: Path) -> InspectedText:
    """The text of a file that --prompt-cache or /save has written. Errors: OSError, FormatError for a file that is none or of
    another model, UsageError for one without text."""
    from llmctl.runtime.saved_cache import model_hash, read_cache

    saved = read_cache(path)
    if saved.model != model_hash(session.opened.checkpoint):
        raise FormatError(f"{path}: the cache of another model")
    token_ids = saved.token_ids or _chat_ids(session, saved.extra)
    if not token_ids:
        raise UsageError(f"{path}: there is no text in it")
    return InspectedText(token_ids, str(path), saved=(path, saved))


def _chat_ids(session: Session, extra: dict[str, Any]) -> list[int]:
    """Of a chat that was saved without its cache, the conversation."""
    from llmctl.runtime.tokenizer.chat_template import encode_chat

    system, messages = extra.get("system"), extra.get("messages")
    if not messages or session.template is None:
        return []
    first = [{"role": "system", "content": system}] if system is not None else []
    sent = [*first, *messages[extra.get("first", 0) :]]
    return encode_chat(session.opened.tokenizer, sent, template=session.template, add_generation_prompt=False)


def put_back_saved(text: InspectedText, model: LoadedModel) -> Callable[[Engine], None] | None:
    """What gives an engine the cache of a saved text before it runs; where it was made otherwise, that is said instead."""
    if text.saved is None:
        return None
    path, saved = text.saved

    def prepare(engine: Engine) -> None:
        from llmctl.runtime.saved_cache import put_back

        try:
            put_back(path, saved, engine, saved.model)
        except (FormatError, UnsupportedError) as error:
            console.warn(f"the text is computed again, since its cache cannot be used here: {error}")

    return prepare


def pieces(model: LoadedModel, token_ids: list[int]) -> list[str]:
    """The text of each token; bytes that only make a character together come with the last of them."""
    assert model.tokenizer is not None
    stream = model.tokenizer.stream(skip_special=False, strip_space=False)
    found = [stream.push(token_id) for token_id in token_ids]
    found[-1] += stream.flush()
    return found


def needles(session: Session, text: InspectedText, count: int) -> list[Needle]:
    """The text with a seven-digit number in it, at so many depths, and a question at its end."""
    from llmctl.runtime.inspection.what_if import Needle

    chooser, found = random.Random(0), []
    for index in range(count):
        depth, number = (index + 0.5) / count, str(chooser.randrange(1_000_000, 10_000_000))
        token_ids = _with_needle(session, text, depth, _NEEDLE.format(number=number))
        found.append(Needle(depth, token_ids, number))
    return found


def _with_needle(session: Session, text: InspectedText, depth: float, needle: str) -> list[int]:
    """A prompt is put together as text and sent as ever; a saved text is cut between tokens."""
    from llmctl.commands.one_shot import encode

    tokenizer = session.opened.tokenizer

    def ids(part: str) -> list[int]:
        return tokenizer.encode(part, add_special=False)

    if text.prompt is not None:
        place = _word_border(text.prompt, round(depth * len(text.prompt)))
        whole = text.prompt[:place] + needle + text.prompt[place:] + "\n" + _QUESTION
        if session.template is not None:
            return [*encode(session, whole, session.messages(whole)), *ids(_STARTED)]
        return [*encode(session, f"{whole}\n{_STARTED}", None)]
    place = round(depth * len(text.token_ids))
    return [*text.token_ids[:place], *ids(needle), *text.token_ids[place:], *ids(f"\n{_QUESTION}\n{_STARTED}")]


def _word_border(text: str, place: int) -> int:
    """The next place that does not cut a word."""
    while 0 < place < len(text) and not text[place - 1].isspace():
        place += 1
    return place

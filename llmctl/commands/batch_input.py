"""The lines of --batch: each a JSON object with a prompt or messages, and what differs from the command line."""

from __future__ import annotations

import difflib
import hashlib
import json
from array import array
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.errors import LlmctlError, UsageError

if TYPE_CHECKING:
    from llmctl.commands.session import Session
    from llmctl.runtime.generation import TextRequest

_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
_FIELDS = ("id", "prompt", "messages", "system", "stop", *_SAMPLING)


@dataclass(frozen=True)
class Task:
    """One line: its number, its own id if it has one, and what is asked, or why it cannot be. fingerprint: of all that decides
    the answer, but for a random seed."""

    line: int
    id: Any
    request: TextRequest | None
    error: str | None
    fingerprint: str


def read_tasks(session: Session, file: Path) -> list[Task]:
    """Every line but the blank ones; `-` is stdin. Errors: OSError, UsageError if there is none."""
    from llmctl.commands.prompt_input import read_stdin_bytes

    data = read_stdin_bytes() if str(file) == "-" else file.read_bytes()
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    tasks = [_task(session, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise UsageError(f"--batch {file}: there is no line in it")
    return tasks


def _task(session: Session, number: int, line: bytes) -> Task:
    found: Any = None
    request, error = None, None
    try:
        found = _parse(line)
        request = _request(session, found)
    except LlmctlError as failure:
        error = console.one_line(str(failure))
    own_id = found.get("id") if isinstance(found, dict) else None
    return Task(number, own_id, request, error, _fingerprint(session, line if request is None else request))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"not UTF-8 text: byte 0x{line[error.start]:02x} at offset {error.start}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"expected a JSON object, found {type(found).__name__}")
    unknown = next((name for name in found if name not in _FIELDS), None)
    if unknown is not None:
        near = difflib.get_close_matches(unknown, _FIELDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(_FIELDS)}"
        raise UsageError(f"there is no field {unknown!r}; {hint}")
    return found


def _request(session: Session, found: dict[str, Any]) -> TextRequest:
    from llmctl.runtime.engine.engine import check_prompt
    from llmctl.runtime.generation import TextRequest

    token_ids = _encode(session, found)
    check_prompt(token_ids, session.opened.num_tokens, session.opened.context_length)
    own = {name: found[name] for name in _SAMPLING if name in found}
    try:
        params = replace(session.params, **own)
    except TypeError as error:
        raise UsageError(f"{', '.join(own)}: {error}") from None
    return TextRequest(array("I", token_ids), params, _stop(found) if "stop" in found else session.request.stop)


def _encode(session: Session, found: dict[str, Any]) -> list[int]:
    from llmctl.commands.one_shot import encode

    prompt, messages, system = found.get("prompt"), found.get("messages"), found.get("system", session.request.system)
    if (prompt is None) == (messages is None):
        raise UsageError("expected either a prompt or messages")
    if not all(text is None or isinstance(text, str) for text in (prompt, system)):
        raise UsageError("prompt and system must be texts")
    if session.template is None and (messages is not None or system is not None):
        raise UsageError("messages and system need a chat template, and none is in use")
    if session.template is None:
        return encode(session, prompt, None)
    if messages is None:
        messages = [{"role": "user", "content": prompt}]
    elif "system" in found and any(isinstance(m, dict) and m.get("role") == "system" for m in _checked(messages)):
        raise UsageError("the system message is given twice: as a field and among the messages")
    else:
        messages = _checked(messages)
    has_system = bool(messages) and messages[0]["role"] == "system"
    before = [] if system is None or has_system else [{"role": "system", "content": system}]
    return encode(session, "", [*before, *messages])


def _checked(messages: Any) -> list[dict[str, Any]]:
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages):
        raise UsageError("messages must be a list of objects, each with role and content")
    if not all(isinstance(m[name], str) for m in messages for name in ("role", "content")):
        raise UsageError("role and content of a message must be texts")
    return messages


def _stop(found: dict[str, Any]) -> list[str]:
    stop = [found["stop"]] if isinstance(found["stop"], str) else found["stop"]
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise UsageError("stop must be a text or a list of texts, none of them empty")
    return stop


def _fingerprint(session: Session, asked: TextRequest | bytes) -> str:
    """Hash of what decides an answer: the model, the tokens asked, how the next ones are chosen."""
    if isinstance(asked, bytes):
        return hashlib.sha256(asked).hexdigest()[:16]
    checkpoint, request = session.opened.checkpoint, session.request
    chosen = {
        f.name: getattr(asked.params, f.name) for f in fields(asked.params) if f.name not in ("constraints", "dry_breakers")
    }
    model = [str(checkpoint.path), checkpoint.total_elements, str(session.opened.compute), session.opened.context_length]
    model.append(str(session.opened.kv_policy))
    other = [asked.stop, request.structure, request.banned, request.breakers]
    text = json.dumps([model, list(asked.prompt_token_ids), chosen, other], default=str, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]

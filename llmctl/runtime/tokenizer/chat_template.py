"""Conversations to text and to token ids, through the model's own chat template.

`render_chat` gives, byte for byte, what `apply_chat_template(..., tokenize=False)` of transformers gives for the same
JSON messages, with two intended differences: tool-call arguments that arrive as a JSON string reach the template as the
mapping that templates expect, and a template that would run or grow without end is stopped (see `template_sandbox`).

`encode_chat` gives the same ids as encoding that text with special tokens parsed, except that control tokens written
*inside* the conversation stay plain text. Which texts are kept from becoming control tokens:

- every string of the messages, tools, documents and template variables, keys included; in message texts also half a
  control token at either edge, which two joined texts could complete. `role` is exempt from the latter only, because
  some templates build their tokens from it (`'<|' + role + '|>'`);
- not the special tokens themselves (`special`), which the template writes;
- not, in *assistant* messages, a control token that the template's own code searches or splits for. Templates take
  reasoning apart at `</think>`; where that is a control token, hiding it would change what they do, and the model did
  write it as that token. So such a marker in an assistant text reaches the template as it is, and what the template
  leaves of it is parsed as the token. In user, system and tool texts it is plain text like all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from llmctl.errors import ChatTemplateError, UnsupportedError
from llmctl.runtime.tokenizer.content_shield import (
    ContentShield,
    ControlTokens,
    control_tokens,
    map_strings,
    strings_in,
)
from llmctl.runtime.tokenizer.template_budget import MAX_NESTING, Stopped
from llmctl.runtime.tokenizer.template_features import searched_texts
from llmctl.runtime.tokenizer.template_sandbox import render_template

Clock = Callable[[], datetime]
Message = Mapping[str, Any]

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")
_CONVERSIONS = ((str, str.__str__), (int, int.__int__), (float, float.__float__))  # of subclasses, such as enum members
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTokenizer(Protocol):
    """What `encode_chat` needs of a tokenizer."""

    chat_templates: dict[str, str]
    named_special: dict[str, str]

    def special_tokens(self) -> dict[str, int]: ...

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        plain: Sequence[tuple[int, int]] = (),
    ) -> list[int]: ...


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    documents: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    special: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    **variables: Any,
) -> str:
    """The conversation as the template writes it.

    `messages` are JSON objects with `role` and `content` (text, a list of parts, or null), and what else the template
    reads; `tools` and `documents` are JSON objects; `special` names the special tokens (`bos_token`, `eos_token` ...);
    `variables` are the template's own switches (`enable_thinking=False`). `clock` answers the template's date calls.
    Raises ChatTemplateError if there is no template, if the messages are not such objects, or if the template refuses;
    UnsupportedError for `continue_final_message`, which transformers treats as an option of its own.
    """
    given = _Inputs(messages, tools, documents, variables)

    def render(inputs: dict[str, Any]) -> str:
        everything = {**(special or {}), "add_generation_prompt": add_generation_prompt, **inputs}
        return render_template(_required(template), everything, clock=clock)

    return given.render(render)


def encode_chat(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    template: str | None = None,
    tools: Sequence[Message] | None = None,
    documents: Sequence[Message] | None = None,
    add_generation_prompt: bool = True,
    special: Mapping[str, str] | None = None,
    clock: Clock | None = None,
    **variables: Any,
) -> list[int]:
    """Token ids of the conversation; see the module's text for what may become a control token.

    `template` replaces the tokenizer's own (its `tool_use` one when there are tools, else `default`); `special` is
    merged over the tokenizer's special tokens. No BOS is added: a template that wants one writes it, as in transformers.
    """
    source = _required(template or _own_template(tokenizer, tools))
    control = control_tokens(tuple(tokenizer.special_tokens()))
    names = {**tokenizer.named_special, **(special or {})}

    def encode(inputs: dict[str, Any]) -> list[int]:
        shielded, shield = _shielded(inputs, control, source)
        everything = {**names, "add_generation_prompt": add_generation_prompt, **shielded}
        text = render_template(source, everything, clock=clock, shield=shield)
        text, plain = (text, []) if shield is None else shield.restore_spans(text)
        text = _LONE_SURROGATES.sub("\ufffd", text)  # one for one, so that `plain` still fits
        return tokenizer.encode(text, add_special=False, parse_special=True, plain=plain)

    return _Inputs(messages, tools, documents, variables).render(encode)


def _required(template: str | None) -> str:
    if template:
        return template
    raise ChatTemplateError(
        "this model has no chat template: --no-chat completes raw text, --chat-template FILE supplies a template"
    )


def _own_template(tokenizer: ChatTokenizer, tools: Sequence[Message] | None) -> str | None:
    templates = tokenizer.chat_templates
    chosen = (templates.get("tool_use") if tools is not None else None) or templates.get("default")
    if templates and not chosen:
        names = ", ".join(sorted(templates))
        raise ChatTemplateError(f"this model has no default chat template, only {names}: --chat-template FILE supplies one")
    return chosen


# --- what the template is given -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """The caller's side of a rendering, checked and rebuilt from plain JSON types before the template sees it."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None
    documents: Sequence[Message] | None
    variables: Mapping[str, Any]

    def render(self, use: Callable[[dict[str, Any]], Any]) -> Any:
        """`use` with tool-call arguments as mappings and, if that fails, as they came.

        A few templates (functionary) join the arguments to other text, which only a string can be.
        """
        if "continue_final_message" in self.variables:
            raise UnsupportedError("continue_final_message is not supported: end the conversation with a user message")
        as_given = {
            **_plain(self.variables, "template variables"),
            "tools": _objects(self.tools, "tools"),
            "documents": _objects(self.documents, "documents"),
            "messages": [_completed(message) for message in _objects(self.messages, "messages") or ()],
        }
        if not as_given["messages"]:
            raise ChatTemplateError("a chat needs at least one message, found none")
        parsed = {**as_given, "messages": _with_parsed_arguments(as_given["messages"])}
        try:
            return use(parsed)
        except ChatTemplateError as error:
            if parsed == as_given or isinstance(error.__cause__, Stopped):
                raise
            try:
                return use(as_given)
            except ChatTemplateError:
                raise error from None


def _objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, Mapping) for item in value):
        raise ChatTemplateError(f"{name} must be a list of JSON objects, found {_kind(value)}")
    return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]


def _kind(value: Any) -> str:
    if not isinstance(value, (list, tuple)):
        return type(value).__name__
    return "a list with " + next(type(item).__name__ for item in value if not isinstance(item, Mapping))


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy made of exact JSON types, so that the template can neither change nor call anything of ours."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth > MAX_NESTING:
        raise ChatTemplateError(f"{where} is nested more than {MAX_NESTING} deep")
    if isinstance(value, Mapping):
        return {_plain(key, where, depth + 1): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, where, depth + 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    for base, convert in _CONVERSIONS:
        if isinstance(value, base):
            return convert(value)
    raise ChatTemplateError(f"{where} must hold JSON values only, found {type(value).__name__}")


def _completed(message: dict[str, Any]) -> dict[str, Any]:
    """Null fields dropped and reasoning under each of its names, as transformers does before rendering."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING_KEYS if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _with_parsed_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool-call arguments that are JSON text become mappings."""
    return [
        {**message, "tool_calls": [_parsed_call(call, index) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _parsed_call(call: Any, message_index: int) -> Any:
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _parsed_call(call["function"], message_index)}
    if not isinstance(call.get("arguments"), str):
        return call
    where = f"messages[{message_index}]: the arguments of the tool call {call.get('name')!r}"
    return {**call, "arguments": _json_object(call["arguments"], where)}


def _json_object(text: str, where: str) -> dict[str, Any]:
    """The mapping in `text`; blank text, which clients send for a call without arguments, is an empty one."""
    if not text.strip():
        return {}

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        value = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"{where} must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{where} must be a JSON object, found {type(value).__name__}")
    return _plain(value, where)


# --- text of the conversation never becomes a control token ---------------------------------------------------------


def _shielded(
    inputs: dict[str, Any], control: ControlTokens, template: str
) -> tuple[dict[str, Any], ContentShield | None]:
    """The inputs with placeholders, and what puts the text back; the inputs as they are and None if there is no need."""
    _, shield = _with_placeholders(inputs, control, template, frozenset())
    if shield.is_empty:
        return inputs, None
    return _with_placeholders(inputs, control, template, _searched_tokens(template, control))


def _with_placeholders(
    inputs: dict[str, Any], control: ControlTokens, template: str, kept: frozenset[str]
) -> tuple[dict[str, Any], ContentShield]:
    shield = ContentShield(control, [template, *strings_in(inputs)])
    others = map_strings({key: value for key, value in inputs.items() if key != "messages"}, shield.protect)
    return {**others, "messages": [_shielded_message(message, shield, kept) for message in inputs["messages"]]}, shield


def _searched_tokens(template: str, control: ControlTokens) -> frozenset[str]:
    needles = searched_texts(template)
    return frozenset(text for text in control.texts if any(text in needle for needle in needles))


def _shielded_message(message: dict[str, Any], shield: ContentShield, kept: frozenset[str]) -> dict[str, Any]:
    keep = kept if message.get("role") == "assistant" else frozenset()

    def protect(value: Any, key: str) -> Any:
        """Of a content made of parts, only the texts may be joined to others; types and such are compared."""
        if isinstance(value, str):
            return shield.protect_edges(value, keep) if key == "text" else shield.protect(value, keep)
        if isinstance(value, dict):
            return {shield.protect(name, keep): protect(item, name) for name, item in value.items()}
        return [protect(item, key) for item in value] if isinstance(value, (list, tuple)) else value

    return {
        shield.protect(key): protect(value, "text")
        if key in ("content", *_REASONING_KEYS)
        else map_strings(value, shield.protect)
        for key, value in message.items()
    }

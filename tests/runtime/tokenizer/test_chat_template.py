"""render_chat with the templates of public models, judged by transformers' renderer: the same bytes, or both refuse.

The judge is in conftest.py. The expected text is written down only where transformers cannot be asked.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from llmctl.errors import ChatTemplateError, UnsupportedError
from llmctl.runtime.tokenizer.chat_template import encode_chat, render_chat

TEMPLATES = Path(__file__).parents[2] / "data" / "templates"
TEMPLATE_NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))


def read_template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_bytes().decode("utf-8")


def user(text: Any = "What is the weather like in Zürich?", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def system(text: Any = "You are a terse assistant.\nAnswer in one line.") -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: Any = " Sunny, 21 °C. ", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str = "get_weather", arguments: Any = None, call_id: str = "abcdefghi") -> dict[str, Any]:
    given = {"city": "Zürich", "days": 2, "detail": {"wind": True, "note": None}} if arguments is None else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def result(text: Any = '{"temperature": 21.5}', call_id: str = "abcdefghi") -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": call_id, "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Reports <weather> & \"wind\" for a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city's name, e.g. Zürich"},
                    "days": {"type": "integer", "description": "How many days", "default": 1, "minimum": 1},
                    "units": {"type": "string", "enum": ["C", "F"], "description": "Units"},
                    "detail": {
                        "type": "object",
                        "description": "More",
                        "properties": {"wind": {"type": "boolean", "description": "Wind too"}},
                        "required": ["wind"],
                    },
                    "hours": {"type": "array", "description": "Hours", "items": {"type": "number"}},
                },
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
    },
]

TURNS = [user("Hi"), assistant("Hello!"), user("  And now?\n")]
PARTS = [{"type": "text", "text": "Look at "}, {"type": "text", "text": "this."}]
THOUGHT = "<think>\nLet me see.\n</think>\n\nIt is 4."
TOOL_ROUND = [user(), assistant(None, tool_calls=[call()]), result()]

# name → (messages, other arguments). add_generation_prompt is given in each: the defaults differ.
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([user()], {}),
    "system and user": ([system(), user()], {}),
    "several turns": ([system(), *TURNS], {}),
    "no generation prompt": ([system(), *TURNS, assistant()], {"add_generation_prompt": False}),
    "ends with the assistant": ([user(), assistant()], {}),
    "two user turns": ([user(), user("again")], {}),
    "assistant first": ([assistant(), user()], {}),
    "system last": ([user(), system()], {}),
    "developer": ([{"role": "developer", "content": "Be brief."}, user()], {}),
    "unknown role": ([{"role": "critic", "content": "Bad."}, user()], {}),
    "empty content": ([system(""), user("")], {}),
    "null content": ([user(), assistant(None), user()], {}),
    "no content": ([user(), {"role": "assistant"}, user()], {}),
    "parts": ([system([PARTS[0]]), user(PARTS), assistant([PARTS[1]]), user(PARTS)], {}),
    "markup in the text": ([user("<b>&amp;</b> {{ 7 * 7 }} {% raw %} 'q' \"q\" \\n 😀\r\n\ttab")], {}),
    "names": ([user("Hi", name="Ada"), assistant("Yes", name="Bot"), user("Ok", name="Ada")], {}),
    "tools": ([system(), user()], {"tools": TOOLS}),
    "tools without system": ([user()], {"tools": TOOLS}),
    "no tools": ([system(), user()], {"tools": []}),
    "tool call": ([system(), *TOOL_ROUND], {"tools": TOOLS}),
    "tool call answered": ([*TOOL_ROUND, assistant("21.5 °C"), user("Thanks")], {"tools": TOOLS}),
    "tool call with text": ([user(), assistant("Let me look.", tool_calls=[call()]), result()], {"tools": TOOLS}),
    "tool call, no definitions": (TOOL_ROUND, {}),
    "two calls": (
        [
            user(),
            assistant("", tool_calls=[call(), call("now", {}, "bcdefghij")]),
            result(),
            result("noon", "bcdefghij"),
        ],
        {"tools": TOOLS},
    ),
    "tool parts": ([*TOOL_ROUND[:2], result([{"type": "text", "text": "sunny"}])], {"tools": TOOLS}),
    "documents": ([system(), user()], {"documents": [{"title": "Zürich", "text": "A city & more"}]}),
    "thinking on": ([system(), *TURNS], {"enable_thinking": True, "thinking": True}),
    "thinking off": ([system(), *TURNS], {"enable_thinking": False, "thinking": False}),
    "effort": ([user()], {"reasoning_effort": "high", "thinking_effort": "low"}),
    "thought in the text": ([user(), assistant(THOUGHT), user("Sure?")], {"enable_thinking": True}),
    "thought last": ([user(), assistant(THOUGHT)], {"add_generation_prompt": False, "enable_thinking": True}),
    "reasoning": ([user(), assistant("4", reasoning_content="\nLet me see.\n"), user("Sure?")], {}),
    "reasoning by its old name": ([user(), assistant("4", thinking="Hm.")], {"enable_thinking": True, "thinking": True}),
    "reasoning before a call": (
        [user(), assistant(None, reasoning="I need data.", tool_calls=[call()]), result()],
        {"tools": TOOLS, "enable_thinking": True, "thinking": True},
    ),
    "other switches": (
        [system(), user()],
        {"date_string": "1 May 2020", "custom_tools": TOOLS, "tool_choice": "required", "knowledge_cutoff": "2024"},
    ),
}

# How many of the 35 templates transformers itself renders. Anything else means that the judge, or the files, have changed.
RENDERED = {
    "user": 34,
    "system and user": 33,
    "several turns": 33,
    "two user turns": 31,
    "developer": 29,
    "null content": 26,
    "parts": 17,
    "tools": 34,
    "tools without system": 35,
    "tool call": 29,
    "tool call with text": 32,
    "two calls": 31,
    "documents": 31,
    "thinking off": 33,
    "thought in the text": 34,
    "reasoning": 34,
}


def test_all_templates_are_here() -> None:
    assert len(TEMPLATE_NAMES) == 35


_outcomes: dict[tuple[str, str], str | None] = {}


def outcome(judge: Any, name: str, conversation: str) -> str | None:
    """What both render, compared once."""
    key = (name, conversation)
    if key not in _outcomes:
        messages, given = CONVERSATIONS[conversation]
        _outcomes[key] = judge.agrees(read_template(name), messages, **given)
    return _outcomes[key]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_equals_transformers(judge: Any, name: str, conversation: str) -> None:
    outcome(judge, name, conversation)


def test_how_many_templates_render(judge: Any) -> None:
    outcomes = [(conversation, outcome(judge, name, conversation)) for name in TEMPLATE_NAMES for conversation in RENDERED]
    assert Counter(conversation for conversation, text in outcomes if text is not None) == RENDERED


class Recorder:
    """A tokenizer whose control tokens are words of the conversations below."""

    chat_templates: dict[str, str] = {}  # noqa: RUF012
    text: str | None = None
    hidden = 0

    def __init__(self, special: dict[str, str]) -> None:
        self.named_special = special

    def special_tokens(self) -> dict[str, int]:
        words = ["<s>", "</s>", "Zürich", "<b>", "Hello", "sunny", "get_weather", "days", "wind", "Let me", "terse", "<think>"]
        return {word: index for index, word in enumerate([*words, "</think>", "<weather>", 'wind"', "city", "C", "|>"])}

    def encode(self, text: str, *, plain: Sequence[tuple[int, int]], **flags: bool) -> list[int]:
        self.text, self.hidden = text, len(plain)
        return []


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_placeholders_change_nothing(judge: Any, name: str) -> None:
    """Even with such control tokens, what encode_chat encodes is the text that render_chat gives."""
    template = read_template(name)
    hidden = 0
    for messages, given in CONVERSATIONS.values():
        recorder = Recorder(judge.special)
        try:
            encode_chat(recorder, messages, template=template, clock=lambda: judge.now, **given)
        except ChatTemplateError:
            judge.refused(template, messages, **given)
        else:
            assert recorder.text == judge.render(template, messages, **given)
        hidden += recorder.hidden
    assert hidden > 10


def test_a_real_template_refuses_the_system_role(judge: Any) -> None:
    assert "System role not supported" in judge.refused(read_template("google-gemma-2-2b-it"), [system(), user()])


# --- messages -------------------------------------------------------------------------------------------------------

ARGUMENTS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.arguments is mapping }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_string_arguments_become_mappings() -> None:
    text = '{"city": "Zürich", "days": 2}'
    messages = [user(), assistant(None, tool_calls=[call(arguments=text)])]
    assert render_chat(ARGUMENTS, messages) == "True" + text
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == text  # the caller's message stays as it was


@pytest.mark.parametrize("blank", ["", " \n"])
def test_blank_arguments_are_none_given(blank: str) -> None:
    assert render_chat(ARGUMENTS, [user(), assistant(None, tool_calls=[call(arguments=blank)])]) == "True{}"


@pytest.mark.parametrize("name", TEMPLATE_NAMES)
def test_string_arguments_render_as_their_mapping(judge: Any, name: str) -> None:
    """Or, where a template takes only text, as they are."""
    template = read_template(name)
    given = {"add_generation_prompt": True, "tools": TOOLS}
    as_mapping = [user(), assistant("Let me look.", tool_calls=[call()]), result()]
    text = json.dumps(call()["function"]["arguments"], ensure_ascii=False)
    as_text = [user(), assistant("Let me look.", tool_calls=[call(arguments=text)]), result()]
    expected = judge.verdict(template, as_mapping, **given)
    if not isinstance(expected, str):
        expected = judge.verdict(template, as_text, **given)
    if isinstance(expected, str):
        assert judge.render(template, as_text, **given) == expected
    else:
        judge.refused(template, as_text, **given)


def test_a_template_that_takes_only_text_gets_text(judge: Any) -> None:
    template = read_template("meetkai-functionary-medium-v3.2")
    messages = [user(), assistant("", tool_calls=[call(arguments='{"a":1}')])]
    assert '>>>get_weather\n{"a":1}' in judge.render(template, messages)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("{", "must be a JSON object"),
        ("[1]", "found list"),
        ('"x"', "found str"),
        ("{'a': 1}", "must be a JSON object"),
        ('{"a": NaN}', "NaN is not a JSON value"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"a":' + "[" * 200 + "]" * 200 + "}", "nested more than"),
    ],
)
def test_arguments_that_are_no_json_object(judge: Any, arguments: str, complaint: str) -> None:
    message = judge.refused(ARGUMENTS, [user(), assistant(None, tool_calls=[call(arguments=arguments)])])
    assert message.startswith("messages[1]: the arguments of the tool call 'get_weather'")
    assert complaint in message


def test_messages_reach_the_template_as_they_are(judge: Any) -> None:
    messages = [user(PARTS, name="Ada", flags=[True, 1, 1.5, None], extra={"k": ("t",)})]
    assert judge.agrees("{{ messages }}", messages) == str([dict(messages[0])])


def test_subclasses_of_plain_types_are_made_plain(judge: Any) -> None:
    class Text(str):
        def secret(self) -> str:
            return "leaked"

    class Role(str, enum.Enum):
        USER = "user"

    class Number(enum.IntEnum):
        ONE = 1

    message = {"role": Role.USER, "content": Number.ONE, "x": numpy.float64(1.5)}
    assert judge.agrees("{{ messages[0].role }}{{ messages[0].content }}{{ messages[0].x | tojson }}", [message]) == "user11.5"
    assert judge.agrees("{{ messages[0].content.secret is defined }}{{ messages[0].content }}", [user(Text("x"))]) == "Falsex"


@pytest.mark.parametrize("messages", [[], None, "hi", [1], [["role", "user"]], {"role": "user"}])
def test_messages_that_are_none(judge: Any, messages: Any) -> None:
    assert "message" in judge.refused("ok", messages)


def test_continue_final_message_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="continue_final_message is not supported"):
        render_chat("ok", [user(), assistant()], continue_final_message=True)


def test_objects_that_are_no_json(judge: Any) -> None:
    assert judge.refused("ok", [user(object())]) == "messages[0] must hold JSON values only, found object"
    assert judge.refused("ok", [user({1, 2})]) == "messages[0] must hold JSON values only, found set"
    assert judge.refused("ok", [user()], tools=[user]) == "tools must be a list of JSON objects, found a list with function"
    assert "template variables must hold JSON values only" in judge.refused("ok", [user()], enable_thinking=object())


def test_deep_messages(judge: Any) -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    assert "nested more than" in judge.refused("ok", [user(deep)])


@pytest.mark.parametrize("template", [None, ""])
def test_no_template(template: str | None) -> None:
    with pytest.raises(ChatTemplateError, match=r"no chat template.*--no-chat.*--chat-template"):
        render_chat(template, [user()])


def test_errors_name_the_line(judge: Any) -> None:
    missing = judge.refused("a\n{{ 1 }}\n{{ missing.name }}", [user()])
    assert missing.startswith("the chat template, line 3: UndefinedError: 'missing' is undefined")
    assert judge.refused("a\n\n\n{% if %}", [user()]).startswith("the chat template, line 4: TemplateSyntaxError: ")
    macro = "{% macro m() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ m() }}"
    assert judge.refused(macro, [user()]).startswith("the chat template, line 2: ZeroDivisionError")


def test_messages_of_errors_hold_no_control_characters(judge: Any) -> None:
    message = judge.refused(r"{{ raise_exception('\x1b[31mred\x1b[0m' ~ 'x' * 5000) }}", [user()])
    assert message.isprintable()
    assert len(message) < 600


def test_a_compiled_template_is_kept() -> None:
    from llmctl.runtime.tokenizer import template_sandbox

    template = "{{ messages[0].content }} kept"
    render_chat(template, [user("1")])
    before = template_sandbox._compile.cache_info()
    assert render_chat(template, [user("2")]) == "2 kept"
    after = template_sandbox._compile.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)

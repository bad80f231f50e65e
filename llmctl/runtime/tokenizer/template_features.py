"""What a chat template looks for in the conversation and which switches it understands, read from its syntax tree."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from jinja2 import meta, nodes

from llmctl.errors import ChatTemplateError
from llmctl.runtime.tokenizer.template_sandbox import parse_template, render_template

_THINKING_VARIABLES = (  # by how common they are
    *("enable_thinking", "thinking", "reasoning_effort", "thinking_effort", "reasoning_strength", "thinking_option"),
    *("thinking_budget", "skip_thinking", "preserve_thinking", "preserved_thinking", "clear_thinking", "drop_thinking"),
)
_SEARCHES = frozenset(
    ("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "replace", "count")
)
_OUR_VARIABLES = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))
_MARK = "llmctlprobe"


@dataclass(frozen=True)
class TemplateFeatures:
    """What a template was found to understand.

    `variables`: names it reads that the caller may set, from its syntax tree (special tokens included where it writes
    them); `thinking`: those of them known to steer reasoning, the most common first; `system_role`, `tools`: whether
    their text shows up in a trial rendering (so False means "not shown for a plain request", not "never").
    """

    variables: frozenset[str]
    thinking: tuple[str, ...]
    system_role: bool
    tools: bool


@functools.lru_cache(maxsize=32)
def template_features(template: str) -> TemplateFeatures:
    """Find out what `template` understands. Raises ChatTemplateError if it is not valid Jinja."""
    variables = _read_variables(parse_template(template))
    user = {"role": "user", "content": "a question"}
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}}
    function = {"name": _MARK, "description": "a function", "parameters": {**parameters, "required": ["city"]}}
    return TemplateFeatures(
        variables=variables,
        thinking=tuple(name for name in _THINKING_VARIABLES if name in variables),
        system_role=_shows_mark(template, [{"role": "system", "content": _MARK}, user]),
        tools=_shows_mark(template, [user], [{"type": "function", "function": function}]),
    )


def _read_variables(tree: nodes.Template) -> frozenset[str]:
    """Names looked up outside the template. One that it also sets itself counts only where it asks whether it is given."""
    assert tree.environment is not None
    names = meta.find_undeclared_variables(tree) - tree.environment.globals.keys() - _OUR_VARIABLES
    own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    questions = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    questions += [used.node for used in tree.find_all(nodes.Filter) if used.name in ("default", "d")]
    asked = {node.name for node in questions if isinstance(node, nodes.Name)}
    return frozenset(names - (own - asked))


def _shows_mark(template: str, messages: list[dict[str, str]], tools: list[dict[str, Any]] | None = None) -> bool:
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
    try:
        return _MARK in render_template(template, {**given, "bos_token": "", "eos_token": ""})
    except ChatTemplateError:
        return False


@functools.lru_cache(maxsize=32)
def searched_texts(template: str) -> frozenset[str]:
    """The texts that the template looks for: `'x' in y`, `y.split('x')`, `y | replace('x', ..)`, directly or by name."""
    tree = parse_template(template)
    named: dict[str, set[str]] = {}
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and isinstance(assignment.node, nodes.Const):
            named.setdefault(assignment.target.name, set()).add(assignment.node.value)
    needles: list[nodes.Expr] = []
    for compare in tree.find_all(nodes.Compare):
        needles += [compare.expr] if any(operand.op in ("in", "notin") for operand in compare.ops) else []
    for call in tree.find_all(nodes.Call):
        needles += call.args if isinstance(call.node, nodes.Getattr) and call.node.attr in _SEARCHES else []
    for used in tree.find_all(nodes.Filter):
        needles += used.args if used.name == "replace" else []
    values = [value for needle in needles for value in _constants(needle, named)]
    return frozenset(value for value in values if isinstance(value, str))


def _constants(needle: nodes.Expr, named: dict[str, set[str]]) -> set[Any]:
    if isinstance(needle, nodes.Const):
        return {needle.value}
    return named.get(needle.name, set()) if isinstance(needle, nodes.Name) else set()

"""Untrusted chat templates: Hugging Face's Jinja environment in a sandbox, with bounds on time and memory.

A template comes with the model file, so it is a stranger's program. Jinja's immutable sandbox keeps it from Python's
internals and from changing its input, but does not stop a program that never ends or that fills the memory. Here each
step and each value is charged to the budget of `template_budget`. Most of them pass through methods of the environment;
loops, `~` and literals do not, so the syntax tree is rewritten (`_Meter`) to call filters whose names no template can
spell.

Threads, signals and processes were considered: a thread cannot be stopped inside C code, a signal reaches the main
thread only, and a process of its own would cost every chat more than the rendering itself.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_dictsort
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Namespace
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from llmctl.errors import ChatTemplateError, LlmctlError
from llmctl.runtime.tokenizer import template_budget as budget
from llmctl.runtime.tokenizer.content_shield import ContentShield
from llmctl.runtime.tokenizer.template_budget import Stopped, running, size, spend

_LINEAR_METHODS = frozenset(
    ("split", "startswith", "endswith", "find", "index", "count", "partition", "splitlines", "upper", "lower")
)
_GIVEN_FILTERS = frozenset(("default", "d", "first", "last", "length", "count"))  # return what exists, or a number
_LINEAR_FILTERS = frozenset(
    (
        *("list", "items", "string", "upper", "lower", "capitalize", "title", "truncate", "wordcount", "safe", "escape"),
        *("e", "reverse", "int", "float", "abs", "select", "reject"),
    )
)
_QUADRATIC_FILTERS = frozenset(("urlize", "striptags", "wordwrap", "pprint", "xmlattr"))


class _Refused(TemplateError):
    """The template called `raise_exception`; the message is its own."""


class _TemplateNamespace(Namespace):
    """Jinja's `namespace`, refusing private names as transformers does."""

    def __init__(*args: Any, **attributes: Any) -> None:  # no named `self`, so that `namespace(self=1)` works
        self, *rest = args
        named = dict(*rest, **attributes)
        for name in named:
            _refuse_private(name)
        Namespace.__init__(self, named)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        text = super().__repr__()  # may hold other namespaces, each printed through here
        spend(len(text))
        return text


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute must not start with an underscore, found {name!r}")


class _TemplateDict:
    """The global `dict`: callable, with `fromkeys`, and without the type's other attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        if args and isinstance(args[0], (list, tuple)):
            args = (_metered(iter(args[0])), *args[1:])  # keys with equal hashes take quadratic time
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(_metered(iter(keys)), value)


class _GenerationBlock(Extension):
    """`{% generation %}` marks what the model wrote, for training masks. Rendering only needs its body.

    A call block and not a plain scope, as in transformers: what is set inside stays inside.
    """

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    @staticmethod
    def body(caller: Callable[[], str]) -> str:
        return caller()


class _Meter(NodeTransformer):
    """Rewrites loops, `~` and literals so that each round and each new value is charged."""

    def __init__(self) -> None:
        self._depth = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Jinja's compiler takes time that grows with the cube of the depth, so that is bounded here."""
        self._depth += isinstance(node, nodes.Stmt)
        if self._depth > budget.MAX_STATEMENT_NESTING:
            raise Stopped(f"its statements are nested more than {budget.MAX_STATEMENT_NESTING} deep")
        result = super().visit(node, *args, **kwargs)
        self._depth -= isinstance(node, nodes.Stmt)
        return result

    def visit_For(self, node: nodes.For) -> nodes.Node:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = nodes.Filter(nodes.Const(text), "#tick", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node.nodes[0], "#concat", node.nodes[1:], [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "#literal", [], [], None, None, lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node


@pass_context  # keeps Jinja from evaluating these once, when it compiles
def _tick(context: Context, characters: int) -> bool:
    spend(characters)
    return True


@pass_context
def _concat(context: Context, *parts: object) -> str:
    spend(sum(size(part) for part in parts))
    return "".join(map(str, parts))


@pass_context
def _literal(context: Context, value: object) -> object:
    spend(size(value))
    return value


def _finalize(value: object) -> object:
    spend(size(value))
    return value


def _metered(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        spend(size(item))
        yield item


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that admits its operands first and charges for its result."""

    @functools.wraps(function)  # also copies the mark that says which context Jinja passes first
    def filter_(*args: Any, **kwargs: Any) -> Any:
        skip = 1 if args and isinstance(args[0], (Context, EvalContext, ImmutableSandboxedEnvironment)) else 0
        if name == "sum" and len(args) + len(kwargs) > skip + 1:  # adding lists copies all that went before, each time
            args = (*args[:skip], list(args[skip]), *args[skip + 1 :])
            budget.admit(len(args[skip]) * size(args[skip]))
        elif name == "format":
            budget.admit_percent(str(args[skip]), [*args[skip + 1 :], *kwargs.values()])
        elif name in _QUADRATIC_FILTERS:
            budget.admit(size(args[skip]) ** 2)
        if name in _LINEAR_FILTERS:
            budget.admit_product(args[skip])
        elif name not in _GIVEN_FILTERS:
            budget.admit_product(args[skip], args[skip + 1 :], kwargs)
        result = function(*args, **kwargs)
        spend(0 if name in _GIVEN_FILTERS else size(result))
        return _metered(result) if isinstance(result, Iterator) else result

    return filter_


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without Jinja's HTML escapes; transformers' arguments and defaults."""
    shield = running.get().shield
    plain = value if shield is None else shield.restore_all(value)
    text = json.dumps(plain, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return text if shield is None else shield.protect(text)


def _dictsort(value: Any, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
    """Jinja's `dictsort`, in the order of the original texts and not of their placeholders."""
    shield = running.get().shield
    if shield is None:
        return do_dictsort(value, *args, **kwargs)
    names = {shield.restore_all(key): key for key, _ in value.items()}
    ordered = do_dictsort({name: shield.restore_all(value[key]) for name, key in names.items()}, *args, **kwargs)
    return [(names[name], value[names[name]]) for name, _ in ordered]


def _raise_exception(message: object = "") -> None:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return running.get().clock().strftime(format)


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' environment, with the hooks that admit and charge."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationBlock, LoopControlExtension],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters.update(tojson=_tojson, dictsort=_dictsort)
        self.filters = {name: _guarded(name, function) for name, function in self.filters.items()}
        self.filters.update({"#tick": _tick, "#concat": _concat, "#literal": _literal})
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.globals.update(dict=_TemplateDict(), namespace=_TemplateNamespace)
        del self.globals["lipsum"]  # random filler text, as much as one asks for

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Meter().visit(source).set_environment(self), *args, **kwargs)

    def handle_exception(self, source: str | None = None) -> Any:
        raise  # called in an `except` block; `_line` finds the line number without Jinja's faked frames

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.admit_operator(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        spend(size(result))
        return result

    def call_test(self, *args: Any, **kwargs: Any) -> bool:
        spend()  # `select` and its kin call tests here, item by item
        return super().call_test(*args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        result = super().getitem(obj, argument)
        if isinstance(argument, slice):
            spend(size(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def format_(*args: Any, **kwargs: Any) -> str:
            budget.admit_braces(value.__self__, [*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return format_

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, float)):
            weighed = (args, kwargs) if obj.__name__ not in _LINEAR_METHODS else ()
            budget.admit_product(owner, *weighed)
        render = running.get()
        render.depth += 1
        if render.depth > budget.MAX_NESTING:
            raise Stopped(f"its macros call each other more than {budget.MAX_NESTING} deep")
        try:
            result = super().call(context, obj, *args, **kwargs)
        finally:
            render.depth -= 1
        spend(0 if isinstance(owner, dict) else size(result))
        return result


@functools.cache
def _environment() -> _Environment:
    return _Environment()


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> Template:
    return _environment().from_string(source)


def parse_template(source: str) -> nodes.Template:
    """The template's syntax tree as written. Raises ChatTemplateError on a syntax error."""
    return _guard(source, {}, None, None, lambda: _environment().parse(source))


def render_template(
    source: str,
    variables: dict[str, Any],
    *,
    clock: Callable[[], datetime] | None = None,
    shield: ContentShield | None = None,
) -> str:
    """Render `source` with `variables` (plain JSON values only). `clock` answers `strftime_now`.

    Raises ChatTemplateError with the template's own message, or with what went wrong and the line.
    """
    return _guard(source, variables, clock, shield, lambda: _compile(source).render(variables))


def _guard(
    source: str,
    variables: dict[str, Any],
    clock: Callable[[], datetime] | None,
    shield: ContentShield | None,
    work: Callable[[], Any],
) -> Any:
    if len(source) > budget.MAX_TEMPLATE:
        raise ChatTemplateError(f"the chat template has {len(source)} characters, at most {budget.MAX_TEMPLATE} are accepted")
    state = budget.Render(budget.BASE_ALLOWANCE, time.thread_time() + budget.MAX_SECONDS, clock or datetime.now, shield)
    token = running.set(state)
    try:
        state.allowance = _allowance(variables)
        return work()
    except LlmctlError:
        raise
    except Exception as error:
        raise ChatTemplateError(_explain(error, shield)) from error
    finally:
        running.reset(token)


def _allowance(variables: dict[str, Any]) -> int:
    """Templates that gather their output in one string copy it with every message, hence size times messages."""
    grown = 16 * budget.measure(variables) * (1 + len(variables.get("messages") or ()))
    return min(budget.BASE_ALLOWANCE + grown, budget.MAX_ALLOWANCE)


def _explain(error: Exception, shield: ContentShield | None) -> str:
    message = (error.message or "") if isinstance(error, TemplateSyntaxError) else str(error)
    message = message if shield is None else shield.restore(message)
    # The text is the template's: keep it to one line, and keep terminal escapes out.
    message = re.sub(r"[\x00-\x1f\x7f-\x9f]+", " ", message)[:500].strip()
    if isinstance(error, _Refused):
        return f"the chat template refuses this conversation: {message}"
    line = error.lineno if isinstance(error, TemplateSyntaxError) else _line(error)
    where = f"the chat template, line {line}" if line else "the chat template"
    if isinstance(error, Stopped):
        return f"{where}, was stopped: {message}" if line else f"{where} was stopped: {message}"
    return f"{where}: {type(error).__name__}: {message}; --chat-template takes another template"


def _line(error: Exception) -> int | None:
    """The line of the template in which `error` was raised."""
    line, traceback = None, error.__traceback__
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if template is not None:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line

"""What a chat template may use up while it is rendered: processor time, characters, and work in one operation.

- `spend`: every loop round, call and filter comes through here, and raises once the render has used `MAX_SECONDS` of
  its thread's *processor* time (a busy machine must not fail a good template, so not the wall clock). It also charges
  what was made against an allowance of characters that grows with the conversation; nothing is handed back, so no more
  than the allowance can ever be alive.
- `admit`: an operation whose cost is not linear in what it is given (`*`, `**`, `%`, `replace`, `center`, `strip` ...) is
  refused before it starts when the product of its operands is above `MAX_WORK`. C code cannot be interrupted from
  Python, thus it must never be entered with such operands.
- `measure` bounds the size and depth of every container when it is made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from string import Formatter
from typing import Any

from llmctl.runtime.tokenizer.content_shield import ContentShield

MAX_SECONDS = 10.0  # processor time of one render; real templates need milliseconds
MAX_TEMPLATE = 1 << 17  # characters, bounds the time to compile; the longest in public use has about 20 thousand
MAX_STATEMENT_NESTING = 40  # likewise; CPython itself takes no more than 20 loops inside each other
MAX_INPUT = 1 << 28  # characters of messages, tools and other variables
MAX_WORK = 1 << 28  # product of the operands of one operation
BASE_ALLOWANCE = 1 << 26  # characters a template may make from a short conversation
MAX_ALLOWANCE = 1 << 31  # ... and from the longest
MAX_COUNT = 1_000_000  # widths, precisions and repeat counts given to filters and string methods
MAX_INTEGER_BITS = 1 << 14  # Python itself does not print longer ones
MAX_NESTING = 100  # calls inside calls, and containers inside containers
ELEMENT = 16  # what an element of a container costs, in characters

_CONTAINERS = (dict, list, tuple, set, frozenset, range, type({}.keys()), type({}.values()), type({}.items()))
# A printf field whose width or precision has five digits or is taken from an argument (or whose key is absurd).
_WIDE_PERCENT = re.compile(
    r"%%|(%(?:\([^)]{0,200}\))?[#0\- +]*(?:\d{5}|\*|\d*\.(?:\d{5}|\*)))|(%\([^)]{201})",
)
_WIDE_BRACES = re.compile(r"\d{5}|\{")


_WIDE = "it formats text with a very wide field, or with a width taken from an argument"


class Stopped(Exception):
    """The template went over one of the bounds above."""


@dataclass
class Render:
    """What one render has left. Reached through a context variable: the environment is shared between threads."""

    allowance: int
    deadline: float
    clock: Callable[[], datetime]
    shield: ContentShield | None
    calls: int = 0
    depth: int = 0


running: ContextVar[Render] = ContextVar("llmctl_chat_render")


def spend(characters: int = 0) -> None:
    """Charge the running render for one step that made `characters` characters."""
    render = running.get()
    render.allowance -= characters
    if render.allowance < 0:
        raise Stopped("it makes far more text than the conversation calls for")
    render.calls += 1
    if (characters > 4096 or render.calls % 16 == 0) and time.thread_time() > render.deadline:
        raise Stopped(f"it ran for more than {MAX_SECONDS:g} s")


def admit(work: int) -> None:
    """Refuse an operation before it starts when its cost, a product of its operands, is out of proportion."""
    if work > MAX_WORK:
        raise Stopped("one of its operations is out of all proportion")


def measure(value: object, limit: int = MAX_INPUT) -> int:
    """Characters in `value`, `ELEMENT` for each element; a part that occurs twice counts twice, as it would when printed.

    Stops with an error above `limit`, so nested lists that share their parts cannot take exponential time.
    """
    if isinstance(value, (str, bytes)):
        return len(value)
    if not isinstance(value, _CONTAINERS):
        return 1
    total = ELEMENT * len(value)
    open_containers = [iter(_children(value))]
    while open_containers:
        for item in open_containers[-1]:
            if isinstance(item, (str, bytes)):
                total += len(item)
            elif isinstance(item, _CONTAINERS):
                total += ELEMENT * len(item)
                open_containers.append(iter(_children(item)))
                break
        else:
            open_containers.pop()
        if total > limit:
            raise Stopped("it builds a value that is too large")
        if len(open_containers) > MAX_NESTING:
            raise Stopped(f"it nests containers more than {MAX_NESTING} deep")
    return total


def _children(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else container


def size(value: object) -> int:
    """`measure` bounded by what the render has left: larger than that would be refused anyway, as is a huge integer."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise Stopped("it computes with very large numbers")
    return measure(value, max(running.get().allowance, 0))


def _weight(argument: object) -> int:
    """What an argument multiplies the cost of a call by: an integer its value, anything else its size."""
    if not isinstance(argument, int):
        return size(argument)
    if abs(argument) > MAX_COUNT:
        raise Stopped(f"it asks for a width or count above {MAX_COUNT}")
    return abs(argument)


def admit_product(value: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None) -> None:
    """A filter or method: the size of what it works on times the weight of its arguments.

    At least `ELEMENT`: each character may become an object of its own, or a step of Python code.
    """
    factor = ELEMENT + sum(_weight(argument) for argument in (*arguments, *(keywords or {}).values()))
    admit(max(1, size(value)) * factor)


def admit_percent(text: str | bytes, arguments: object) -> None:
    """`text % arguments`: no very wide field, no width taken from an argument; else fields times size of arguments."""
    text = text if isinstance(text, str) else text.decode("latin-1")
    if any(found.lastindex for found in _WIDE_PERCENT.finditer(text)):
        raise Stopped(_WIDE)
    admit(text.count("%") * (size(arguments) + 9999 * bool(re.search(r"\d", text))))


def admit_braces(text: str, arguments: object) -> None:
    """`text.format(*arguments)`: the same bounds."""
    specs = [spec for _, _, spec, _ in Formatter().parse(text) if spec]
    if any(_WIDE_BRACES.search(spec) for spec in specs):
        raise Stopped(_WIDE)
    admit(text.count("{") * (size(arguments) + 9999 * bool(specs)))


def admit_operator(operator: str, left: Any, right: Any) -> None:
    """A binary operator, by its spelling."""
    if operator == "%" and isinstance(left, (str, bytes)):
        admit_percent(left, right)
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, (str, bytes, list, tuple)) and isinstance(count, int):
                admit(max(size(sequence), ELEMENT) * max(count, 0))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        admit(MAX_WORK + 1 if left.bit_length() * max(right, 0) > MAX_INTEGER_BITS else 0)

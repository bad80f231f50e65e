"""Lists and ranges of whole numbers as llama-bench spells them: 128, 8,64 and 8-32, 8-32+8, 8-64*2."""

from __future__ import annotations

import re
from collections.abc import Iterable

from llmctl.errors import UsageError

SYNTAX = "a list (8,64) or range (8-32+8, 8-64*2); repeatable"
MOST = 1_000
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?:([+*])(\d{1,18}))?)?", re.ASCII)


def number_list(texts: Iterable[str], option: str, *, minimum: int = 0) -> list[int]:
    """The numbers of every text, in order. Errors: UsageError naming the option."""
    numbers: list[int] = []
    for text in texts:
        for part in text.split(","):
            numbers += _expand(part.strip(), option)
            if len(numbers) > MOST:
                raise UsageError(f"{option} {text} names more than {MOST} numbers")
    low = next((n for n in numbers if n < minimum), None)
    if low is not None:
        raise UsageError(f"{option} must be at least {minimum}, found {low}")
    return numbers


def _expand(part: str, option: str) -> list[int]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise UsageError(f"{option}: expected a whole number, {SYNTAX.removesuffix('; repeatable')}, found {part!r}")
    first = int(match[1])
    last, step = int(match[2] or first), int(match[4] or 1)
    if last < first or (last > first and (step == 0 or (match[3] == "*" and (step == 1 or first == 0)))):
        raise UsageError(f"{option}: the range {part} never ends or is empty")
    if match[3] != "*":
        return list(range(first, last + 1, max(step, 1))[: MOST + 1])
    numbers = [first]
    while numbers[-1] * step <= last and step > 1 and numbers[-1] > 0:
        numbers.append(numbers[-1] * step)
    return numbers

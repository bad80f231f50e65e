"""How names and values that come from a file are shown in a message: on one line, and never longer than one."""

from __future__ import annotations


def quoted(name: object, limit: int = 80) -> str:
    """The name in quotes (any other value as Python writes it), control characters escaped, the middle of a long one left out."""
    try:
        shown = repr(name)
    except ValueError:  # Python writes no integer of thousands of digits
        shown = "a number of thousands of digits"
    shown = shown.replace("\n", " ")  # arrays
    return shown if len(shown) <= limit else f"{shown[: limit - 20]}…{shown[-10:]}"

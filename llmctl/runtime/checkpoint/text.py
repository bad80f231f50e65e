"""How names that come from a file are shown in a message: on one line, and never longer than one."""

from __future__ import annotations


def quoted(name: str | bytes, limit: int = 80) -> str:
    """The name in quotes, control characters escaped, the middle of a long one left out."""
    shown = repr(name)
    return shown if len(shown) <= limit else f"{shown[: limit - 20]}…{shown[-10:]}"

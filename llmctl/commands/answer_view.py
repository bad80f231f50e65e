"""How the chat shows an answer while it streams: Markdown rendered as it comes, thoughts dim or hidden; plain text where the
terminal takes no escape codes."""

from __future__ import annotations

import shutil
import sys
import time
from functools import cache
from typing import Any, Literal, Protocol

from llmctl.commands import console
from llmctl.commands.answer import printable, show_text
from llmctl.commands.thinking import Piece, ThinkSplitter

Thinking = Literal["show", "dim", "hide"]
_FRAME_S = 0.04
_MOST_LIVE_LINES = 12
_ERASE_TO_END, _DIM, _RESET = "\x1b[0J", "\x1b[2m", "\x1b[0m"


class Writer(Protocol):
    """Shows the text of an answer piece by piece."""

    def write(self, text: str) -> None: ...

    def finish(self) -> None:
        """All of it has come: end its last line."""


class AnswerView:
    """Shows one answer. begins_thinking: as of `ThinkSplitter`."""

    def __init__(self, *, markdown: bool, thinking: Thinking, begins_thinking: bool = False) -> None:
        styled = console.use_color(sys.stdout)
        self._splitter = ThinkSplitter(begins_thinking=begins_thinking)
        self._thinking, self._styled, self._markdown = thinking, styled, markdown and styled
        self._writer: Writer | None = None
        self._is_thought = False

    def push(self, text: str) -> None:
        """Show what came."""
        for piece in self._splitter.push(text):
            self._show(piece)

    def finish(self) -> None:
        """Show what was held back, and end the last line."""
        for piece in self._splitter.flush():
            self._show(piece)
        if self._writer is None:
            console.result()
        else:
            self._writer.finish()

    def give_up(self) -> None:
        """No more will come: end the line if there is one."""
        if self._writer is not None:
            self._writer.finish()

    def _show(self, piece: Piece) -> None:
        text = piece.text
        if self._writer is None or piece.is_thought != self._is_thought:
            text = text.lstrip("\n")  # templates put empty lines around thoughts
            if not text or (self._writer is None and not text.strip() and piece.is_thought):
                return
            self._change(piece.is_thought)
        assert self._writer is not None
        self._writer.write(text)

    def _change(self, is_thought: bool) -> None:
        """A thought begins or ends."""
        if self._writer is not None:
            self._writer.finish()
        self._is_thought = is_thought
        if is_thought:
            self._writer = (
                _HiddenWriter(self._styled) if self._thinking == "hide" else _thought_writer(self._styled, self._thinking)
            )
        else:
            self._writer = MarkdownWriter() if self._markdown else PlainWriter()


def _thought_writer(styled: bool, thinking: Thinking) -> Writer:
    return PlainWriter(_DIM, _RESET) if styled and thinking == "dim" else PlainWriter()


class PlainWriter:
    """Text as it is, between two codes."""

    def __init__(self, before: str = "", after: str = "") -> None:
        self._before, self._after, self._ends_line = before, after, True

    def write(self, text: str) -> None:
        """As `Writer`."""
        if self._before:
            console.result(self._before, end="")
        show_text(text)
        if self._after:
            console.result(self._after, end="")
        self._ends_line = text.endswith("\n")

    def finish(self) -> None:
        """As `Writer`."""
        if not self._ends_line:
            console.result()


class _HiddenWriter:
    """Says once that the model thinks."""

    def __init__(self, styled: bool) -> None:
        console.result(f"{_DIM}(thinking){_RESET}" if styled else "(thinking)")

    def write(self, text: str) -> None:
        """As `Writer`."""

    def finish(self) -> None:
        """As `Writer`."""


class MarkdownWriter:
    """Renders Markdown as it grows. What is above the last lines stays, so that the terminal's own scrolling works; the last
    ones may still change (a line becomes a table, a paragraph grows) and are drawn anew.

    _text: from the last block on that may still change. _settled: its lines that stay. _live: lines below them, on the screen.
    """

    def __init__(self) -> None:
        self._text, self._settled, self._live, self._width = "", 0, 0, 0
        self._next_frame = 0.0

    def write(self, text: str) -> None:
        """As `Writer`."""
        self._text += printable(text)
        if time.monotonic() >= self._next_frame:
            self._draw(is_last=False)

    def finish(self) -> None:
        """As `Writer`."""
        self._draw(is_last=True)

    def _draw(self, *, is_last: bool) -> None:
        begin = time.monotonic()
        size = shutil.get_terminal_size()
        if size.columns != self._width:  # lines drawn before are broken elsewhere now, and cannot be found again
            self._width, self._live = size.columns, 0
        start = last_block(self._text)
        if start:
            self._put([*render_markdown(self._text[:start], size.columns), ""], keep=0)
            self._text, self._settled = self._text[start:], 0
        keep = 0 if is_last else max(1, min(_MOST_LIVE_LINES, size.lines - 2))
        self._put(render_markdown(self._text, size.columns), keep=keep)
        # A long block takes long to render: most of the time is the model's.
        self._next_frame = time.monotonic() + max(_FRAME_S, 5 * (time.monotonic() - begin))

    def _put(self, lines: list[str], *, keep: int) -> None:
        """Draw what is not settled; the last `keep` lines may be drawn anew."""
        up = f"\x1b[{self._live}A\r" if self._live else ""
        console.result(up + _ERASE_TO_END + "".join(line + "\n" for line in lines[self._settled :]), end="")
        settled = max(self._settled, len(lines) - keep)
        self._settled, self._live = settled, max(0, len(lines) - settled)


def last_block(text: str) -> int:
    """Where the last block of a Markdown text begins: what comes before no longer changes."""
    lines = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in text.split("\n")[: lines[-1]]) if lines else 0


def render_markdown(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, with the terminal's codes. HTML is shown as it is written, and links with their address."""
    from io import StringIO

    from rich.console import Console

    target = StringIO()
    screen = Console(
        file=target, width=width, force_terminal=True, color_system="standard", legacy_windows=False, highlight=False
    )
    screen.print(_markdown(text))
    return [line.rstrip() for line in target.getvalue().split("\n")[:-1]]


def _markdown(text: str) -> Any:
    from rich.markdown import Markdown

    document = Markdown("", hyperlinks=False, code_theme="ansi_dark")
    document.markup, document.parsed = text, _parser().parse(text)
    return document


@cache
def _parser() -> Any:
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")

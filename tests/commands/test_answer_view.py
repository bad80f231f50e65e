"""What the chat draws: Markdown as it grows, thoughts apart from the answer, on a screen that the test keeps."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmctl.commands import answer_view, console
from llmctl.commands.answer_view import AnswerView, MarkdownWriter, last_block, render_markdown
from llmctl.commands.thinking import CLOSE, OPEN, Piece, ThinkSplitter

STYLE = re.compile(r"\x1b\[[0-9;]*m")
TEXT = """# Title

Some **bold** text with a `code` word and a tag <br> that stays,
over two lines.

1. one
2. two

   with a second paragraph

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

The end: ü€🙂
"""


class Screen:
    """Interprets what MarkdownWriter sends: lines, cursor up, erase."""

    def __init__(self) -> None:
        self.lines, self.row = [""], 0

    def write(self, text: str) -> None:
        for part in re.split(r"(\x1b\[\d+A\r|\x1b\[0J|\n)", text):
            if part.endswith("A\r"):
                self.row -= int(part[2:-2])
                assert self.row >= 0
            elif part == "\x1b[0J":
                del self.lines[self.row + 1 :]
                self.lines[self.row] = ""
            elif part == "\n":
                self.row += 1
                self.lines[self.row :] = self.lines[self.row :] or [""]
            else:
                self.lines[self.row] += part


@pytest.fixture
def screen(monkeypatch) -> Screen:
    found = Screen()
    monkeypatch.setattr(console, "result", lambda text="", *, end="\n": found.write(text + end))
    monkeypatch.setattr(console, "is_terminal", lambda stream: True)
    monkeypatch.setattr(answer_view.shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    monkeypatch.setattr(answer_view, "_FRAME_S", 0.0)
    monkeypatch.setattr(answer_view.time, "monotonic", lambda: 0.0)  # every piece is drawn
    return found


def plain(lines: list[str]) -> list[str]:
    return [STYLE.sub("", line).rstrip() for line in lines]


@pytest.mark.parametrize("size", [1, 3, 17, 1000])
def test_what_is_drawn_in_the_end_is_the_whole_rendered(screen, size):
    writer = MarkdownWriter()
    for start in range(0, len(TEXT), size):
        writer.write(TEXT[start : start + size])
    writer.finish()
    drawn = [line for line in plain(screen.lines) if line]
    assert drawn == [line for line in plain(render_markdown(TEXT, 60)) if line]


def test_a_block_longer_than_the_screen_is_drawn_once(screen):
    text = "```\n" + "".join(f"line {i}\n" for i in range(300)) + "```\n"
    writer = MarkdownWriter()
    for start in range(0, len(text), 50):
        writer.write(text[start : start + 50])
    writer.finish()
    assert [line.strip() for line in plain(screen.lines) if line] == [f"line {i}" for i in range(300)]


def test_nothing_the_model_says_is_lost_or_reaches_the_terminal_as_a_code(screen):
    writer = MarkdownWriter()
    writer.write("<b>tag</b> [a link](http://example.org/x) \x1b[31m & <script>\n\n<div>\nblock\n</div>\n")
    writer.finish()
    shown = " ".join(plain(screen.lines))
    for part in ("<b>tag</b>", "a link", "http://example.org/x", "\ufffd[31m", "& <script>", "<div>", "</div>"):
        assert part in shown


def test_a_line_is_never_wider_than_the_terminal():
    for width in (2, 7, 33):
        assert max(console.display_width(line) for line in plain(render_markdown(TEXT, width))) <= width


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("", ""),
        ("one", "one"),
        ("one\n\ntwo", "two"),
        ("# t\n\n- a\n\n- b\n", "- a\n\n- b\n"),
        ("a\n\n```\nb\n\nc\n", "```\nb\n\nc\n"),
        ("a\nb\n---\nc", "c"),
    ],
)
def test_only_the_last_block_may_still_change(text, rest):
    assert text[last_block(text) :] == rest


# --- thoughts ---------------------------------------------------------------------------------------------------------


def split(pieces: list[str], *, begins_thinking: bool = False) -> list[Piece]:
    splitter = ThinkSplitter(begins_thinking=begins_thinking)
    found = [piece for text in pieces for piece in splitter.push(text)] + list(splitter.flush())
    joined: list[Piece] = []
    for piece in found:
        if joined and joined[-1].is_thought == piece.is_thought:
            joined[-1] = Piece(joined[-1].text + piece.text, piece.is_thought)
        else:
            joined.append(piece)
    return joined


parts = st.lists(st.sampled_from([OPEN, CLOSE, "<", "<th", "ink>", "</", "a", "b\n"]), max_size=12)


@given(parts, st.data())
@example(["<", "<think>a"], None)
def test_a_stream_is_divided_like_the_whole(texts, data):
    whole = "".join(texts)
    assert split(texts) == split([whole])
    shown = "".join(piece.text for piece in split(texts))
    assert len(shown) <= len(whole)
    if OPEN not in whole:
        assert shown == whole


def test_thoughts_are_told_apart():
    assert split(["<think>why", "</th", "ink>because"]) == [Piece("why", True), Piece("because", False)]
    assert split(["why</think>because"], begins_thinking=True) == [Piece("why", True), Piece("because", False)]
    assert split(["a <thin air"]) == [Piece("a <thin air", False)]


@pytest.mark.parametrize(
    ("thinking", "color", "shown"),
    [
        ("show", True, "why\nbecause\n"),
        ("dim", True, "\x1b[2mwhy\x1b[0m\nbecause\n"),
        ("dim", False, "why\nbecause\n"),
        ("hide", True, "\x1b[2m(thinking)\x1b[0m\nbecause\n"),
        ("hide", False, "(thinking)\nbecause\n"),
    ],
)
def test_thoughts_are_shown_as_asked(monkeypatch, capsys, thinking, color, shown):
    monkeypatch.setattr(console, "use_color", lambda stream: color)
    view = AnswerView(markdown=False, thinking=thinking)
    for piece in ("<think>\n", "why", "\n</think>\n\n", "because"):
        view.push(piece)
    view.finish()
    assert capsys.readouterr().out.replace("\x1b[2m\n\x1b[0m", "\n") == shown


def test_an_answer_without_a_word_still_ends_its_line(capsys):
    view = AnswerView(markdown=False, thinking="dim")
    view.finish()
    assert capsys.readouterr().out == "\n"
    AnswerView(markdown=False, thinking="dim").give_up()
    assert capsys.readouterr().out == ""

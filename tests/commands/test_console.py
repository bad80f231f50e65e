"""What the console writes where; streams of the test take the place of the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from llmctl.commands import console


@pytest.fixture(autouse=True)
def default_levels() -> Iterator[None]:
    yield
    console.configure(quiet=False, verbose=False)


def test_quiet_hides_what_is_not_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True, verbose=True)
    for write in (console.result, console.info, console.detail, console.warn):
        write("text")
    with console.progress("working", 10):
        pass
    assert capsys.readouterr() == ("text\n", "llmctl: warning: text\n")


def test_detail_needs_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    console.detail("no")
    console.configure(verbose=True)
    console.detail("yes")
    assert capsys.readouterr().err == "yes\n"


def test_progress_off_a_terminal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress("Pulling x", 92_871_040) as bar:
        bar.update_to(5)
        bar.update_to(7, total=8)
    assert capsys.readouterr() == ("", "Pulling x (92.9 MB)\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar_without_escape_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    with console.progress("Pulling x", 1000) as bar:
        bar.update_to(600)
        bar.update_to(500)
        bar.update_to(1500, total=2000)
    assert "Pulling x " in terminal.getvalue()
    assert "\x1b" not in terminal.getvalue()


def test_progress_shows_on_a_terminal_that_states_no_size() -> None:
    code = "from llmctl.commands import console\nwith console.progress('Pulling x', 9) as bar: bar.update_to(5)"
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the last writer has left
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    assert process.wait(60) == 0
    assert b"Pulling x " in shown
    assert b"\x1b" not in shown


def test_json_is_versioned_plain_and_valid(capsys: pytest.CaptureFixture[str]) -> None:
    odd = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "half": ml_dtypes.bfloat16(0.5),
        "array": np.arange(3),
        "path": Path("modèle"),
        "surrogate": "a\udcff",
        "nested": [(1, True, None), {"k": {2: "two"}}],
        "big": 2**70,
    }
    console.print_json(odd)
    text = capsys.readouterr().out
    assert "modèle" in text
    assert json.loads(text) == {
        "version": 1,
        "nan": None,
        "inf": None,
        "half": 0.5,
        "array": [0, 1, 2],
        "path": "modèle",
        "surrogate": "a?",
        "nested": [[1, True, None], {"k": {"2": "two"}}],
        "big": 2**70,
    }


def test_json_refuses_what_it_cannot_say(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match="object has no place in a JSON document"):
        console.print_json({"x": object()})
    assert capsys.readouterr().out == ""


def test_columns_align_by_terminal_cells() -> None:
    lines = console.format_table(("NAME", "SIZE"), [("日本", 1), ("e\u0301", 1000)], right=(1,))
    assert lines == ["NAME  SIZE", "日本     1", "e\u0301     1000"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (92_871_040, "92.9 MB"), (5e9, "5.0 GB"), (2.5e12, "2.50 TB")],
)
def test_sizes(count: float, text: str) -> None:
    assert console.format_bytes(count) == text


def test_a_reason_is_one_harmless_line() -> None:
    assert console.one_line("a\n b\t\x1b[2J\x07") == "a b \\x1b[2J\\x07"

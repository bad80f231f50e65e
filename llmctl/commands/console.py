"""All output of the program: stdout carries the result, stderr everything else.

No other file prints. Off a terminal, and with NO_COLOR, no escape byte is written. Nothing here imports rich or tqdm
before a terminal needs it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from llmctl.errors import StandardOutputError

JSON_VERSION = 1
"""Version of every --json document; raised when a field changes its meaning or goes away."""

_quiet = False
_verbose = False


def configure(*, quiet: bool | None = None, verbose: bool | None = None) -> None:
    """Set how much goes to stderr. The shared --quiet and --verbose options call it; the result is never affected."""
    global _quiet, _verbose
    _quiet = _quiet if quiet is None else quiet
    _verbose = _verbose if verbose is None else verbose


def prepare_streams() -> None:
    """Make sure no character can crash the output and no model file can be opened as descriptor 0, 1 or 2."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person reads (or types into) this stream."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def is_interactive() -> bool:
    """Whether both stdin and stdout are terminals: only then may a command ask or chat."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def use_color(stream: TextIO | None) -> bool:
    """Whether escape codes may be written to this stream (https://no-color.org)."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def result(text: str = "", *, end: str = "\n") -> None:
    """Write a part of the result to stdout and flush it, so that streamed text arrives as it is made.

    Errors: BrokenPipeError when the reader has left (cli.main ends silently), StandardOutputError for anything else.
    """
    if sys.stdout is None:
        raise StandardOutputError("cannot write the result: standard output is closed")
    try:
        sys.stdout.write(text + end)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        abandon(sys.stdout)
        raise StandardOutputError(f"cannot write the result to standard output: {error.strerror or error}") from error


def print_json(document: Mapping[str, Any], *, indent: int | None = 2) -> None:
    """Write one JSON document with a version field to stdout. Numbers JSON cannot hold become null."""
    _write_json({"version": JSON_VERSION, **document}, indent)


def json_line(document: Mapping[str, Any]) -> str:
    """The document in one line, with its version, for a file: always UTF-8."""
    return json.dumps(_plain({"version": JSON_VERSION, **document}), ensure_ascii=False, allow_nan=False)


def print_json_array(documents: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON array whose objects each have a version field: for a format that others defined as an array."""
    _write_json([{"version": JSON_VERSION, **document} for document in documents], 2)


def _write_json(value: Any, indent: int | None) -> None:
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "").replace("_", "")
    result(json.dumps(_plain(value), indent=indent, ensure_ascii=encoding != "utf8", allow_nan=False))


def info(text: str) -> None:
    """Tell how the work goes; --quiet hides it."""
    if not _quiet:
        _write_aside(text)


def detail(text: str) -> None:
    """Tell what only --verbose asks for (statistics, what was really used)."""
    if _verbose and not _quiet:
        _write_aside(text)


def warn(text: str) -> None:
    """Tell what the user must know about the result; shown even with --quiet."""
    _write_aside(f"llmctl: {_style('warning:', '33', sys.stderr)} {one_line(text)}")


def error(text: str) -> None:
    """Tell, in one line, why the command failed."""
    _write_aside(f"llmctl: {_style('error:', '1;31', sys.stderr)} {one_line(text)}")


def raw(text: str) -> None:
    """Write to stderr exactly this: a traceback that was asked for, the end of a line."""
    _write_aside(text, end="")


def one_line(text: str) -> str:
    """The text with line breaks and control characters (a file may hold any) made harmless."""
    joined = " ".join(text.split())
    return "".join(c if unicodedata.category(c) not in ("Cc", "Cs") else f"\\x{ord(c):02x}" for c in joined)


def confirm(question: str) -> bool:
    """Ask on the terminal; anything but yes is no."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> None:
    """Write aligned columns to stdout; `right` names the columns aligned to the right."""
    for number, line in enumerate(format_table(headers, rows, right=right)):
        result(_style(line, "1", sys.stdout) if number == 0 else line)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> list[str]:
    """Lines of a table whose columns are two spaces apart; wide characters count as the two cells they take."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(display_width(row[i]) for row in cells) for i in range(len(headers))]
    return ["  ".join(_pad(cell, widths[i], i in right) for i, cell in enumerate(row)).rstrip() for row in cells]


def display_width(text: str) -> int:
    """Terminal cells the text takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(unicodedata.combining(c) != 0 for c in text)


def format_bytes(count: float) -> str:
    """A size as people read it: 92.3 MB (powers of ten, as file managers and download pages do)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


class Progress(Protocol):
    """A bar under way: `done` counts from the start, in the unit of the total; a higher `total` replaces the first."""

    def update_to(self, done: float, total: float | None = None) -> None: ...


@contextlib.contextmanager
def progress(description: str, total: float | None = None, *, unit: str = "B") -> Iterator[Progress]:
    """A progress bar on a terminal's stderr; elsewhere one line saying what begins; nothing with --quiet."""
    if _quiet or not is_terminal(sys.stderr):
        info(description + (f" ({format_bytes(total)})" if total and unit == "B" else ""))
        yield _NoBar()
        return
    from tqdm.std import tqdm

    scale = {"unit_scale": True, "unit_divisor": 1000} if unit == "B" else {}
    size = shutil.get_terminal_size()  # 80 × 24 on a terminal that states none, where tqdm would show nothing
    shape = {"ncols": size.columns, "nrows": size.lines}
    if total is not None:
        shape["bar_format"] = "{desc} {percentage:3.0f}% {bar} {n_fmt}/{total_fmt} {rate_fmt}"
    with tqdm(total=total, desc=description, unit=unit, file=sys.stderr, leave=False, **shape, **scale) as bar:
        yield _Bar(bar)


class _NoBar:
    def update_to(self, done: float, total: float | None = None) -> None:
        pass


class _Bar:
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def update_to(self, done: float, total: float | None = None) -> None:
        if total is not None:
            self._bar.total = total
        self._bar.update(done - self._bar.n)


def abandon(stream: TextIO | None) -> None:
    """Send what a broken stream still holds to nowhere, so that the interpreter's last flush says nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def finish() -> None:
    """Flush both streams. Errors: BrokenPipeError, OutputError, as `result`; a lost stderr is nobody's failure."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    if sys.stdout is not None and not sys.stdout.closed:
        result("", end="")


def _write_aside(text: str, *, end: str = "\n") -> None:
    """Write to stderr; a reader that has left, or a full disk under a log, must not stop the work."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError as failure:
        if failure.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        abandon(sys.stderr)


def _style(text: str, code: str, stream: TextIO | None) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if use_color(stream) else text


def _pad(cell: str, width: int, right: bool) -> str:
    padding = " " * (width - display_width(cell))
    return padding + cell if right else cell + padding


def _plain(value: Any) -> Any:
    """The value in JSON's own types: numpy scalars and arrays unpacked, lone surrogates and non-finite numbers gone."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode() if not value.isascii() else value
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, Path):
        return _plain(str(value))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no place in a JSON document")

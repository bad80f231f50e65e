"""Numbers as shades in the terminal: unicode blocks, or ASCII where the output's encoding has none, in colour where it may be."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.commands import console

_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_COLORS = ("#3b3f6b", "#3b528b", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725")
"""From dark blue to yellow, even in lightness for every kind of eye: after viridis (van der Walt and Smith, 2015)."""
LEVELS = len(_BLOCKS)
_GAP = "   "

Piece = tuple[str, int | None]
"""Text and its shade, 0 … LEVELS − 1; None for none."""


@dataclass(frozen=True)
class HeatMap:
    """rows of values between 0 (no shade) and 1 (all of it). labels: of the rows."""

    title: str
    labels: list[str]
    rows: list[list[float]]


def has_blocks() -> bool:
    """Whether stdout can write unicode blocks."""
    try:
        _BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeError, LookupError):
        return False
    return True


def width() -> int:
    """Cells of a line: the terminal's, COLUMNS, or 80."""
    return max(20, shutil.get_terminal_size().columns)


def level(value: float) -> int:
    """The shade of a value from 0 to 1; what is no number has none."""
    return min(LEVELS - 1, round(value * (LEVELS - 1))) if value > 0 else 0


def show(lines: Sequence[Sequence[Piece]]) -> None:
    """Write lines of shaded text to stdout."""
    if not console.use_color(sys.stdout):
        for line in lines:
            console.result("".join(text for text, _ in line).rstrip())
        return
    from rich.console import Console
    from rich.text import Text

    painter = Console(file=sys.stdout, force_terminal=True, highlight=False, markup=False, emoji=False)
    for line in lines:
        painted = Text.assemble(*((text, "" if shade is None else _COLORS[shade]) for text, shade in line))
        with painter.capture() as captured:
            painter.print(painted, soft_wrap=True, end="")
        console.result(captured.get())


def map_lines(maps: Sequence[HeatMap]) -> list[list[Piece]]:
    """Maps of as many rows side by side, as far as they fit, else below each other."""
    blocks = [_block(heat) for heat in maps]
    lines: list[list[Piece]] = []
    while blocks:
        row, blocks = _fitting(blocks)
        lines += [_beside([block[i] if i < len(block) else [] for block in row], row) for i in range(max(map(len, row)))]
        lines.append([])
    return lines


def legend(low: str, high: str) -> list[Piece]:
    """A line that says what the shades mean."""
    return [(f"{low} ", None), *((_cell(shade, 1), shade) for shade in range(LEVELS)), (f" {high}", None)]


def _fitting(blocks: list[list[list[Piece]]]) -> tuple[list[list[list[Piece]]], list[list[list[Piece]]]]:
    """The first blocks, as many as have room in a line, and the others."""
    count, room = 0, width()
    while count < len(blocks) and (count == 0 or room >= _width(blocks[count])):
        room -= _width(blocks[count]) + len(_GAP)
        count += 1
    return blocks[:count], blocks[count:]


def _beside(parts: list[list[Piece]], blocks: list[list[list[Piece]]]) -> list[Piece]:
    line: list[Piece] = []
    for part, block in zip(parts, blocks, strict=True):
        padding = _width(block) - sum(console.display_width(text) for text, _ in part)
        line += [*part, (" " * padding + _GAP, None)]
    return line


def _width(block: list[list[Piece]]) -> int:
    return max(sum(console.display_width(text) for text, _ in line) for line in block)


def _block(heat: HeatMap) -> list[list[Piece]]:
    """One map's lines. Columns for which there is no room are brought together in means."""
    margin = max(map(len, heat.labels), default=0) + 1
    columns = len(heat.rows[0]) if heat.rows else 0
    room = max(1, width() - margin)
    cell = 2 if 2 * columns <= min(room, 48) else 1
    rows = [means(row, room // cell) for row in heat.rows]
    joined = f", {columns} columns as {len(rows[0])}" if rows and len(rows[0]) < columns else ""
    lines: list[list[Piece]] = [[((heat.title + joined)[: width()], None)]]
    for label, row in zip(heat.labels, rows, strict=True):
        shades = [level(value) for value in row]
        lines.append([(label.rjust(margin - 1) + " ", None), *((_cell(shade, cell), shade) for shade in shades)])
    return lines


def means(values: Sequence[float], most: int) -> list[float]:
    """At most so many numbers: means of neighbours."""
    if len(values) <= most:
        return list(values)
    edges = [i * len(values) // most for i in range(most + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def _cell(shade: int, cells: int) -> str:
    return (_BLOCKS if has_blocks() else _ASCII)[shade] * cells

"""Divergence against bytes as one SVG picture, written by hand: a line a tool, the divergence in powers of ten."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _EDGE = 760, 420, 64, 36
_COLORS = ("#0b62a4", "#c4521b", "#3a7d34", "#7a4f9a")
Named = tuple[str, int, float]
"""Name, bytes, divergence in nats (above 0)."""


@dataclass(frozen=True)
class _Axes:
    """Bytes along, the logarithm of the divergence upwards."""

    least_bytes: float
    most_bytes: float
    least: float
    most: float

    def x(self, nbytes: float) -> float:
        return _LEFT + (nbytes - self.least_bytes) / (self.most_bytes - self.least_bytes) * (_WIDTH - _LEFT - _EDGE)

    def y(self, kl: float) -> float:
        return _EDGE + math.log(self.most / kl) / math.log(self.most / self.least) * (_HEIGHT - 2 * _EDGE)


def kl_svg(title: str, lines: Mapping[str, Sequence[Named]]) -> str:
    """lines: points by tool; there is at least one."""
    sizes, values = ([point[place] for line in lines.values() for point in line] for place in (1, 2))
    margin = 0.06 * (max(sizes) - min(sizes)) or 1.0
    axes = _Axes(min(sizes) - margin, max(sizes) + margin, min(values) / 1.25, max(values) * 1.25)
    parts = [_text(_LEFT, 20, title), *_grid(axes)]
    for number, (tool, line) in enumerate(lines.items()):
        parts += _line(axes, tool, sorted(line, key=lambda point: point[1]), number)
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect {size} fill="white"/>', *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, color: str = "#333", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid(axes: _Axes) -> Iterator[str]:
    """Lines at 1, 2 and 5 times powers of ten, and at whole steps of bytes."""
    for power in range(math.floor(math.log10(axes.least)), math.ceil(math.log10(axes.most)) + 1):
        for kl in (factor * 10.0**power for factor in (1, 2, 5)):
            if axes.least <= kl <= axes.most:
                y = axes.y(kl)
                yield f'<line x1="{_LEFT}" x2="{_WIDTH - _EDGE}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
                yield _text(_LEFT - 6, y + 4, f"{kl:g}", anchor="end")
    step = 10.0 ** math.floor(math.log10(axes.most_bytes - axes.least_bytes))
    for number in range(math.ceil(axes.least_bytes / step), math.floor(axes.most_bytes / step) + 1):
        x = axes.x(number * step)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_EDGE}" y2="{_HEIGHT - _EDGE}" stroke="#ddd"/>'
        yield _text(x, _HEIGHT - _EDGE + 16, f"{number * step / 1e6:g} MB", anchor="middle")
    yield _text(6, _EDGE - 8, "KL, nats")


def _line(axes: _Axes, tool: str, line: Sequence[Named], number: int) -> Iterator[str]:
    color = _COLORS[number % len(_COLORS)]
    places = [(axes.x(nbytes), axes.y(kl), name) for name, nbytes, kl in line]
    yield f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)}" fill="none" stroke="{color}"/>'
    for x, y, name in places:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>'
        yield _text(x + 6, y - 6, name, color)
    yield _text(_WIDTH - _EDGE, _EDGE + 16 * number, tool, color, "end")

"""The report of a calibrated quantization as one HTML page: a table and plots, with nothing to load from elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

from llmctl.quant.html_page import page, table

_LAYER = re.compile(r"^model\.layers\.(\d+)\.(.+)$")
_WIDTH, _HEIGHT, _BOTTOM = 720, 120, 16


def html_page(found: dict[str, Any]) -> str:
    """found: the JSON report."""
    title = f"{found['method']} of {found['input']}"
    parts = [
        f"<p>{escape(found['output'])}: {found['totals']['file_bytes'] / 1e6:.1f} MB, "
        f"{found['totals']['bits_per_weight']:.2f} bits per weight, {found['seconds']:.1f} s</p>",
        *_text(found),
        "<h2>Error of the outputs, layer by layer</h2>",
        *(_plot(kind, modules) for kind, modules in _by_kind(found["modules"]).items()),
        "<h2>All modules</h2>",
        _table(found["modules"]),
    ]
    return page(title, parts)


def _text(found: dict[str, Any]) -> Iterable[str]:
    if calibration := found.get("calibration"):
        yield f"<p>{calibration['rows']} rows, {calibration['tokens']} tokens of {escape(str(calibration['text']))}</p>"
    check = found.get("check") or {}
    for name in ("calibration", "held_out"):
        if part := check.get(name):
            text = f"{name.replace('_', ' ')}: KL divergence {part['kl']:.5f}, same top token {part['same_top']:.1%}"
            yield f"<p>{escape(text)}</p>"
    for warning in found["warnings"]:
        yield f"<p class='note'>{escape(warning)}</p>"


def _by_kind(modules: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = {}
    for module in modules:
        if (place := _LAYER.match(module["name"])) and "output_error" in module:
            kinds.setdefault(re.sub(r"\d+", "*", place[2]), []).append(module)
    return kinds


def _plot(kind: str, modules: list[dict[str, Any]]) -> str:
    """A bar a module, its height the relative error of the outputs."""
    most = max((module["output_error"] for module in modules), default=0.0) or 1.0
    width = _WIDTH / max(1, len(modules))
    bars = []
    for number, module in enumerate(modules):
        height = module["output_error"] / most * (_HEIGHT - _BOTTOM)
        color = "var(--odd)" if module.get("fallback") else "var(--bar)"
        bars.append(
            f"<rect x={number * width:.1f} y={_HEIGHT - height:.1f} width={max(1.0, width - 1):.1f} height={height:.1f} "
            f"style='fill:{color}'><title>{escape(module['name'])}: {module['output_error']:.3%}</title></rect>"
        )
    return (
        f"<h3>{escape(kind)} (up to {most:.2%})</h3><svg width={_WIDTH} height={_HEIGHT} role=img "
        f"aria-label='{escape(kind)}'>{''.join(bars)}</svg>"
    )


def _table(modules: list[dict[str, Any]]) -> str:
    headers = ("module", "type", "bits", "weight error", "output error", "SQNR dB", "method", "tokens", "fallback")
    rows = []
    for module in modules:
        output, sqnr = module.get("output_error"), module.get("sqnr_db")
        cells = (
            module["name"],
            module["type"],
            f"{module['bits_per_weight']:.2f}",
            f"{module['relative_rms_error']:.3%}",
            "" if output is None else f"{output:.3%}",
            "" if sqnr is None else f"{sqnr:.1f}",
            module["method"],
            module.get("tokens", ""),
            module.get("fallback", ""),
        )
        rows.append(cells)
    return table(headers, rows, numbers=(2, 3, 4, 5, 7))

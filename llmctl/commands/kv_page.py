"""The report of `inspect-kv` as one HTML page, with nothing to load from elsewhere, and its attention maps as a picture."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.heat_map import HeatMap

if TYPE_CHECKING:
    import numpy as np

_ANCHORS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis: even in lightness, for every kind of eye and in print."""
_SHADES = 8
_CELL = 12
_KEPT_COLUMNS, _KEPT_LINE = 512, 5
_STYLE = """
.maps{display:flex;flex-wrap:wrap;gap:1em}figure{margin:.5em 0}figcaption{color:var(--soft)}
.text{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--line);padding:.8em;max-height:40em;overflow-y:auto}
mark{color:inherit;border-radius:2px;background:rgba(255,150,0,calc(var(--s)*.09))}mark.top{outline:1px solid var(--odd)}
del{color:var(--soft);opacity:.75}
.pages{display:flex;flex-wrap:wrap;gap:2px;margin:.4em 0}.pages i{width:10px;height:14px;border:1px solid var(--bar);
background:linear-gradient(to top,var(--bar) var(--f),transparent var(--f))}
.pages i.shared{border-color:var(--odd);background:var(--odd)}
.rows{display:flex;flex-wrap:wrap;gap:2px 1em}
.row{display:flex;align-items:center;gap:.5em;break-inside:avoid}
.row span{width:1.6em;text-align:right;font-size:10px}
.row img{image-rendering:pixelated;max-width:calc(100% - 3em)}
.kept img{width:100%}
.ramp{display:inline-block;width:8em;height:.8em;vertical-align:middle}
@media print{.text{max-height:none;overflow:visible}details>*{display:block}}
"""


def html_report(document: dict[str, Any], views: Sequence[str], maps: np.ndarray | None) -> str:
    """document: the JSON object. views: those it has. maps: the attention [layers, heads, bins, bins]."""
    from llmctl.quant.html_page import page

    parts = {"plan": _plan, "live": _live, "attention": lambda found: _attention(found, maps), "what-if": _what_if}
    body = [_about(document), *(part for view in views for part in parts[view](document))]
    return page(f"KV cache of {document['source']}", body, _STYLE)


def _about(document: dict[str, Any]) -> str:
    text = document.get("text")
    of_text = f"; {text['num_tokens']} tokens of {text['source']}" if text else ""
    trained = f", trained with {document['max_context']} tokens" if document["max_context"] else ""
    return f"<p>{document['num_layers']} layers{trained}{escape(of_text)}</p>"


def _plan(document: dict[str, Any]) -> Iterator[str]:
    from llmctl.commands.kv_plan import (
        TOTAL_HEADERS,
        describe_group,
        formula,
        heads_line,
        memory_line,
        total_rows,
        type_table,
    )
    from llmctl.quant.html_page import table

    yield "<h2>Plan</h2>"
    yield "<ul>" + "".join(f"<li>{escape(describe_group(group))}</li>" for group in document["layers"]) + "</ul>"
    yield f"<p class='soft'>{escape(formula(document))}</p>"
    headers, rows = type_table(document)
    yield table(_lower(headers), rows, caption="What a token adds", numbers=range(1, len(headers) - 1))
    yield table(_lower(TOTAL_HEADERS), total_rows(document), caption="What a cache takes", numbers=range(1, 6))
    for line in filter(None, (heads_line(document), memory_line(document))):
        yield f"<p>{escape(line)}</p>"


def _lower(headers: Sequence[str]) -> list[str]:
    return [header if header in ("KL",) else header.capitalize() for header in headers]


def _live(document: dict[str, Any]) -> Iterator[str]:
    from llmctl.commands import kv_live
    from llmctl.quant.html_page import table

    live = document["live"]
    yield f"<h2>Live</h2><p>{escape(_live_summary(live))}</p>"
    for group in live["groups"]:
        yield f"<h3>{escape(kv_live.describe_pages(group))}</h3>"
        yield from (_page_strip(pages, live["page_tokens"]) for pages in group["tables"])
        rows = kv_live.block_rows(group["tables"][0], live["page_tokens"], live["texts"][0])
        inner = table(_lower(kv_live.BLOCK_HEADERS), rows, caption="Block table of the first sequence", numbers=range(4))
        yield f"<details><summary>Block table</summary>{inner}</details>"
    yield from _kept(document)
    sizes = [(first, last, console.format_bytes(nbytes)) for first, last, nbytes in kv_live.layer_runs(live["layer_bytes"])]
    yield table(("From layer", "To", "Held by each"), sizes, caption="Bytes by layer", numbers=range(3))
    yield "<h3>Keys and values</h3><p class='soft'>Peak: the largest magnitude by the root mean square of its head.</p>"
    yield _figures(kv_live.range_maps(live))
    headers, rows = _lower(kv_live.RANGE_HEADERS), kv_live.range_rows(live)
    inner = table(headers, rows, caption="All heads of a layer together", numbers=range(7))
    yield f"<details><summary>Ranges</summary>{inner}</details>"


def _kept(document: dict[str, Any]) -> Iterator[str]:
    """What a policy has left, where there is one."""
    from llmctl.commands.kv_kept import describe_kept, kept_shares

    live = document["live"]
    if (kept := live["kept"]) is None:
        return
    yield f"<h3>What is kept</h3><p>{escape(describe_kept(kept))} {_ramp()}</p>"
    yield "<p class='soft'>A row for each layer, in it one for each head, the text from left to right.</p>"
    layers, length = kept_shares(kept, _KEPT_COLUMNS), kept["num_tokens"]
    rows = "".join(_kept_layer(layer, heads, kept["layers"][layer], length) for layer, heads in enumerate(layers))
    yield f"<div class='kept'>{rows}</div>"
    yield "<h3>What half of the heads or more have dropped</h3>"
    yield _dropped_text(live["texts"][0], kept["dropped"])


def _kept_layer(layer: int, heads: list[list[float]], counts: list[dict[str, Any]], length: int) -> str:
    """One layer's heads as a picture, a line each."""
    import numpy as np

    alt = f"layer {layer}: its heads keep {', '.join(str(head['kept']) for head in counts)} of {length} tokens"
    shades = (np.array(heads).repeat(_KEPT_LINE, 0) * 254 + 1).round().astype(np.uint8)
    picture = base64.b64encode(png(shades, _PALETTE)).decode("ascii")
    return f"<div class='row'><span>{layer}</span><img alt='{alt}' title='{alt}' src='data:image/png;base64,{picture}'></div>"


def _live_summary(live: dict[str, Any]) -> str:
    found = f", {live['found_tokens']} of them found in the saved cache" if live["found_tokens"] else ""
    lengths = ", ".join(map(str, live["lengths"]))
    return f"{lengths} tokens{found}; {console.format_bytes(live['bytes_held'])} of {live['kv_type']} pages held"


def _page_strip(pages: list[dict[str, Any]], page_tokens: int) -> str:
    """A sequence's pages as boxes, filled as they are."""
    from llmctl.commands.kv_live import page_tokens_text

    boxes = []
    for page in pages:
        kind = " class='shared'" if page["holders"] > 1 else ""
        title = f"page {page['page']}: tokens {page_tokens_text(page)}, held by {page['holders']}"
        boxes.append(f"<i{kind} style='--f:{page['tokens'] / page_tokens:.0%}' title='{title}'></i>")
    filled = sum(page["tokens"] for page in pages)
    return f"<div class='pages' role='img' aria-label='{len(pages)} pages with {filled} tokens'>{''.join(boxes)}</div>"


def _attention(document: dict[str, Any], maps: np.ndarray | None) -> Iterator[str]:
    from llmctl.commands.kv_attention import TOP_HEADERS, head_maps, top_rows
    from llmctl.quant.html_page import table

    found, pieces = document["attention"], document["text"]["pieces"]
    yield "<h2>Attention</h2><p>By layer (down) and head (across), means over all queries. "
    yield f"Sinks: share of the first {found['sink_tokens']} tokens. Recent: share of the {found['recent_tokens']} tokens up to "
    yield f"the query. Spread: entropy by the largest possible. {_ramp()}</p>"
    yield _figures(head_maps(found))
    if maps is not None:
        yield "<h3>Maps</h3><p class='soft'>A row for each layer, in it its heads. In a head's map queries go from top to "
        yield "bottom, keys from left to right; the shade is the root of the share.</p>"
        rows = "".join(_layer_maps(layer, maps[layer : layer + 1]) for layer in range(len(maps)))
        yield f"<div class='rows'>{rows}</div>"
    yield f"<h3>What the last {found['last_queries']} queries attend to</h3>"
    yield table(_lower(TOP_HEADERS), top_rows(found, pieces), caption="Tokens with the largest share", numbers=(0, 1, 3, 4, 5))
    yield _shaded_text(pieces, found)


def _layer_maps(layer: int, maps: np.ndarray) -> str:
    """One layer's maps [1, heads, bins, bins]."""
    alt, picture = f"attention maps of layer {layer}, head by head", base64.b64encode(atlas_png(maps)).decode("ascii")
    return f"<div class='row'><span>{layer}</span><img alt='{alt}' src='data:image/png;base64,{picture}'></div>"


def _shaded_text(pieces: list[str], found: dict[str, Any]) -> str:
    """The text, each token shaded by the share it gets from its end."""
    shares, tops = [float(share) for share in found["received_last"]], {top["position"] for top in found["top"]}
    most = sorted(shares)[-min(len(shares), 4)] or 1.0  # the sinks, which have most, are not to hide all others
    parts = []
    for position, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
        shade = min(_SHADES, round(_SHADES * (share / most) ** 0.5))
        text = escape(console_safe(piece))
        top = " class='top'" if position in tops else ""
        title = f"token {position}: {share:.2%}"
        parts.append(f"<mark{top} style='--s:{shade}' title='{title}'>{text}</mark>" if shade or top else text)
    return f"<div class='text' tabindex='0' role='region' aria-label='The text, shaded'>{''.join(parts)}</div>"


def console_safe(piece: str) -> str:
    """A token's text with what no page should hold replaced."""
    from llmctl.commands.answer import printable

    return printable(piece)


def _what_if(document: dict[str, Any]) -> Iterator[str]:
    from llmctl.commands.kv_what_if import advice, cache_name, outcome_table
    from llmctl.quant.html_page import table

    found = document["what_if"]
    headers, rows = outcome_table(found)
    yield f"<h2>What if</h2><p>Against a full f32 cache, at the {found['places']} tokens of its own answer:</p>"
    yield f"<blockquote>{escape(console_safe(found['answer']))}</blockquote>"
    caption = "Smaller caches, and how far the predictions move (KL in nats)"
    yield table(_lower(headers), rows, caption=caption, numbers=range(1, len(headers)), best=found["recommended"])
    yield f"<p>{escape(advice(found))}</p>"
    for outcome in found["outcomes"]:
        if outcome["dropped"] is not None:
            yield f"<h3>What {escape(cache_name(outcome))} drops</h3>"
            yield _dropped_text(document["text"]["pieces"], outcome["dropped"])


def _dropped_text(pieces: list[str], dropped: Sequence[float]) -> str:
    """The text, struck out where half of the heads or more have dropped it."""
    from itertools import groupby

    from llmctl.commands.kv_what_if import DROPPED

    runs = groupby(zip(pieces, dropped, strict=True), lambda each: each[1] >= DROPPED)
    parts = ((gone, escape(console_safe("".join(piece for piece, _ in run)))) for gone, run in runs)
    text = "".join(f"<del>{part}</del>" if gone else part for gone, part in parts)
    return f"<div class='text' tabindex='0' role='region' aria-label='The text, dropped tokens struck out'>{text}</div>"


def _ramp() -> str:
    stops = ",".join(_css(i / 8) for i in range(9))
    return f"0 <span class='ramp' style='background:linear-gradient(to right,{stops})'></span> 1"


def _figures(heats: Sequence[HeatMap]) -> str:
    return "<div class='maps'>" + "".join(map(_figure, heats)) + "</div>"


def _figure(heat: HeatMap) -> str:
    """A map as drawing, with its numbers below for those who cannot see it."""
    from llmctl.quant.html_page import table

    columns, left = len(heat.rows[0]), 24
    width, height = left + columns * _CELL, len(heat.rows) * _CELL
    marks = []
    for i, row in enumerate(heat.rows):
        marks.append(f"<text x='{left - 4}' y='{(i + 0.8) * _CELL:.0f}' text-anchor='end'>{heat.labels[i]}</text>")
        for j, value in enumerate(row):
            marks.append(
                f"<rect x='{left + j * _CELL}' y='{i * _CELL}' width='{_CELL - 1}' height='{_CELL - 1}' fill='{_css(value)}'>"
                f"<title>layer {heat.labels[i]}, head {j}: {value:.3f}</title></rect>"
            )
    rows = [(label, *(f"{value:.3f}" for value in row)) for label, row in zip(heat.labels, heat.rows, strict=True)]
    numbers = table(("Layer", *map(str, range(columns))), rows, caption=f"{heat.title}, by head", numbers=range(columns + 1))
    size = f"width='{width}' height='{height}' viewBox='0 0 {width} {height}'"
    return (
        f"<figure><figcaption>{escape(heat.title)}</figcaption>"
        f"<svg {size} role='img' aria-label='{escape(heat.title)}'>{''.join(marks)}</svg>"
        f"<details class='numbers'><summary>Numbers</summary>{numbers}</details></figure>"
    )


def _color(share: float) -> tuple[int, ...]:
    """Red, green, blue of a value from 0 to 1."""
    place = min(max(share, 0.0), 1.0) * (len(_ANCHORS) - 1)
    low = min(int(place), len(_ANCHORS) - 2)
    return tuple(round(a + (place - low) * (b - a)) for a, b in zip(_ANCHORS[low], _ANCHORS[low + 1], strict=True))


_PALETTE = [(255, 255, 255), *(_color(i / 254) for i in range(255))]
"""White between what is shaded, then 255 shades."""


def _css(share: float) -> str:
    return "#{:02x}{:02x}{:02x}".format(*_color(share))


def atlas_png(maps: np.ndarray) -> bytes:
    """All attention maps [layers, heads, bins, bins] as one picture, layers down and heads across, a line between them."""
    import numpy as np

    layers, heads, bins, _ = maps.shape
    tile = max(1, -(-24 // bins))  # of a short text the maps are few numbers: each of them then has several pixels
    shades = np.clip(np.sqrt(maps), 0, 1) * 254 + 1
    large = shades.round().astype(np.uint8).repeat(tile, 2).repeat(tile, 3)
    framed = np.zeros((layers, heads, bins * tile + 1, bins * tile + 1), np.uint8)
    framed[:, :, :-1, :-1] = large
    return png(framed.transpose(0, 2, 1, 3).reshape(layers * framed.shape[2], heads * framed.shape[3]), _PALETTE)


def png(pixels: np.ndarray, palette: Sequence[tuple[int, ...]]) -> bytes:
    """pixels uint8 [height, width], numbers in the palette of red, green, blue. After the PNG specification, third edition."""
    height, width = pixels.shape
    lines = b"".join(b"\x00" + row.tobytes() for row in pixels)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(value for color in palette for value in color)),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    chunks = (struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

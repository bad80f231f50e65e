"""The live view of `inspect-kv`: pages, who holds them, how full they are, and what keys and values are like."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.heat_map import HeatMap, Piece, has_blocks, legend, level, map_lines, show, width
from llmctl.commands.kv_kept import print_kept

if TYPE_CHECKING:
    from llmctl.runtime.inspection.live import LiveCache, LiveGroup
    from llmctl.runtime.inspection.ranges import HeadRange

_FIRST_ROWS, _LAST_ROWS = 8, 4
_MOST_LINES = 6
_LARGEST_PEAK = 16.0
"""A largest number so many times the root mean square has the darkest shade."""


def live_document(
    cache: LiveCache, kv_type: str, keys: list[list[HeadRange]], values: list[list[HeadRange]], kept: dict[str, Any] | None
) -> dict[str, Any]:
    """The view as a JSON object. kept: from `kept_document`, None where all tokens are."""
    return {
        "kv_type": kv_type,
        "page_tokens": cache.page_tokens,
        "lengths": cache.lengths,
        "found_tokens": cache.found,
        "bytes_held": cache.bytes_held,
        "layer_bytes": cache.layer_bytes,
        "groups": [_group(group) for group in cache.groups],
        "kept": kept,
        "keys": [[asdict(head) for head in layer] for layer in keys],
        "values": [[asdict(head) for head in layer] for layer in values],
    }


def _group(group: LiveGroup) -> dict[str, Any]:
    pages = {page.page: page for table in group.tables for page in table}
    return {
        "layers": list(group.layers),
        "sliding_window": group.window,
        "pages": group.stats.pages,
        "pages_held": group.stats.pages_held,
        "pages_shared": sum(page.holders > 1 for page in pages.values()),
        "pages_known": sum(page.is_known for page in pages.values()),
        "pages_remembered": group.stats.pages_remembered,
        "tokens_held": group.stats.tokens_held,
        "waste": group.stats.waste,
        "page_bytes": group.page_bytes,
        "tables": [[asdict(page) for page in table] for table in group.tables],
    }


def print_live(live: dict[str, Any], texts: list[list[str]]) -> None:
    """Show it. texts: the tokens of each sequence."""
    count, lengths = len(live["lengths"]), ", ".join(map(str, live["lengths"]))
    what = f"{count} sequences of {lengths} tokens" if count > 1 else f"{lengths} tokens"
    found = f", {live['found_tokens']} of them found in the saved cache" if live["found_tokens"] else ""
    console.result(f"LIVE  {what}{found}; {console.format_bytes(live['bytes_held'])} of {live['kv_type']} pages held")
    for group in live["groups"]:
        console.result()
        _print_group(group, live, texts)
    if live["kept"] is not None:
        console.result()
        print_kept(live["kept"], texts[0])
    console.result()
    _print_layers(live)
    console.result()
    _print_ranges(live)


def describe_pages(group: dict[str, Any]) -> str:
    """What a group's pages are used for."""
    window = f" with a window of {group['sliding_window']} tokens" if group["sliding_window"] else ""
    shared = f", {group['pages_shared']} shared" if group["pages_shared"] else ""
    plural = "" if len(group["layers"]) == 1 else "s"
    return (
        f"{len(group['layers'])} layer{plural}{window}: {group['pages_held']} of {group['pages']} pages held{shared}, "
        f"{group['tokens_held']} tokens in them, {group['waste']:.1%} waste; a text that begins alike would find "
        f"{group['pages_known']}"
    )


def _print_group(group: dict[str, Any], live: dict[str, Any], texts: list[list[str]]) -> None:
    console.result(describe_pages(group))
    show([line for table in group["tables"] for line in _page_lines(table, live["page_tokens"])])
    shared, own = _page_marks()
    console.result(f"  {own} a page, as high as it is full; {shared} a full page that several hold")
    rows = block_rows(group["tables"][0], live["page_tokens"], texts[0])
    if len(rows) > _FIRST_ROWS + _LAST_ROWS:
        hidden = len(rows) - _FIRST_ROWS - _LAST_ROWS
        rows = [*rows[:_FIRST_ROWS], ("…", "", "", "", f"{hidden} more"), *rows[-_LAST_ROWS:]]
    room = max(8, width() - 38)
    console.table(BLOCK_HEADERS, [(*row[:4], row[4][:room]) for row in rows], right=range(4))


BLOCK_HEADERS = ("PAGE", "TOKENS", "FILL", "HELD BY", "TEXT")


def block_rows(table: list[dict[str, Any]], page_tokens: int, text: list[str]) -> list[tuple[str, ...]]:
    """A block table, page by page."""
    return [
        (
            str(page["page"]),
            page_tokens_text(page),
            f"{page['tokens']}/{page_tokens}",
            str(page["holders"]),
            "" if page["first"] is None else console.one_line("".join(text[page["first"] : page["first"] + page["tokens"]])),
        )
        for page in table
    ]


def page_tokens_text(page: dict[str, Any]) -> str:
    """Which tokens a page has."""
    return "by head" if page["first"] is None else f"{page['first']}-{page['first'] + page['tokens'] - 1}"


def _page_marks() -> tuple[str, str]:
    return ("▓", "█") if has_blocks() else ("S", "@")


def _page_lines(table: list[dict[str, Any]], page_tokens: int) -> list[list[Piece]]:
    """A sequence's pages, one character each."""
    room, shared = width() - 2, _page_marks()[0]
    marks: list[Piece] = []
    for page in table:
        if page["holders"] > 1:
            marks.append((shared, 2))
        else:
            marks.append((_fill(page["tokens"] / page_tokens), 5))
    lines: list[list[Piece]] = [[("  ", None), *marks[i : i + room]] for i in range(0, len(marks), room)]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [[(f"  … {len(marks) - (_MOST_LINES - 1) * room} pages more", None)]]
    return lines


def _fill(share: float) -> str:
    return (" ▁▂▃▄▅▆▇█" if has_blocks() else " .:-=+*#@")[max(1, level(share))]


def _print_layers(live: dict[str, Any]) -> None:
    """Bytes held by layer: one line for neighbours that have as many."""
    most, bar, rows = max(live["layer_bytes"], default=0) or 1, _page_marks()[1], []
    for first, last, nbytes in layer_runs(live["layer_bytes"]):
        name = str(first) if first == last else f"{first}-{last}"
        rows.append((name, console.format_bytes(nbytes), bar * max(1, round(20 * nbytes / most))))
    console.table(("LAYER", "HELD BY EACH", ""), rows, right=range(2))


def layer_runs(sizes: list[int]) -> list[tuple[int, int, int]]:
    """First and last layer, and bytes of each, of neighbours that have as many."""
    runs: list[tuple[int, int, int]] = []
    for layer, nbytes in enumerate(sizes):
        if runs and runs[-1][2] == nbytes:
            runs[-1] = (runs[-1][0], layer, nbytes)
        else:
            runs.append((layer, layer, nbytes))
    return runs


def _print_ranges(live: dict[str, Any]) -> None:
    console.table(RANGE_HEADERS, range_rows(live), right=range(1, len(RANGE_HEADERS)))
    console.result("  PEAK: the largest magnitude by the root mean square, of the head where it is most.")
    console.result("  OUTLIERS: channels whose root mean square is 4 times the median one of their head.")
    console.result()
    show([*map_lines(range_maps(live)), legend("peak 0", f"{_LARGEST_PEAK:.0f} times the root mean square")])


RANGE_HEADERS = ("LAYER", "KEYS", "PEAK", "OUTLIERS", "VALUES", "PEAK", "OUTLIERS")


def range_rows(live: dict[str, Any]) -> list[tuple[str, ...]]:
    """The layers' keys and values, all heads together."""
    return [
        (str(number), *_range(keys), *_range(values))
        for number, (keys, values) in enumerate(zip(live["keys"], live["values"], strict=True))
    ]


def _range(heads: list[dict[str, Any]]) -> tuple[str, str, str]:
    low, high = min(head["low"] for head in heads), max(head["high"] for head in heads)
    outliers = sum(len(head["outliers"]) for head in heads)
    return f"{low:.1f} … {high:.1f}", f"{max(head['peak'] for head in heads):.1f}", str(outliers)


def range_maps(live: dict[str, Any]) -> list[HeatMap]:
    """Peaks by layer and head."""
    labels = [str(number) for number in range(len(live["keys"]))]
    return [
        HeatMap(f"{side}, peak", labels, [[head["peak"] / _LARGEST_PEAK for head in layer] for layer in live[side]])
        for side in ("keys", "values")
    ]

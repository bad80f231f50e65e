"""The attention view of `inspect-kv`: how the heads differ, where in the text their weight goes, and which tokens get most."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.answer import printable
from llmctl.commands.heat_map import HeatMap, Piece, has_blocks, legend, map_lines, means, show, width

if TYPE_CHECKING:
    from llmctl.runtime.inspection.attention import AttentionSurvey

NUM_TOP = 12
_AROUND = 10
"""Tokens shown on either side of a marked one."""
_MOST_WHOLE = 160
"""Tokens of a text that is shown whole."""


def attention_document(survey: AttentionSurvey, windows: list[int | None]) -> dict[str, Any]:
    """The view as a JSON object; `AttentionSurvey` and docs/inspect-kv.md say what the numbers are."""
    from llmctl.runtime.inspection.attention import NUM_LAST, NUM_RECENT, NUM_SINKS

    received, last = survey.received.mean((0, 1)), survey.last.mean((0, 1))
    return {
        "num_tokens": survey.num_tokens,
        "sink_tokens": NUM_SINKS,
        "recent_tokens": NUM_RECENT,
        "last_queries": min(NUM_LAST, survey.num_tokens),
        "layers": [_layer(survey, layer, window) for layer, window in enumerate(windows)],
        "received": received,
        "received_last": last,
        "top": [_top(survey, int(position)) for position in (-last).argsort(kind="stable")[:NUM_TOP]],
        "places": {"edges": survey.edges, "shares": survey.maps[:, :, -1].mean(1)},
    }


def _layer(survey: AttentionSurvey, layer: int, window: int | None) -> dict[str, Any]:
    return {
        "sliding_window": window,
        "heads": [
            {
                "entropy": survey.entropy[layer, head],
                "sink_share": survey.sink[layer, head],
                "recent_share": survey.recent[layer, head],
                "learned_share": survey.learned[layer, head],
            }
            for head in range(survey.entropy.shape[1])
        ],
    }


def _top(survey: AttentionSurvey, position: int) -> dict[str, Any]:
    """A token that the end of the text attends to, and the head that does most."""
    shares = survey.last[:, :, position]
    layer, head = divmod(int(shares.argmax()), shares.shape[1])
    return {"position": position, "share": shares.mean(), "layer": layer, "head": head, "head_share": shares[layer, head]}


def print_attention(found: dict[str, Any], text: list[str]) -> None:
    """Show it."""
    count, last = found["num_tokens"], found["last_queries"]
    console.result(f"ATTENTION  of {count} tokens, by layer (down) and head (across), means over all queries")
    console.result(
        f"  sinks: share of the first {found['sink_tokens']} tokens; recent: of the {found['recent_tokens']} up to the query; "
        "spread: entropy by the largest possible"
    )
    console.result()
    show([*map_lines(head_maps(found)), legend("0", "all of it")])
    console.result()
    console.result(f"Where the last {last} queries look, all heads together: the text from left to right, shade by share")
    show([*map_lines([place_map(found)]), legend("0", "half of it or more")])
    console.result()
    _print_top(found, text)


def head_maps(found: dict[str, Any]) -> list[HeatMap]:
    """Sinks, recent, spread, and where the model has them its own sinks."""
    labels = [str(number) for number in range(len(found["layers"]))]
    largest = math.log(found["num_tokens"]) or 1.0
    measures = {"sinks": ("sink_share", 1.0), "recent": ("recent_share", 1.0), "spread": ("entropy", largest)}
    if any(head["learned_share"] > 0 for layer in found["layers"] for head in layer["heads"]):
        measures["the model's own sink"] = ("learned_share", 1.0)
    return [
        HeatMap(title, labels, [[head[key] / most for head in layer["heads"]] for layer in found["layers"]])
        for title, (key, most) in measures.items()
    ]


def place_map(found: dict[str, Any]) -> HeatMap:
    """Shares of the parts of the text, by layer, at its end."""
    labels = [str(number) for number in range(len(found["layers"]))]
    room = max(1, width() - 4)
    rows = []
    for shares in found["places"]["shares"]:
        count = min(room, len(shares))
        joined = len(shares) / count
        rows.append([min(1.0, 2 * joined * share) for share in means(list(map(float, shares)), count)])
    return HeatMap("", labels, rows)


def _print_top(found: dict[str, Any], text: list[str]) -> None:
    console.result(f"What the last {found['last_queries']} queries attend to most")
    console.table(TOP_HEADERS, top_rows(found, text), right=(0, 1, 3, 4, 5))
    console.result()
    show(marked_text(text, {top["position"]: 8 - min(6, rank // 2) for rank, top in enumerate(found["top"])}))


TOP_HEADERS = ("RANK", "POSITION", "TOKEN", "SHARE", "MOST BY", "ITS SHARE")


def top_rows(found: dict[str, Any], text: list[str]) -> list[tuple[Any, ...]]:
    """The tokens that get most, each with the layer and head that gives it most."""
    return [
        (
            rank,
            top["position"],
            quoted(text[top["position"]]),
            f"{top['share']:.1%}",
            f"{top['layer']}.{top['head']}",
            f"{top['head_share']:.0%}",
        )
        for rank, top in enumerate(found["top"], 1)
    ]


def quoted(piece: str) -> str:
    """A token in a table."""
    return repr(piece)[1:-1] if piece.strip() == piece and piece else repr(piece)


def marked_text(text: list[str], shades: dict[int, int], brackets: tuple[str, str] | None = None) -> list[list[Piece]]:
    """Lines of the text with some tokens in brackets and shaded; of a long one what is around them. brackets: other ones."""
    left, right = brackets or (("⟦", "⟧") if has_blocks() else ("[[", "]]"))
    shown = range(len(text)) if len(text) <= _MOST_WHOLE else _near(shades, len(text))
    lines: list[list[Piece]] = [[]]
    before = -1
    for position in shown:
        if position != before + 1:
            lines[-1].append((" … ", None))
        piece, shade = printable(text[position]), shades.get(position)
        if shade is not None:
            shown = piece.replace("\n", "⏎" if has_blocks() else "\\n")
            piece = f"{left}{shown}{right}" + "\n" * piece.count("\n")
        *whole, tail = piece.split("\n")
        for part in whole:
            lines[-1].append((part, shade))
            lines.append([])
        lines[-1].append((tail, shade))
        before = position
    if before + 1 < len(text):
        lines[-1].append((" …", None))
    return lines


def _near(marked: dict[int, int], count: int) -> list[int]:
    """Positions of the marked tokens and of those around them."""
    found = {p for m in marked for p in range(max(0, m - _AROUND), min(count, m + _AROUND + 1))}
    return sorted(found)

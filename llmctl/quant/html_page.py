"""What every HTML report is made of: one page that loads nothing, reads in light and dark, and prints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1b1b;--soft:#555;--line:#c8c8c8;--plot:#f4f4f4;--bar:#2266bb;--odd:#a04000}
@media (prefers-color-scheme:dark){:root{--back:#16181c;--text:#e6e6e6;--soft:#a9a9a9;--line:#444;--plot:#22252b;--bar:#5b9bea;
--odd:#ff9a5c}}
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;padding:0 1em;max-width:72em;background:var(--back);color:var(--text)}
h1{font-size:1.5em}h2{font-size:1.25em;border-bottom:1px solid var(--line);margin-top:2em}h3{font-size:1em;margin-bottom:.3em}
.scroll{overflow-x:auto}table{border-collapse:collapse;margin:.5em 0}caption{text-align:left;color:var(--soft);padding:.3em 0}
td,th{padding:.2em .8em;border-bottom:1px solid var(--line);text-align:left;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}tr.best td{font-weight:bold}
svg{background:var(--plot);margin:.3em 1em .3em 0;max-width:100%}svg text{fill:var(--text);font-size:10px}
.note{color:var(--odd)}.soft{color:var(--soft)}
@media print{:root{--back:#fff;--text:#000;--soft:#333;--line:#999;--plot:#fff;--bar:#2266bb;--odd:#a04000}
body{margin:0;max-width:none;font-size:10pt}.scroll{overflow:visible}h2,h3{break-after:avoid}tr,svg,figure{break-inside:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def page(title: str, parts: Iterable[str], style: str = "") -> str:
    """A whole page. parts: its body's HTML below the title. style: CSS of its own."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style>"
    )
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{body}</main></body></html>\n'


def table(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    numbers: Collection[int] = (),
    best: int | None = None,
) -> str:
    """A table. numbers: columns aligned to the right. best: the row that stands out."""

    def cell(tag: str, column: int, value: object) -> str:
        kind = ' class="n"' if column in numbers else ""
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{kind}>{escape(str(value))}</{tag}>"

    head = "".join(cell("th", column, header) for column, header in enumerate(headers))
    lines = []
    for number, row in enumerate(rows):
        kind = ' class="best"' if number == best else ""
        lines.append(f"<tr{kind}>" + "".join(cell("td", column, value) for column, value in enumerate(row)) + "</tr>")
    titled = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = "".join(lines)
    return f'<div class="scroll"><table>{titled}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

"""What a policy has left of a text, in the live view of `inspect-kv`: layer by layer and head by head."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.heat_map import HeatMap, legend, map_lines, show
from llmctl.commands.kv_what_if import kept_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from llmctl.runtime.cache.kept import KeptTokens
    from llmctl.runtime.cache.memory import LayerShape

_COLUMNS = 32
"""Parts that the text is cut into in the terminal."""


def kept_document(kept: KeptTokens, policy: str, layers: Sequence[LayerShape]) -> dict[str, Any]:
    """As a JSON object. layers: the model's, without the policy."""
    return {
        "kv_policy": policy,
        "num_tokens": kept.num_tokens,
        "bytes": kept.nbytes,
        "full_bytes": kept.full_bytes,
        "layers": [[_head(positions) for positions in kept.positions(layer)] for layer in range(len(layers))],
        "dropped": kept.dropped(layers, kept.num_tokens),
    }


def _head(positions: np.ndarray) -> dict[str, Any]:
    """How many tokens a head keeps, and which: first ones and lengths of what lies side by side."""
    import numpy as np

    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(positions))
    return {"kept": len(positions), "runs": np.stack([positions[starts], lengths], axis=1).tolist()}


def describe_kept(kept: dict[str, Any]) -> str:
    """A sentence: how much is left."""
    counts = sorted({head["kept"] for layer in kept["layers"] for head in layer})
    heads = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    sizes = f"{console.format_bytes(kept['bytes'])} of {console.format_bytes(kept['full_bytes'])}"
    return f"{kept['kv_policy']}: each head keeps {heads} of {kept['num_tokens']} tokens, {sizes} in all. Share kept by place:"


def kept_shares(kept: dict[str, Any], columns: int) -> list[list[list[float]]]:
    """[layer][head][column]: the share that is kept of the tokens of each part of the text. columns: most parts."""
    count = min(columns, kept["num_tokens"])
    edges = [i * kept["num_tokens"] // count for i in range(count + 1)]
    return [[_shares(head["runs"], edges) for head in layer] for layer in kept["layers"]]


def _shares(runs: list[list[int]], edges: list[int]) -> list[float]:
    import numpy as np

    has = np.zeros(edges[-1])
    for first, count in runs:
        has[first : first + count] = 1
    return [float(has[a:b].mean()) for a, b in itertools.pairwise(edges)]


def print_kept(kept: dict[str, Any], text: list[str]) -> None:
    """Show it. text: the tokens."""
    console.result(f"KEPT  {describe_kept(kept)}")
    show([*map_lines(kept_maps(kept)), legend("none", "all of the tokens there")])
    console.result("  What half of the heads or more have dropped is cut out:")
    console.result(kept_text(kept["dropped"], text))


def kept_maps(kept: dict[str, Any]) -> list[HeatMap]:
    """A map for each head, layers down and the text across; one for all heads where they keep the same."""
    shares = kept_shares(kept, _COLUMNS)
    if all(layer[0]["runs"] == head["runs"] for layer in kept["layers"] for head in layer):
        shares = [layer[:1] for layer in shares]
    most = max(map(len, shares))
    return [_map(shares, head, "all heads" if most == 1 else f"head {head}") for head in range(most)]


def _map(shares: list[list[list[float]]], head: int, title: str) -> HeatMap:
    """Layers that have so many heads."""
    rows = [(str(number), layer[head]) for number, layer in enumerate(shares) if head < len(layer)]
    return HeatMap(title, [label for label, _ in rows], [row for _, row in rows])

"""The what-if view of `inspect-kv`: what every other cache would take, and what it would do to the model's predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.commands.answer import printable

DROPPED = 0.5
"""A token is shown as dropped where so many of the heads have dropped it."""
_SHOWN = 80
"""Parts of a text shown at its beginning, and at its end."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmctl.runtime.inspection.what_if import Outcome, Question, WhatIf


def what_if_document(question: Question, found: WhatIf, answer: list[str]) -> dict[str, Any]:
    """The view as a JSON object. answer: the full cache's, token by token."""
    return {
        "answer_token_ids": found.answer,
        "answer": "".join(answer),
        "places": len(found.answer),
        "context": question.context or len(question.token_ids) + len(found.answer),
        "sequences": question.sequences,
        "needle_depths": found.depths,
        "max_memory_bytes": found.within,
        "outcomes": [_outcome(outcome) for outcome in found.outcomes],
        "recommended": found.recommended,
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "kv_type": outcome.choice.kv_type,
        "kv_policy": outcome.choice.kind,
        "budget_share": None if outcome.budget is None else outcome.choice.share,
        "budget_tokens": outcome.budget,
        "bytes": outcome.nbytes,
        "context_bytes": outcome.context_bytes,
        "kl": outcome.kl,
        "kl_max": outcome.kl_max,
        "same_top": outcome.same_top,
        "needles_found": outcome.found,
        "dropped": outcome.dropped,
    }


def cache_name(outcome: dict[str, Any]) -> str:
    """A cache in a few words."""
    if outcome["budget_tokens"] is None:
        return outcome["kv_type"]
    return f"{outcome['kv_type']} {outcome['kv_policy']} {outcome['budget_share']:.0%}"


def print_what_if(found: dict[str, Any], text: list[str]) -> None:
    """Show it. text: its tokens."""
    console.result(f"WHAT IF  against a full f32 cache, at the {found['places']} tokens of its own answer:")
    console.result(f"  {console.one_line(found['answer'])!r}")
    console.result()
    headers, rows = outcome_table(found)
    console.table(headers, rows, right=range(1, len(headers)))
    console.result()
    console.result(advice(found))
    for outcome in found["outcomes"]:
        if outcome["dropped"] is not None:
            console.result()
            share = sum(outcome["dropped"]) / len(outcome["dropped"])
            console.result(f"{cache_name(outcome)} drops {share:.0%}; what half of the heads or more have dropped is cut out:")
            console.result(kept_text(outcome["dropped"], text))


def kept_text(dropped: Sequence[float], text: list[str]) -> str:
    """The text without the tokens that half of the heads have dropped; a long one is shortened."""
    parts: list[str] = []
    run = 0
    for share, piece in zip(dropped, text, strict=True):
        if share >= DROPPED:
            run += 1
            continue
        parts += [f"[-{run}-]"] * (run > 0) + [printable(piece)]
        run = 0
    parts += [f"[-{run}-]"] * (run > 0)
    if len(parts) > 2 * _SHOWN:
        parts[_SHOWN:-_SHOWN] = [f" [… {len(parts) - 2 * _SHOWN} parts more …] "]
    return "".join(parts)


def outcome_table(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Headers and rows, the recommended one marked."""
    sequences = f" x {found['sequences']}" if found["sequences"] > 1 else ""
    needles = ("NEEDLES",) if found["needle_depths"] else ()
    headers = ("CACHE", "THIS TEXT", f"{found['context']} TOKENS{sequences}", "KL", "MOST KL", "SAME TOP", *needles)
    rows = []
    for number, each in enumerate(found["outcomes"]):
        mark = " <" if number == found["recommended"] else ""
        seen = (f"{sum(each['needles_found'])}/{len(found['needle_depths'])}",) if needles else ()
        sizes = console.format_bytes(each["bytes"]), console.format_bytes(each["context_bytes"])
        shares = f"{each['kl']:.5f}", f"{each['kl_max']:.5f}", f"{each['same_top']:.1%}"
        rows.append((cache_name(each) + mark, *sizes, *shares, *seen))
    return headers, rows


def advice(found: dict[str, Any]) -> str:
    """One sentence: which cache, and why."""
    from llmctl.runtime.inspection.what_if import LEAST_AGREEMENT, MOST_KL

    limit = found["max_memory_bytes"]
    if found["recommended"] is None:
        if limit is None:
            return f"None has a KL of at most {MOST_KL} and the same top token at {LEAST_AGREEMENT:.0%} of the places."
        least = min(each["context_bytes"] for each in found["outcomes"])
        return f"None fits into {console.format_bytes(limit)}: the smallest takes {console.format_bytes(least)}."
    best = found["outcomes"][found["recommended"]]
    why = (
        f"the smallest with a KL of at most {MOST_KL} and the same top token at {LEAST_AGREEMENT:.0%} of the places or more"
        if limit is None
        else f"the closest to the full cache within {console.format_bytes(limit)}"
    )
    policy = f" --kv-policy {best['kv_policy']} --kv-budget {best['budget_share']:g}" if best["budget_tokens"] else ""
    return f"Recommended: --kv-type {best['kv_type']}{policy}, {why}."

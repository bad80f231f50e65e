"""The what-if view of `inspect-kv`: what every other cache would take, and what it would do to the model's predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmctl.commands import console

if TYPE_CHECKING:
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
        "bytes": outcome.nbytes,
        "context_bytes": outcome.context_bytes,
        "kl": outcome.kl,
        "kl_max": outcome.kl_max,
        "same_top": outcome.same_top,
        "needles_found": outcome.found,
    }


def print_what_if(found: dict[str, Any]) -> None:
    """Show it."""
    console.result(f"WHAT IF  against a full f32 cache, at the {found['places']} tokens of its own answer:")
    console.result(f"  {console.one_line(found['answer'])!r}")
    console.result()
    headers, rows = outcome_table(found)
    console.table(headers, rows, right=range(1, len(headers)))
    console.result()
    console.result(advice(found))


def outcome_table(found: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Headers and rows, the recommended one marked."""
    sequences = f" x {found['sequences']}" if found["sequences"] > 1 else ""
    needles = ("NEEDLES",) if found["needle_depths"] else ()
    headers = ("CACHE", "THIS TEXT", f"{found['context']} TOKENS{sequences}", "KL", "MOST", "SAME TOP", *needles)
    rows = []
    for number, each in enumerate(found["outcomes"]):
        mark = " <" if number == found["recommended"] else ""
        seen = (f"{sum(each['needles_found'])}/{len(found['needle_depths'])}",) if needles else ()
        sizes = console.format_bytes(each["bytes"]), console.format_bytes(each["context_bytes"])
        shares = f"{each['kl']:.5f}", f"{each['kl_max']:.5f}", f"{each['same_top']:.1%}"
        rows.append((each["kv_type"] + mark, *sizes, *shares, *seen))
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
    return f"Recommended: --kv-type {best['kv_type']}, {why}."

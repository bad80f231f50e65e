#!/usr/bin/env python3
"""What int8 activations change: the native backend against the reference on the reference's own greedy text.

    python scripts/check_activations.py MODEL.gguf --prompts tests/golden/smollm2.json [-n 128] [-t 2] [--json FILE]

For each prompt of a golden file the reference writes up to N tokens. Then, teacher-forced on that text:
- int8: at how many places the native backend finds the same token most likely. At every other place: the gap between the
  reference's two best logits there, beside the largest difference of the two backends' logits at that place.
- float: whether the native backend with float activations writes the same text by itself; where not, the gap at the first
  token that differs.
Fails (exit code 1) where fewer than 97 % agree, a gap exceeds the difference, or fewer than nine in ten texts are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from llmctl.commands.console import format_table
from llmctl.errors import LlmctlError
from llmctl.runtime.engine import Engine
from llmctl.runtime.evaluate import LogitsReader
from llmctl.runtime.loading import LoadedModel, load_model
from llmctl.runtime.sampling.params import SamplingParams

AGREEMENT = 0.97
SAME_TEXTS = 0.9
_ROWS = 32  # logits at once


@dataclass(frozen=True)
class Disagreement:
    """A place where the most likely tokens differ. gap: between the reference's two best logits. error: the largest
    difference of the backends' logits there."""

    place: int
    gap: float
    error: float

    @property
    def explained(self) -> bool:
        """Whether rounding alone may have turned the order."""
        return self.gap < self.error


@dataclass
class PromptResult:
    """One prompt: places compared, the root of the mean squared logit error, and what came of the free text in float.

    first_difference: the place where it leaves the reference's, None where it is the same; its gap beside it.
    """

    name: str
    places: int
    rms_error: float
    disagreements: list[Disagreement] = field(default_factory=list)
    first_difference: int | None = None
    gap_there: float | None = None


def greedy(model: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """What the model writes after the prompt: `count` tokens, or fewer if it ends before."""
    engine = Engine(model)
    sequence = engine.add(prompt, SamplingParams(temperature=0, max_tokens=count))
    while engine.has_work:
        engine.step()
    return sequence.completion_token_ids


def compare(name: str, prompt: list[int], text: list[int], models: dict[str, LoadedModel]) -> PromptResult:
    """models: "reference", "int8", "float"; text: the reference's."""
    ids, first = prompt + text, len(prompt) - 1
    gaps, squares, disagreements = [], 0.0, []
    for reference, native in _logits(models["reference"], models["int8"], ids, first):
        two_best = np.partition(reference, -2, axis=1)[:, -2:]
        errors = native - reference
        squares += float(np.square(errors, dtype=np.float64).mean(1).sum())
        for row in np.flatnonzero(reference.argmax(1) != native.argmax(1)):
            gap = float(two_best[row, 1] - two_best[row, 0])
            disagreements.append(Disagreement(len(gaps) + int(row), gap, float(np.abs(errors[row]).max())))
        gaps += (two_best[:, 1] - two_best[:, 0]).tolist()
    result = PromptResult(name, len(text), (squares / len(text)) ** 0.5, disagreements)
    free = greedy(models["float"], prompt, len(text))
    if free != text:
        pairs = enumerate(zip(free, text, strict=False))
        result.first_difference = next((place for place, (ours, theirs) in pairs if ours != theirs), len(free))
        result.gap_there = gaps[min(result.first_difference, len(gaps) - 1)]
    return result


def _logits(one: LoadedModel, other: LoadedModel, ids: list[int], first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both models' logits [n, V] after every token from number `first` on but the last."""
    pieces = [LogitsReader(model, len(ids)).rows(ids[:-1], first, _ROWS) for model in (one, other)]
    return zip(*pieces, strict=True)


def verdicts(results: list[PromptResult]) -> list[tuple[str, bool]]:
    """What was to be shown, and whether it was."""
    places = sum(result.places for result in results)
    differing = [d for result in results for d in result.disagreements]
    agreement = 1 - len(differing) / places
    explained = sum(d.explained for d in differing)
    same = sum(result.first_difference is None for result in results)
    return [
        (f"int8: {agreement:.2%} of {places} top tokens agree (at least {AGREEMENT:.0%})", agreement >= AGREEMENT),
        (f"int8: {explained} of {len(differing)} others lie closer than the logits differ (all)", explained == len(differing)),
        (f"float: {same} of {len(results)} texts are the same (nine in ten)", same >= SAME_TEXTS * len(results)),
    ]


def report(results: list[PromptResult]) -> list[str]:
    """A row for every prompt, a line for every disagreement."""
    rows = []
    for result in results:
        agreeing = f"{result.places - len(result.disagreements)}/{result.places}"
        gap = result.gap_there
        free = "same" if result.first_difference is None else f"differs at {result.first_difference} (gap {gap:.2e})"
        rows.append((result.name, agreeing, f"{result.rms_error:.4f}", free))
    lines = format_table(("PROMPT", "INT8 AGREES", "RMS ERROR", "FLOAT TEXT"), rows, right=(1, 2))
    for result in results:
        for each in result.disagreements:
            verdict = "explained" if each.explained else "NOT EXPLAINED"
            lines.append(f"  {result.name}, token {each.place}: gap {each.gap:.4f}, error {each.error:.4f}, {verdict}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Check one model from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="a golden file: {prompts: {name: {ids: […]}}}")
    parser.add_argument("-n", "--count", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    prompts = {name: prompt["ids"] for name, prompt in json.loads(options.prompts.read_text())["prompts"].items()}
    common = {"threads": options.threads, "kv_type": "f32", "ctx_size": max(map(len, prompts.values())) + options.count + 1}
    try:
        models = {"reference": load_model(options.model, backend="reference", **common)}
        for activations in ("int8", "float"):
            models[activations] = load_model(options.model, backend="native", activations=activations, **common)
    except LlmctlError as error:
        print(f"check_activations: {error}", file=sys.stderr)
        return 1
    results = []
    for name, prompt in prompts.items():
        print(name, file=sys.stderr, flush=True)
        results.append(compare(name, prompt, greedy(models["reference"], prompt, options.count), models))
    print("\n".join(report(results)))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    outcomes = verdicts(results)
    print("\n".join(f"{'ok  ' if good else 'FAIL'} {line}" for line, good in outcomes))
    return 0 if all(good for _, good in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Whether what was fitted to some text is as close to the model on other text: the check against overfitting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmctl.errors import LlmctlError
from llmctl.kernels.backend import choose_compute
from llmctl.quant.calibration import Calibration
from llmctl.quant.memory_plan import PROGRAM
from llmctl.runtime.evaluate import SHORTEST_CHUNK, evaluate
from llmctl.runtime.loading import LoadedModel, OpenedModel, open_model

_ROWS = 8
_OVERFIT = 1.5  # times the divergence on the calibration text


def check(
    source: Path, output: Path, calibration: Calibration, threads: int, family: str | None, max_ram: int | None = None
) -> dict[str, Any]:
    """Kullback-Leibler divergence of the result from the source on some of the calibration text and on text left out of it.

    Either part is None where there is too little text; "skipped" says why nothing was measured, as for want of memory. max_ram:
    bytes that both models must fit in, None for what is free.
    """
    used = [row for row in calibration.rows if len(row) == calibration.row_length][:_ROWS]
    if calibration.row_length < SHORTEST_CHUNK or not used:
        return {"skipped": f"no row has {max(SHORTEST_CHUNK, calibration.row_length)} tokens"}
    try:
        opened = [_open(path, calibration.row_length, family) for path in (output, source)]
        needed = PROGRAM + sum(map(_bytes_of, opened))
        if max_ram is not None and needed > max_ram:
            return {"skipped": f"both models take {needed / 1e9:.2f} GB, --max-ram is {max_ram / 1e9:.2f} GB"}
        models = [one.load(threads=threads) for one in opened]
    except LlmctlError as error:
        return {"skipped": str(error)}
    found: dict[str, Any] = {"calibration": _compare(models, used), "held_out": None}
    if calibration.held_out:
        found["held_out"] = _compare(models, calibration.held_out)
        found["overfit"] = found["held_out"]["kl"] > _OVERFIT * found["calibration"]["kl"]
    return found


def _open(path: Path, context: int, family: str | None) -> OpenedModel:
    backend = choose_compute().backend
    exact = "float" if backend == "native" else None
    return open_model(path, backend=backend, activations=exact, ctx_size=context, family=family)


def _bytes_of(model: OpenedModel) -> int:
    """Of the weights in memory."""
    stored = [model.weights.stored(name) for name in model.weights.names()]
    return sum(one.bytes_on_native if model.compute.backend == "native" else 4 * one.num_elements for one in stored)


def _compare(models: list[LoadedModel], rows: list[list[int]]) -> dict[str, Any]:
    found = evaluate(models[0], rows, models[1])
    assert found.comparison is not None
    compared = found.comparison
    return {
        "rows": len(rows),
        "kl": compared.kl.value,
        "kl_error": compared.kl.error,
        "kl_99": compared.kl_99,
        "same_top": compared.same_top.value,
        "perplexity": found.perplexity.value,
        "perplexity_of_the_source": compared.perplexity.value,
    }

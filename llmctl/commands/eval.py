"""llmctl eval: how well a model predicts a text, and how far it is from another model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.options import (
    KV_TYPE_SYNTAX,
    Activations,
    ActivationsOption,
    AsOption,
    Backend,
    BackendOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvBudgetOption,
    KvPolicyOption,
    KvTypeOption,
    ModelArgument,
    QuietOption,
    ThreadsOption,
    complete_model,
    known_family,
)
from llmctl.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.runtime.evaluate import Estimate, Evaluation
    from llmctl.runtime.loading import LoadedModel, OpenedModel

_OTHER = {"show_default": "as MODEL's", "case_sensitive": False}


def evaluate(
    model: ModelArgument = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="The text, UTF-8; - reads stdin.", show_default=False)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="MODEL",
            help="Measure the divergence from this model; with another --against option alone, from the same file.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    against_backend: Annotated[Backend | None, typer.Option("--against-backend", help="Its backend.", **_OTHER)] = None,
    against_kv_type: Annotated[
        str | None, typer.Option("--against-kv-type", metavar=KV_TYPE_SYNTAX, help="Its cache type.", show_default="as MODEL's")
    ] = None,
    against_activations: Annotated[
        Activations | None, typer.Option("--against-activations", help="Its activations.", **_OTHER)
    ] = None,
    against_as: Annotated[
        str | None,
        typer.Option(
            "--against-as", metavar="FAMILY", callback=known_family, help="Its family, whatever it says.", show_default=False
        ),
    ] = None,
    ctx_size: Annotated[
        int, typer.Option("--ctx-size", "--ctx", "-c", min=4, help="Tokens of a chunk; the second half of each counts.")
    ] = 512,
    chunks: Annotated[int | None, typer.Option("--chunks", min=1, help="Most chunks.", show_default="all of the text")] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="With --against: signal to noise after every layer, computed in float32 by torch.")
    ] = False,
    as_family: AsOption = None,
    threads: ThreadsOption = None,
    kv_type: KvTypeOption = None,
    kv_policy: KvPolicyOption = None,
    kv_budget: KvBudgetOption = None,
    activations: ActivationsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure a model on a text: perplexity as llama-perplexity counts it, and with --against what tells two models apart.

    Both run side by side and are compared place by place, so no file of logits is needed. --kv-policy is for MODEL alone:
    the other one keeps all tokens. snapkv takes the first half of a chunk for its prompt.
    """
    from llmctl.kernels.backend import choose_compute
    from llmctl.runtime.cache.policy import parse_kv_policy
    from llmctl.runtime.evaluate import cut
    from llmctl.runtime.evaluate import evaluate as run

    if against_as is not None and against is None:
        raise UsageError("--against-as is for a model that --against names: from the same file it is of the same family")
    policy = parse_kv_policy(kv_policy, kv_budget)
    if layers and against is None:
        raise UsageError("--layers compares two models layer by layer: --against names the other")
    if text is None:
        raise UsageError("there is no text to measure on: --text FILE names one")
    ours = {"backend": backend, "device": device, "dtype": dtype, "kv_type": kv_type, "activations": activations}
    theirs = {"backend": against_backend, "kv_type": against_kv_type, "activations": against_activations}
    theirs = {name: value for name, value in theirs.items() if value is not None}
    for choices in (ours, _for_other(ours, theirs)):
        choose_compute(**choices)  # what it refuses is refused before any model is looked for
    content = _read(text)
    first = _open(model, {**ours, "ctx_size": ctx_size, "family": as_family, "kv_policy": policy})
    pieces = cut(first.tokenizer, content, ctx_size, chunks)
    loaded, other = _load(first, threads), None
    if against is not None or theirs:
        family = as_family if against is None else against_as
        loading = {**_for_other(ours, theirs), "ctx_size": ctx_size, "family": family}
        other = _load(_beside(first, against, loading, pieces, content), threads)
    with console.progress("Evaluating", len(pieces), unit="chunk") as bar:
        result = run(loaded, pieces, other, bar.update_to)
    sqnr = _sqnr(loaded, other, (as_family, against_as), pieces) if layers and other is not None else None
    _print_json(loaded, other, text, result, sqnr) if json else _print(other, result, sqnr)


def _sqnr(
    loaded: LoadedModel, other: LoadedModel, families: tuple[str | None, ...], pieces: list[list[int]]
) -> list[float]:
    from llmctl.quant.layer_sqnr import layer_sqnr
    from llmctl.runtime.models.registry import chosen_family
    from llmctl.runtime.models.weights import ModelWeights

    models = [
        ModelWeights(model.checkpoint, chosen_family(family))
        for model, family in zip((loaded, other), families, strict=True)
    ]
    with console.progress("Comparing layers", loaded.config.num_layers, unit="layer") as bar:
        return layer_sqnr(*models, pieces, loaded.ops.threads, bar.update_to)


def _for_other(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """How the other model is opened: as this one, but where something else is asked for. What only one backend can do is not
    carried over to another."""
    if theirs.get("backend", ours["backend"]) != ours["backend"]:
        ours = {**ours, "kv_type": None, "activations": None}
    return {**ours, **theirs}


def _read(text: Path) -> str:
    from llmctl.commands.prompt_input import read_stdin, read_text

    if str(text) != "-":
        return read_text(text, "--text")
    piped = read_stdin()
    if piped is None:
        raise UsageError("--text -: there is no text on standard input")
    return piped


def _open(spec: str | None, loading: dict[str, Any]) -> OpenedModel:
    from llmctl.runtime.loading import open_model
    from llmctl.runtime.store import resolve_model

    path = resolve_model(spec, progress=console.progress)
    if spec is None:
        console.info(f"Using {path}")
    opened = open_model(path, **loading)
    if opened.tokenizer is None:
        raise UnsupportedError(f"{path}: the model has no tokenizer, so it cannot be given text")
    return opened


def _beside(
    first: OpenedModel, against: str | None, loading: dict[str, Any], pieces: list[list[int]], content: str
) -> OpenedModel:
    """The other model, which must cut the text into the same ids."""
    from llmctl.runtime.evaluate import cut
    from llmctl.runtime.loading import open_model

    if against is None:
        return open_model(first.checkpoint.path, **loading)
    other = _open(against, loading)
    if cut(other.tokenizer, content, len(pieces[0]), len(pieces)) != pieces:
        raise UsageError(
            f"{first.checkpoint.path} and {other.checkpoint.path} read the text as different tokens: they cannot be compared"
        )
    return other


def _load(opened: OpenedModel, threads: int | None) -> LoadedModel:
    from llmctl.commands.answer import load_weights

    return load_weights(opened, threads)[0]


def _print(other: LoadedModel | None, result: Evaluation, sqnr: list[float] | None) -> None:
    rows = [("perplexity", _pm(result.perplexity, 4))]
    if (found := result.comparison) is not None:
        rows += [
            ("perplexity of the other", _pm(found.perplexity, 4)),
            ("ratio of the two", _pm(found.perplexity_ratio, 5)),
            ("KL divergence, mean", _pm(found.kl, 6)),
            ("KL divergence, median", f"{found.kl_median:.6f}"),
            ("KL divergence, 99 %", f"{found.kl_99:.6f}"),
            ("KL divergence, most", f"{found.kl_max:.6f}"),
            ("same top token", f"{100 * found.same_top.value:.3f} ± {100 * found.same_top.error:.3f} %"),
        ]
    console.info(f"{result.num_chunks} chunks of {result.context_length} tokens, {result.num_scored} places counted")
    console.info(f"The other model is {other.checkpoint.path}" if other else "No other model was asked for (--against)")
    rows += [(f"signal to noise after layer {number}", f"{value:.2f} dB") for number, value in enumerate(sqnr or ())]
    console.table(("MEASURE", "VALUE"), rows)


def _pm(estimate: Estimate, digits: int) -> str:
    return f"{estimate.value:.{digits}f} ± {estimate.error:.{digits}f}"


def _print_json(
    loaded: LoadedModel, other: LoadedModel | None, text: Path, result: Evaluation, sqnr: list[float] | None
) -> None:
    models = {"model": _facts(loaded), "against": _facts(other) if other else None}
    console.print_json({"text": str(text), **models, **asdict(result), "layer_sqnr_db": sqnr})


def _facts(model: LoadedModel) -> dict[str, Any]:
    ops = model.ops
    computed = {"backend": ops.name, "device": ops.device, "dtype": ops.dtype, "threads": ops.threads}
    cache = {"kv_type": model.kv_type, "kv_policy": str(model.kv_policy)}
    return {"path": str(model.checkpoint.path), **computed, **cache, "activations": model.activations}

"""llmctl bench: prompt and generation speed, in llama-bench's terms and columns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llmctl.commands import console
from llmctl.commands.draft import (
    DraftOption,
    NumDraftTokensOption,
    OpenedDraft,
    describe_speculation,
    draft_request,
    open_draft,
    speculation_fields,
)
from llmctl.commands.number_list import SYNTAX, number_list
from llmctl.commands.options import (
    THREADS_DEFAULT,
    ActivationsOption,
    AsOption,
    BackendOption,
    DeviceOption,
    DtypeOption,
    GpuLayersOption,
    GpuMemoryOption,
    JsonOption,
    KvBudgetOption,
    KvPolicyOption,
    KvTypeOption,
    QuietOption,
    complete_model,
)
from llmctl.errors import UsageError

if TYPE_CHECKING:
    from llmctl.runtime.benchmark import BenchResult, BenchTest
    from llmctl.runtime.engine.speculation import Speculation
    from llmctl.runtime.loading import LoadedModel, OpenedModel
    from llmctl.runtime.models.active import Active

Output = Literal["md", "json", "jsonl", "csv"]

# Every key of a llama-bench row, so that what reads its files reads ours; those without a counterpart here are null.
_LLAMA_BENCH_KEYS = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
    *("model_n_params", "n_batch", "n_ubatch", "n_threads", "cpu_mask", "cpu_strict", "poll", "type_k", "type_v"),
    *("n_gpu_layers", "n_cpu_moe", "split_mode", "main_gpu", "no_kv_offload", "flash_attn", "devices", "tensor_split"),
    *("tensor_buft_overrides", "load_mode", "lazy_mode", "embeddings", "no_op_offload", "no_host", "repack", "fit_target"),
    *("fit_min_ctx", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
)


def bench(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Paths, store names, hf:owner/name[:file or TYPE] or pypi:package. Without: LLMCTL_MODEL, else smollm2.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    n_prompt: Annotated[
        list[str] | None,
        typer.Option("--n-prompt", "-p", help=f"Tokens of the prompt, 0 for no such test: {SYNTAX}.", show_default="512"),
    ] = None,
    n_gen: Annotated[
        list[str] | None,
        typer.Option("--n-gen", "-n", help=f"Tokens to generate, 0 for no such test: {SYNTAX}.", show_default="128"),
    ] = None,
    pg: Annotated[
        list[str] | None,
        typer.Option("-pg", metavar="PP,TG", help="Also a prompt and then generation, timed together. Repeatable."),
    ] = None,
    n_depth: Annotated[
        list[str] | None,
        typer.Option("--n-depth", "-d", help=f"Tokens already in the cache, not timed: {SYNTAX}.", show_default="0"),
    ] = None,
    repetitions: Annotated[
        list[str] | None, typer.Option("--repetitions", "-r", help=f"Runs of every test: {SYNTAX}.", show_default="5")
    ] = None,
    threads: Annotated[
        list[str] | None, typer.Option("--threads", "-t", help=f"CPU threads: {SYNTAX}.", show_default=THREADS_DEFAULT)
    ] = None,
    warm_up: Annotated[bool, typer.Option("--warmup/--no-warmup", help="Run every test once before it is timed.")] = True,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the token ids.")] = 0,
    output: Annotated[
        Output | None,
        typer.Option("--output", "-o", help="Form of the result; json is llama-bench's array.", show_default="md"),
    ] = None,
    draft: DraftOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    as_family: AsOption = None,
    kv_type: KvTypeOption = None,
    kv_policy: KvPolicyOption = None,
    kv_budget: KvBudgetOption = None,
    activations: ActivationsOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = "auto",
    backend: BackendOption = "auto",
    gpu_layers: GpuLayersOption = None,
    gpu_memory_utilization: GpuMemoryOption = 0.9,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Measure prompt and generation speed.

    Every combination of the lists is a test: pp512 reads a prompt of 512 random tokens, tg128 generates 128, " @ d512" does so
    with 512 tokens in the cache. Mean and standard deviation are those of the repetitions, in tokens per second.
    """
    from llmctl.commands.bench_output import make_printer
    from llmctl.kernels.backend import choose_compute
    from llmctl.runtime.cache.policy import parse_kv_policy
    from llmctl.runtime.gpu_placement import GpuChoice, parse_gpu_layers

    if json and output is not None:
        raise UsageError(f"--json and -o {output} were both given: choose one")
    depths = number_list(n_depth or ["0"], "-d")
    tests = list(_tests(number_list(n_prompt or ["512"], "-p"), number_list(n_gen or ["128"], "-n"), _pairs(pg or []), depths))
    counts = number_list(repetitions or ["5"], "-r", minimum=1)
    thread_counts: list[int | None] = [*number_list(threads or [], "-t", minimum=1)] or [None]
    if not tests:
        raise UsageError("there is nothing to measure: -p and -n are 0 and there is no -pg")
    loading = {"backend": backend, "device": device, "dtype": dtype, "kv_type": kv_type, "activations": activations}
    choose_compute(**loading)  # what it refuses is refused before any model is looked for
    drafting = draft_request(draft, num_draft_tokens)
    loading["kv_policy"] = parse_kv_policy(kv_policy, kv_budget)
    loading["gpu"] = GpuChoice(parse_gpu_layers(gpu_layers), gpu_memory_utilization)
    opened = [(name, _open(name, tests, {**loading, "family": as_family})) for name in models or [None]]
    sizes = [{**loading, "ctx_size": model.context_length} for _, model in opened]
    drafts = [open_draft(drafting, model, size) if drafting else None for (_, model), size in zip(opened, sizes, strict=True)]
    printer = make_printer("document" if json else output or "md")
    for (name, model), drafter in zip(opened, drafts, strict=True):
        for number in thread_counts:
            for result, row in _measure(name, model, drafter, number, tests, counts, warm_up, seed):
                printer.row(result.test.name, row)
    printer.end()


def _tests(prompts: list[int], gens: list[int], pairs: list[tuple[int, int]], depths: list[int]) -> Iterator[BenchTest]:
    """The tests in llama-bench's order."""
    from llmctl.runtime.benchmark import BenchTest

    for depth in depths:
        yield from (BenchTest(n, 0, depth) for n in prompts if n)
        yield from (BenchTest(0, n, depth) for n in gens if n)
        yield from (BenchTest(p, n, depth) for p, n in pairs if p + n)


def _pairs(options: list[str]) -> list[tuple[int, int]]:
    """-pg options as (prompt, generation). Errors: UsageError."""
    pairs = []
    for option in options:
        parts = option.split(",")
        if len(parts) != 2 or not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
            raise UsageError(f"-pg {option}: expected two numbers, as in -pg 512,128")
        pairs.append((int(parts[0]), int(parts[1])))
    return pairs


def _open(spec: str | None, tests: list[BenchTest], loading: dict[str, Any]) -> OpenedModel:
    """Open a model with room for the largest test, which is checked before anything slow."""
    from llmctl.runtime.benchmark import require_context
    from llmctl.runtime.loading import open_model, read_config
    from llmctl.runtime.store import resolve_model

    path = resolve_model(spec, progress=console.progress)
    if spec is None:
        console.info(f"Using {path}")
    trained = read_config(path, loading["family"]).max_position_embeddings
    for test in tests:
        require_context(test, trained)
    return open_model(path, ctx_size=max(test.context_needed for test in tests), **loading)


def _measure(
    name: str | None,
    opened: OpenedModel,
    draft: OpenedDraft | None,
    threads: int | None,
    tests: list[BenchTest],
    counts: list[int],
    warm_up: bool,
    seed: int,
) -> Iterator[tuple[BenchResult, dict[str, Any]]]:
    """Load the model and run its tests, one row each."""
    from llmctl.commands.answer import load_weights
    from llmctl.runtime.benchmark import run_test
    from llmctl.runtime.models.active import active_weights

    model, _ = load_weights(draft.target if draft else opened, threads)
    label = os.path.basename(name or str(opened.checkpoint.path))  # noqa: PTH119 (a name need not be a path)
    active = active_weights(opened.weights)
    for test in tests:
        for count in counts:
            before = model.decoder.expert_counts()
            speculation = draft.load(model) if draft else None
            with console.progress(f"{label} {test.name}", count, unit="run") as bar:
                choices = {"warm_up": warm_up, "seed": seed, "progress": bar.update_to, "speculation": speculation}
                result = run_test(model, test, count, **choices)
            yield result, _row(model, result) | _activity(model, active, before) | _drafting(test, speculation)


def _activity(model: LoadedModel, active: Active, before: list[list[int]]) -> dict[str, Any]:
    """What a token reads, and of a mixture of experts who had how many tokens since `before`, the warm-up counted, layer by
    layer."""
    after = model.decoder.expert_counts()
    tokens = [[new - old for new, old in zip(*layer, strict=True)] for layer in zip(after, before, strict=True)]
    return {"active_params": active.parameters, "active_bytes": active.nbytes, "expert_tokens": tokens or None}


def _drafting(test: BenchTest, speculation: Speculation | None) -> dict[str, Any]:
    """What drafting did in a test, the warm-up counted; people are told on stderr."""
    stats = speculation.stats if speculation else None
    if stats and test.n_gen:
        for line in describe_speculation(stats):
            console.info(f"{test.name}: {line}")
    return {"speculation": stats and speculation_fields(stats)}


def _row(model: LoadedModel, result: BenchResult) -> dict[str, Any]:
    """One result under llama-bench's keys; those that only llama.cpp gives a meaning are left out."""
    from llmctl import __version__
    from llmctl.kernels.kv_types import sides_of
    from llmctl.runtime.benchmark import PREFILL_CHUNK
    from llmctl.runtime.machine import cpu

    checkpoint, ops, test = model.checkpoint, model.ops, result.test
    on_cpu, (type_k, type_v) = ops.device == "cpu", sides_of(model.kv_type)
    return dict.fromkeys(_LLAMA_BENCH_KEYS) | {
        "llmctl_version": __version__,
        "n_gpu_layers": 0 if on_cpu else model.device_layers,
        "flash_attn": 0,
        "embeddings": False,
        "cpu_info": cpu().model,
        "gpu_info": "" if on_cpu else ops.device,
        "backends": ops.name,
        "model_filename": str(checkpoint.path),
        "model_type": _model_type(model),
        "model_size": checkpoint.total_bytes,
        "model_n_params": checkpoint.total_elements,
        "n_batch": PREFILL_CHUNK,
        "n_ubatch": PREFILL_CHUNK,
        "n_threads": ops.threads,
        "type_k": type_k,
        "type_v": type_v,
        "kv_policy": str(model.kv_policy),
        "devices": ops.device,
        "dtype": ops.dtype,
        "activations": model.activations,
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.n_depth,
        "test_time": result.started,
        "avg_ns": result.avg_ns,
        "stddev_ns": result.stddev_ns,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "samples_ns": result.samples_ns,
        "samples_ts": result.samples_ts,
    }


def _model_type(model: LoadedModel | OpenedModel) -> str:
    """Family, size and type of the weights, as llama-bench names a model: llama 135M Q4_1."""
    from llmctl.runtime.checkpoint.file_types import file_type

    checkpoint = model.checkpoint
    stated = getattr(checkpoint, "metadata", {}).get("general.size_label")
    count = checkpoint.total_elements
    counted = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}K"
    return f"{model.config.family} {stated if isinstance(stated, str) else counted} {file_type(checkpoint)}"

"""llmctl run: ask a model once, or chat with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmctl.commands import console
from llmctl.commands import run_options as opt
from llmctl.commands import sampling_options as smp
from llmctl.commands.conversion import ForceOption
from llmctl.commands.draft import DraftOption, NumDraftTokensOption, draft_request
from llmctl.commands.options import (
    ActivationsOption,
    AsOption,
    BackendOption,
    CtxSizeOption,
    DeviceOption,
    DtypeOption,
    GpuLayersOption,
    GpuMemoryOption,
    JsonOption,
    KvBudgetOption,
    KvPolicyOption,
    KvTypeOption,
    QuietOption,
    SeedOption,
    ThreadsOption,
    VerboseOption,
)
from llmctl.commands.session import Request, open_session
from llmctl.errors import ModelNotFoundError, UsageError

DEFAULT_PARALLEL = 8


def run(
    model: opt.RunModelArgument = None,
    words: opt.PromptArgument = None,
    prompt: opt.PromptOption = None,
    file: opt.FileOption = None,
    system: opt.SystemOption = None,
    no_chat: opt.NoChatOption = False,
    chat_template: opt.ChatTemplateOption = None,
    as_family: AsOption = None,
    max_tokens: opt.MaxTokensOption = None,
    num_completions: opt.NumCompletionsOption = None,
    stop: opt.StopOption = None,
    json_schema: opt.JsonSchemaOption = None,
    regex: opt.RegexOption = None,
    grammar: opt.GrammarOption = None,
    temp: smp.TempOption = None,
    top_k: smp.TopKOption = None,
    top_p: smp.TopPOption = None,
    min_p: smp.MinPOption = None,
    typical: smp.TypicalOption = None,
    repeat_penalty: smp.RepeatPenaltyOption = None,
    presence_penalty: smp.PresencePenaltyOption = None,
    frequency_penalty: smp.FrequencyPenaltyOption = None,
    repeat_last_n: smp.RepeatLastNOption = None,
    dry_multiplier: smp.DryMultiplierOption = None,
    dry_base: smp.DryBaseOption = None,
    dry_allowed_length: smp.DryAllowedLengthOption = None,
    dry_penalty_last_n: smp.DryLastNOption = None,
    dry_sequence_breaker: smp.DryBreakerOption = None,
    xtc_probability: smp.XtcProbabilityOption = None,
    xtc_threshold: smp.XtcThresholdOption = None,
    mirostat: smp.MirostatOption = None,
    mirostat_ent: smp.MirostatEntOption = None,
    mirostat_lr: smp.MirostatLrOption = None,
    samplers: smp.SamplersOption = None,
    logit_bias: smp.LogitBiasOption = None,
    ban: smp.BanOption = None,
    seed: SeedOption = None,
    draft: DraftOption = None,
    num_draft_tokens: NumDraftTokensOption = None,
    ctx_size: CtxSizeOption = None,
    threads: ThreadsOption = None,
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
    json_lines: opt.JsonLinesOption = False,
    logprobs: opt.LogprobsOption = None,
    batch: opt.BatchOption = None,
    output: opt.BatchOutputOption = None,
    parallel: opt.ParallelOption = None,
    force: ForceOption = False,
    markdown: opt.MarkdownOption = True,
    thinking: opt.ThinkingOption = "dim",
    overflow: opt.OverflowOption = None,
    prompt_cache: opt.PromptCacheOption = None,
    goes_on: opt.ContinueOption = False,
    preset: opt.PresetOption = None,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Ask a model once, or chat with it.

    With a prompt (an argument, -p, -f, piped stdin) its answer goes to stdout. Without one, on a terminal, a chat begins.
    Options: the command line beats --preset, then LLMCTL_RUN_TOP_K and the like, then llmctl.toml (the project's, then the
    platform's), then what the model's file recommends, then the defaults.
    """
    from llmctl.commands.prompt_input import split_arguments, text_argument, whole_prompt
    from llmctl.commands.structure import structure
    from llmctl.runtime.cache.policy import parse_kv_policy
    from llmctl.runtime.gpu_placement import GpuChoice, parse_gpu_layers

    given = {
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical,
        "repetition_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_window": repeat_last_n,
        "dry_multiplier": dry_multiplier,
        "dry_base": dry_base,
        "dry_allowed_length": dry_allowed_length,
        "dry_window": dry_penalty_last_n,
        "xtc_probability": xtc_probability,
        "xtc_threshold": xtc_threshold,
        "samplers": smp.sampler_order(samplers),
        "seed": seed,
        "max_tokens": None if max_tokens == -1 else max_tokens,
        "logit_bias": smp.biases(logit_bias),
        "num_logprobs": logprobs,
    }
    spec, argument = split_arguments(model, words, prompt)
    request = Request(
        spec=spec,
        system=None if system is None else text_argument(system, "--system"),
        template=_template(chat_template),
        raw=no_chat,
        stop=[text_argument(text, "--stop") for text in stop or []],
        sampling=smp.sampling_values(given, mirostat=mirostat, ent=mirostat_ent, lr=mirostat_lr),
        loading={
            "backend": backend,
            "device": device,
            "dtype": dtype,
            "kv_type": kv_type,
            "activations": activations,
            "ctx_size": ctx_size,
            "family": as_family,
            "kv_policy": parse_kv_policy(kv_policy, kv_budget),
            "gpu": GpuChoice(parse_gpu_layers(gpu_layers), gpu_memory_utilization),
        },
        threads=threads,
        json=json,
        json_lines=json_lines,
        structure=structure(json_schema, regex, grammar),
        banned=[text_argument(text, "--ban") for text in ban or []],
        breakers=smp.breakers(dry_sequence_breaker, is_on=bool(dry_multiplier)),
        draft=draft_request(draft, num_draft_tokens),
        prompt_cache=prompt_cache,
    )
    _check(request)
    if logprobs is not None and not (json or json_lines or batch):
        raise UsageError("--logprobs are a part of --json and --json-lines: add one of them")
    if batch is None and (output or parallel or force):
        raise UsageError(f"{'-o' if output else '--parallel' if parallel else '--force'} is for --batch")
    if num_completions is not None and (batch is not None or json_lines or prompt_cache is not None):
        raise UsageError("--num-completions is for a single prompt, without --batch, --json-lines and --prompt-cache")
    if batch is not None and prompt_cache is not None:
        raise UsageError("--prompt-cache is for a single prompt, not for --batch")
    if batch is not None and (argument is not None or file or json or json_lines):
        raise UsageError(
            "--batch has its prompts in its file and writes JSON lines: leave out the prompt, --json and --json-lines"
        )
    _require_known_model(request, is_lone=model is not None and words is None and prompt is None)
    if batch is not None:
        from llmctl.commands.batch import answer_batch

        answer_batch(open_session(request), batch, output, parallel=parallel or DEFAULT_PARALLEL, force=force)
    else:
        view = {"markdown": markdown, "thinking": thinking, "overflow": overflow, "goes_on": goes_on}
        view["several"] = num_completions or 1
        _dispatch(request, whole_prompt(file, argument), view)


def _dispatch(request: Request, prompt: str | None, view: dict[str, Any]) -> None:
    several = view.pop("several")
    if prompt is None and several > 1:
        raise UsageError("--num-completions is for a single prompt: a chat has one answer a turn")
    if prompt is not None and view["overflow"] is not None:
        raise UsageError("--overflow is for the chat: nothing is left out of a single prompt")
    if prompt is not None and view["goes_on"]:
        raise UsageError("--continue is for the chat: leave out the prompt")
    if prompt is None and request.prompt_cache is not None:
        raise UsageError("--prompt-cache is for a single prompt; a chat is kept with /save, and for --continue")
    if prompt is None and (request.json or request.json_lines or request.raw or not console.is_interactive()):
        raise UsageError(
            "there is no prompt: give one as an argument, with -p or -f, or on stdin"
            + (" (a chat needs stdin and stdout to be a terminal)" if not console.is_interactive() else "")
        )
    session = open_session(request)
    if prompt is None:
        from llmctl.commands.chat import ChatOptions, chat

        chat(session, ChatOptions(**{**view, "overflow": view["overflow"] or "refuse"}))
    elif several > 1:
        from llmctl.commands.several import answer_several

        answer_several(session, prompt, several)
    else:
        from llmctl.commands.one_shot import answer_once

        answer_once(session, prompt)


def _template(path: Path | None) -> str | None:
    from llmctl.commands.prompt_input import read_text

    if path is None:
        return None
    source = read_text(path, "--chat-template")
    if not source.strip():
        raise UsageError(f"--chat-template {path}: the file is empty")
    return source


def _check(request: Request) -> None:
    """Refuse what can be refused before any model is looked for. Errors: UsageError."""
    from llmctl.kernels.backend import choose_compute

    of_model = ("ctx_size", "family", "kv_policy", "gpu")
    choose_compute(**{name: value for name, value in request.loading.items() if name not in of_model})
    for flag, texts in (("--stop", request.stop), ("--ban", request.banned)):
        if "" in texts:
            raise UsageError(f"{flag} needs some text, found an empty one")
    if request.json and request.json_lines:
        raise UsageError("--json and --json-lines exclude each other")
    if request.raw and request.template:
        raise UsageError("--no-chat uses no template: leave out --chat-template")
    if request.raw and request.system is not None:
        raise UsageError("--no-chat has no system message: leave out --system or write it into the prompt")


def _require_known_model(request: Request, is_lone: bool) -> None:
    """Refuse an unknown model at once, before stdin is read; one that is still to be pulled is known."""
    from llmctl.runtime.store import parse_source, resolve_model

    try:
        resolve_model(request.spec, pull=False)
    except ModelNotFoundError as error:
        if parse_source(request.name) is None:
            is_word = is_lone and request.spec is not None and "/" not in request.spec
            hint = f"; if it is the prompt: -p {request.spec}" if is_word else ""
            raise ModelNotFoundError(f"{error}{hint}") from None

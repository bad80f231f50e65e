"""Options that several commands share, so that a flag means the same everywhere.

Use them as annotations, the default in the signature: `def run(model: ModelArgument = None, seed: SeedOption = None)`.
--quiet and --verbose configure the console by themselves; a command only declares them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from llmctl.commands import console

Backend = Literal["auto", "native", "triton", "reference"]
Device = Literal["auto", "cpu", "cuda"]
Activations = Literal["int8", "float"]
Dtype = Literal["float32", "bfloat16", "float16"]


THREADS_DEFAULT = "OMP_NUM_THREADS, else the physical cores this process may use"


def complete_model(incomplete: str) -> list[str]:
    """Names of the store and of the table that begin like this; the shell itself completes paths."""
    from llmctl.runtime.store import model_names

    return [name for name in model_names() if name.startswith(incomplete)]


def complete_preset(incomplete: str) -> list[str]:
    """Names of presets that begin like this; none where a file is broken."""
    from llmctl.commands.config import preset_names
    from llmctl.errors import LlmctlError

    try:
        return [name for name in preset_names() if name.startswith(incomplete)]
    except (LlmctlError, OSError):
        return []


def _set_quiet(value: bool) -> bool:
    console.configure(quiet=value)
    return value


def _set_verbose(value: bool) -> bool:
    console.configure(verbose=value)
    return value


def known_family(value: str | None) -> str | None:
    """The name of a family as given; UsageError, naming those there are, for any other."""
    if value is not None:
        from llmctl.runtime.models.registry import family_by_name

        family_by_name(value)
    return value


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A path (.gguf, folder, shard index), a store name, hf:owner/name[:file or TYPE] or pypi:package. "
        "Without it: LLMCTL_MODEL, else smollm2.",
        autocompletion=complete_model,
        show_default=False,
    ),
]
AsOption = Annotated[
    str | None,
    typer.Option(
        "--as",
        metavar="FAMILY",
        callback=known_family,
        help="Take the model for one of this family, whatever it says it is.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", callback=_set_quiet, help="Keep stderr to warnings and errors.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", callback=_set_verbose, help="Say on stderr what was used and what it took.")
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", "-t", min=1, help="CPU threads.", show_default=THREADS_DEFAULT),
]
CtxSizeOption = Annotated[
    int | None,
    typer.Option("--ctx-size", "-c", min=1, help="Context length in tokens.", show_default="the model's own"),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the model runs. auto: on CUDA where torch sees it.")]
BackendOption = Annotated[
    Backend,
    typer.Option(
        "--backend",
        help="Which kernels compute: C++ ones on a CPU, Triton's on a GPU, or the reference in torch. auto: the first that fits.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        case_sensitive=False,
        help="Number type the triton and reference backends compute in; native: float32 only.",
        show_default="triton bfloat16, else float32",
    ),
]
KV_TYPE_SYNTAX = "f16|bf16|q8_0|q5_1|q4_0|fp8|f32 or k=TYPE,v=TYPE"
KvTypeOption = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar=KV_TYPE_SYNTAX,
        help="What the KV cache is kept in; keys and values may differ.",
        show_default="native bf16 where the processor multiplies it, else f16; triton bf16; reference f32",
    ),
]
KvPolicyOption = Annotated[
    str | None,
    typer.Option(
        "--kv-policy",
        metavar="full|sliding|sinks|snapkv",
        help="Which tokens the KV cache keeps: all; the last ones; the first 4 and the last ones; or of every prompt those its "
        "last 32 tokens look at, for each head. Layers with a window of their own keep that.",
        show_default="full",
    ),
]
KvBudgetOption = Annotated[
    str | None,
    typer.Option(
        "--kv-budget",
        metavar="N|RATIO",
        help="How many --kv-policy keeps: tokens, or a share such as 0.25, of each prompt (snapkv) or of the context "
        "(sliding, sinks).",
        show_default=False,
    ),
]
ActivationsOption = Annotated[
    Activations | None,
    typer.Option(
        "--activations",
        case_sensitive=False,
        help="What the native and triton backends multiply quantized weights with: int8 is fast, float exact.",
        show_default="int8",
    ),
]
GpuLayersOption = Annotated[
    str | None,
    typer.Option(
        "--gpu-layers",
        metavar="N|auto",
        help="How many of the last layers go to the GPU; the CPU computes the others. auto: all, or as many as fit.",
        show_default="auto",
    ),
]
GpuMemoryOption = Annotated[
    float,
    typer.Option("--gpu-memory-utilization", help="Share of the GPU's memory to use: the cache takes what weights leave."),
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of the sampler: same seed, same text.", show_default="random"),
]

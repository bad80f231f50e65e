"""Which implementation serves: backends by name, what each can be asked for, and what it can do on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.kv_types import KV_TYPES, parse_kv_type
from llmctl.kernels.native import instruction_set, why_missing
from llmctl.kernels.ops import Ops

BACKENDS = ("native", "reference")
AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("int8", "float")
_USUAL_KV_TYPES = {"native": "f16", "reference": "f32"}
MOST_THREADS = max(256, os.cpu_count() or 1)
"""A thread pool that cannot be made ends the process: OpenMP aborts, with no error to catch."""
MAX_HEAD_DIM = 576
"""Of the native backend."""
_WEIGHT_OPS = ("linear", "head_linear", "embedding", "moe")
_PLAIN_OPS = ("rms_norm", "layer_norm", "rotary", "activation", "gated_activation")
_CACHE_OPS = ("store_kv", "attention")


@dataclass(frozen=True)
class Compute:
    """How a model is computed, nothing left open. activations: None where the backend has no such choice. fallback: why the
    native backend, which auto would have chosen, cannot be had."""

    backend: str
    device: str
    dtype: str
    kv_type: str
    activations: str | None = None
    fallback: str | None = None


@dataclass(frozen=True)
class Capability:
    """One op of one backend: the formats it reads, whether it can run here, and why not if it cannot."""

    op: str
    backend: str
    formats: tuple[str, ...]
    available: bool
    reason: str


def choose_compute(
    backend: str = AUTO,
    device: str = "cpu",
    dtype: str = "float32",
    kv_type: str | None = None,
    activations: str | None = None,
) -> Compute:
    """Settle what was left open. "auto": the native backend on a CPU; where it cannot be had, or on another device, the
    reference.

    Errors: UsageError for what a backend does not have, or a backend that is not there.
    """
    if backend not in (AUTO, *BACKENDS):
        raise UsageError(f"unknown backend {backend!r}; expected {AUTO} or one of {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    chosen, fallback = _choose_backend(backend, device)
    kv_type = default_kv_type(chosen) if kv_type is None else parse_kv_type(kv_type)
    if chosen == "native":
        return Compute(chosen, device, _native_dtype(dtype), kv_type, _native_activations(activations))
    if activations is not None:
        raise UsageError(f"--activations {activations}: the {chosen} backend has no such choice, only native has")
    return Compute(chosen, device, dtype, kv_type, fallback=fallback)


def default_kv_type(backend: str) -> str:
    """The cache type of those who ask for none: that of the backend, but bf16 where the machine multiplies it, which reads a
    long prompt two to three times as fast and is as close to float32 as int8 activations let anyone see."""
    if backend == "native" and instruction_set().endswith(("(amx)", "(avx512bf16)")):
        return "bf16"
    return _USUAL_KV_TYPES[backend]


def _choose_backend(backend: str, device: str) -> tuple[str, str | None]:
    """One of BACKENDS that can be used on the device, and why it is not the native one where that was wanted."""
    if backend == "reference" or (backend == AUTO and device != "cpu"):
        return "reference", None
    if device != "cpu":
        raise UsageError(f"the native backend computes on the CPU, not on {device}: --backend reference does")
    missing = why_missing()
    if missing is None:
        instruction_set()  # what LLMCTL_ISA says is settled now
        return "native", None
    if backend == "native":
        raise UsageError(f"--backend native: {missing}")
    return "reference", missing


def _native_dtype(dtype: str) -> str:
    if dtype != "float32":
        raise UsageError(f"the native backend computes in float32: --dtype {dtype} needs --backend reference")
    return dtype


def _native_activations(activations: str | None) -> str:
    if activations not in (None, *ACTIVATIONS):
        raise UsageError(f"unknown activations {activations!r}; expected one of {', '.join(ACTIVATIONS)}")
    return activations or ACTIVATIONS[0]


def fit_head_dim(compute: Compute, head_dim: int, *choices: str | None) -> Compute:
    """The same, or the reference where the backend's attention lacks heads of that size and was chosen by "auto".

    choices: those that `choose_compute` made it of. UnsupportedError where the user asked for the backend.
    """
    if compute.backend != "native" or head_dim <= MAX_HEAD_DIM:
        return compute
    reason = f"the native backend has attention for heads of 1 to {MAX_HEAD_DIM} numbers, this model's have {head_dim}"
    if choices[:1] == ("native",):
        raise UnsupportedError(f"{reason}: --backend reference computes it")
    return replace(choose_compute("reference", *choices[1:]), fallback=reason)


def make_ops(compute: Compute, threads: int) -> Ops:
    """The op-set of a backend. UsageError for too many threads, UnsupportedError if the device is not there."""
    if not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"the number of threads must be 1 to {MOST_THREADS} on this machine, found {threads}")
    if compute.backend == "native":
        from llmctl.kernels._native import NativeOps

        return NativeOps(threads, compute.activations)
    from llmctl.kernels._reference import ReferenceOps

    return ReferenceOps(compute.device, compute.dtype, threads)


def capabilities() -> list[Capability]:
    """Op × backend × format, without importing torch."""
    torch = find_spec("torch") is not None
    return [
        *_table("native", ("F32",), *_native_state()),
        *_table("reference", ("F32", "F16", "BF16"), torch, "torch on CPU or CUDA" if torch else "torch is not installed"),
    ]


def _native_state() -> tuple[bool, str]:
    """Whether the native backend can be used, and on what or why not."""
    missing = why_missing()
    if missing is not None:
        return False, missing
    try:
        return True, f"C++ on the CPU, {instruction_set()}"
    except UsageError as error:
        return False, str(error)


def _table(backend: str, numbers: tuple[str, ...], available: bool, reason: str) -> list[Capability]:
    """The rows of one backend. numbers: what it computes in."""
    weights = tuple(name for name, f in FORMATS.items() if not (f.is_plain and name.startswith("I")))
    pages = tuple(name.upper() for name in KV_TYPES)
    formats = dict.fromkeys(_WEIGHT_OPS, weights) | dict.fromkeys(_PLAIN_OPS, numbers) | dict.fromkeys(_CACHE_OPS, pages)
    return [Capability(op, backend, names, available, reason) for op, names in formats.items()]

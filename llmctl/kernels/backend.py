"""Which implementation serves: backends by name, what each can be asked for, and what it can do on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llmctl.errors import UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.kv_types import KV_TYPES, parse_kv_type, sides_of
from llmctl.kernels.native import instruction_set, why_missing
from llmctl.kernels.ops import Ops
from llmctl.kernels.split import SplitOps

BACKENDS = ("native", "triton", "reference")
AUTO = "auto"
DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("int8", "float")
_USUAL_KV_TYPES = {"native": "f16", "triton": "bf16", "reference": "f32"}
_USUAL_DTYPES = {"native": "float32", "triton": "bfloat16", "reference": "float32"}
TRITON_KV_TYPES = ("f32", "f16", "bf16", "q8_0", "fp8")
LEAST_CAPABILITY = (8, 0)
"""Of a GPU whose kernels are compiled and checked; older ones have no bfloat16."""
MOST_THREADS = max(256, os.cpu_count() or 1)
"""A thread pool that cannot be made ends the process: OpenMP aborts, with no error to catch."""
MAX_HEAD_DIM = 576
"""Of the native and the triton backend."""
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is that of Linux under Windows
_WEIGHT_OPS = ("linear", "head_linear", "embedding", "moe")
_PLAIN_OPS = ("rms_norm", "layer_norm", "rotary", "activation", "gated_activation")
_CACHE_OPS = ("store_kv", "attention")


@dataclass(frozen=True)
class Compute:
    """How a model is computed, nothing left open. activations: None where the backend has no such choice. fallback: why the
    native or the triton backend, which auto would have chosen, cannot be had. gpu_layers: so many last layers are the triton
    backend's, the ones before them the native one's; None for all on one."""

    backend: str
    device: str
    dtype: str
    kv_type: str
    activations: str | None = None
    fallback: str | None = None
    gpu_layers: int | None = None


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
    dtype: str | None = None,
    kv_type: str | None = None,
    activations: str | None = None,
) -> Compute:
    """Settle what was left open. Device "auto": CUDA where torch sees it. Backend "auto": native on a CPU, triton on CUDA; where
    that cannot be had the reference. dtype: None for the backend's own.

    Errors: UsageError for what a backend does not have, or a backend that is not there.
    """
    if backend not in (AUTO, *BACKENDS):
        raise UsageError(f"unknown backend {backend!r}; expected {AUTO} or one of {', '.join(BACKENDS)}")
    if dtype not in (None, *DTYPES):
        raise UsageError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    device = _choose_device(backend, device)
    chosen, fallback = _choose_backend(backend, device)
    kv_type = kv_type and parse_kv_type(kv_type)
    if chosen == "triton" and (reason := _why_not_kept(kv_type)):
        if backend == "triton":
            raise UsageError(reason)
        chosen, fallback = "reference", reason
    kv_type, dtype = kv_type or default_kv_type(chosen), dtype or default_dtype(chosen)
    if chosen == "reference":
        if activations is not None:
            raise UsageError(f"--activations {activations}: the reference backend has no such choice, native and triton have")
        return Compute(chosen, device, dtype, kv_type, fallback=fallback)
    dtype = _native_dtype(dtype) if chosen == "native" else dtype
    return Compute(chosen, device, dtype, kv_type, _known_activations(activations))


def _why_not_kept(kv_type: str | None) -> str | None:
    """Why the triton backend's cache is not kept in this type."""
    if kv_type is None or {*sides_of(kv_type)} <= {*TRITON_KV_TYPES}:
        return None
    return f"--kv-type {kv_type}: the triton backend keeps {', '.join(TRITON_KV_TYPES)}; native and reference keep it"


def _choose_device(backend: str, device: str) -> str:
    """One of DEVICES. Looks at CUDA only where a driver is loaded: that takes torch."""
    if device not in (AUTO, *DEVICES):
        raise UsageError(f"unknown device {device!r}; expected {AUTO} or one of {', '.join(DEVICES)}")
    if device != AUTO:
        return device
    return "cuda" if backend != "native" and not interprets_triton() and sees_cuda() else "cpu"


def torch_device(device: str) -> str:
    """One of DEVICES for work that plain torch does. Errors: UsageError for CUDA that torch does not see."""
    found = _choose_device("reference", device)
    _check_cuda(found)
    return found


def _check_cuda(device: str) -> None:
    """UsageError for CUDA that torch does not see, wherever its driver may be."""
    if device == "cuda" and not _cuda_devices():
        raise UsageError("--device cuda: torch sees no CUDA device; llmctl doctor --deep tells what it sees")


def sees_cuda() -> bool:
    """Whether there is a CUDA device torch can use; torch is imported only where a driver is loaded."""
    return any(Path(path).exists() for path in _DRIVERS) and bool(_cuda_devices())


def _cuda_devices() -> list[Any]:
    """What torch sees; none where it is not installed."""
    if find_spec("torch") is None:
        return []
    from llmctl.kernels._reference_devices import cuda_devices

    return cuda_devices()


def interprets_triton() -> bool:
    """Whether Triton kernels run in triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def default_kv_type(backend: str) -> str:
    """The cache type of those who ask for none: that of the backend, but bf16 where the machine multiplies it, which reads a
    long prompt two to three times as fast and is as close to float32 as int8 activations let anyone see."""
    backend = backend.rpartition("+")[2]
    if backend == "native" and instruction_set().endswith(("(amx)", "(avx512bf16)")):
        return "bf16"
    return _USUAL_KV_TYPES[backend]


def default_dtype(backend: str) -> str:
    """What a backend computes in for those who ask for nothing; of two (native+triton) the second, which makes the logits."""
    return _USUAL_DTYPES[backend.rpartition("+")[2]]


def _choose_backend(backend: str, device: str) -> tuple[str, str | None]:
    """One of BACKENDS that can be used on the device, and why it is not the one that auto would take."""
    if backend == "reference":
        _check_cuda(device)
        return "reference", None
    if backend == "triton" or (backend == AUTO and device != "cpu"):
        reason = _why_no_triton(device)
        if reason is not None and backend == "triton":
            raise UsageError(f"--backend triton: {reason}")
        return ("reference" if reason else "triton"), reason
    if device != "cpu":
        raise UsageError(f"the native backend computes on the CPU, not on {device}: --backend triton and reference do")
    missing = why_missing()
    if missing is None:
        instruction_set()  # what LLMCTL_ISA says is settled now
        return "native", None
    if backend == "native":
        raise UsageError(f"--backend native: {missing}")
    return "reference", missing


def _why_no_triton(device: str) -> str | None:
    """Why the triton backend cannot be used on a device, None where it can. Asks CUDA, where one is meant."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if device == "cpu":
        return None if interprets_triton() else "it computes on CUDA devices; TRITON_INTERPRET=1 lets it run on a CPU, to test it"
    if interprets_triton():
        return "TRITON_INTERPRET=1 is set: its kernels run on the CPU"
    _check_cuda(device)
    first, least = _cuda_devices()[0], ".".join(map(str, LEAST_CAPABILITY))
    if tuple(map(int, first.compute_capability.split("."))) >= LEAST_CAPABILITY:
        return None
    return f"{first.name} has compute capability {first.compute_capability}, {least} is needed"


def _native_dtype(dtype: str) -> str:
    if dtype != "float32":
        raise UsageError(f"the native backend computes in float32: --dtype {dtype} needs --backend triton or reference")
    return dtype


def _known_activations(activations: str | None) -> str:
    if activations not in (None, *ACTIVATIONS):
        raise UsageError(f"unknown activations {activations!r}; expected one of {', '.join(ACTIVATIONS)}")
    return activations or ACTIVATIONS[0]


def fit_head_dim(compute: Compute, head_dim: int, *choices: str | None) -> Compute:
    """The same, or the reference where the backend's attention lacks heads of that size and was chosen by "auto".

    choices: those that `choose_compute` made it of. UnsupportedError where the user asked for the backend.
    """
    if compute.backend == "reference" or head_dim <= MAX_HEAD_DIM:
        return compute
    reason = f"the {compute.backend} backend has attention for heads of 1 to {MAX_HEAD_DIM} numbers, this model's have {head_dim}"
    if choices[:1] == (compute.backend,):
        raise UnsupportedError(f"{reason}: --backend reference computes it")
    return replace(choose_compute("reference", *choices[1:]), fallback=reason)


def make_ops(compute: Compute, threads: int) -> Ops:
    """The op-set of a backend. UsageError for too many threads, UnsupportedError if the device is not there."""
    if not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"the number of threads must be 1 to {MOST_THREADS} on this machine, found {threads}")
    if compute.backend == "native":
        from llmctl.kernels._native import NativeOps

        return NativeOps(threads, compute.activations)
    if compute.backend == "triton":
        from llmctl.kernels._triton import TritonOps

        return TritonOps(compute.device, compute.dtype, threads, compute.activations)
    from llmctl.kernels._reference import ReferenceOps

    return ReferenceOps(compute.device, compute.dtype, threads)


def make_split_ops(compute: Compute, threads: int, num_layers: int) -> SplitOps:
    """Native for the first layers, the compute's own backend for the last `gpu_layers`. UsageError where native cannot be had."""
    assert compute.gpu_layers is not None
    if (missing := why_missing()) is not None:
        raise UsageError(f"--gpu-layers: the other layers need the native backend: {missing}")
    host = replace(compute, backend="native", device="cpu", dtype=default_dtype("native"))
    return SplitOps(make_ops(host, threads), make_ops(compute, threads), num_layers - compute.gpu_layers)


def capabilities() -> list[Capability]:
    """Op × backend × format, without importing torch."""
    torch = find_spec("torch") is not None
    return [
        *_table("native", ("F32",), *_native_state()),
        *_table("triton", ("F32", "F16", "BF16"), *_triton_state(), TRITON_KV_TYPES),
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


def _triton_state() -> tuple[bool, str]:
    """Whether the triton backend could be used as far as can be seen without torch, and on what or why not."""
    if find_spec("triton") is None or find_spec("torch") is None:
        return False, "triton or torch is not installed"
    if interprets_triton():
        return True, "interpreted on the CPU (TRITON_INTERPRET=1), to test it"
    if not any(Path(path).exists() for path in _DRIVERS):
        return False, "no NVIDIA driver is loaded"
    return True, "on CUDA; a format without a kernel of its own is converted when it is loaded"


def _table(
    backend: str, numbers: tuple[str, ...], available: bool, reason: str, kv_types: tuple[str, ...] = KV_TYPES
) -> list[Capability]:
    """The rows of one backend. numbers: what it computes in. kv_types: what its pages are kept in."""
    weights = tuple(name for name, f in FORMATS.items() if not (f.is_plain and name.startswith("I")))
    pages = tuple(name.upper() for name in kv_types)
    formats = dict.fromkeys(_WEIGHT_OPS, weights) | dict.fromkeys(_PLAIN_OPS, numbers) | dict.fromkeys(_CACHE_OPS, pages)
    return [Capability(op, backend, names, available, reason) for op, names in formats.items()]

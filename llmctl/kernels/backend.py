"""Which implementation serves: backends by name, and what each can do on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec

from llmctl.errors import UsageError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.ops import Ops

BACKENDS = ("reference",)
DTYPES = ("float32", "bfloat16", "float16")
KV_TYPES = ("f32", "f16", "bf16")
MOST_THREADS = max(256, os.cpu_count() or 1)
"""A thread pool that cannot be made ends the process: OpenMP aborts, with no error to catch."""
_WEIGHT_OPS = ("linear", "embedding")
_PLAIN_OPS = ("rms_norm", "rotary", "gated_activation", "store_kv", "attention")


@dataclass(frozen=True)
class Capability:
    """One op of one backend: the formats it reads, whether it can run here, and why not if it cannot."""

    op: str
    backend: str
    formats: tuple[str, ...]
    available: bool
    reason: str


def make_ops(backend: str, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> Ops:
    """The op-set of a backend. UsageError for an unknown name or dtype or too many threads, UnsupportedError if the device is
    not there."""
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}; this build has: {', '.join(BACKENDS)}")
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"the number of threads must be 1 to {MOST_THREADS} on this machine, found {threads}")
    from llmctl.kernels._reference import ReferenceOps

    return ReferenceOps(device, dtype, threads)


def capabilities() -> list[Capability]:
    """Op × backend × format, without importing torch."""
    available = find_spec("torch") is not None
    reason = "torch on CPU or CUDA" if available else "torch is not installed"
    weights = tuple(name for name, f in FORMATS.items() if not (f.is_plain and name.startswith("I")))
    formats = {**dict.fromkeys(_WEIGHT_OPS, weights), **dict.fromkeys(_PLAIN_OPS, ("F32", "F16", "BF16"))}
    return [Capability(op, "reference", names, available, reason) for op, names in formats.items()]

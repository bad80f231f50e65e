"""What this machine is: processor, memory and devices, read from the system without any heavy import."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

_ISA_FLAGS = (
    *("sse4_2", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
_NO_LIMIT = 1 << 60  # what cgroup v1 states where there is none is about 2^63


@dataclass(frozen=True)
class Cpu:
    """Model name, usable logical cores (affinity respected), all logical cores, and the instruction sets that kernels
    choose by, as Linux names them."""

    model: str
    usable_cores: int
    cores: int
    isa: tuple[str, ...]


@dataclass(frozen=True)
class Memory:
    """Bytes: of the machine, available now, and the container's limit (None without one). None where unknown."""

    total: int | None
    available: int | None
    limit: int | None


def cpu() -> Cpu:
    """The processor of this machine."""
    info = _read("/proc/cpuinfo")
    flags = (
        set(_field(info, "flags|Features").split()) if info else set(_sysctl("machdep.cpu.features").lower().split())
    )
    name = _field(info, "model name|Model") or _sysctl("machdep.cpu.brand_string") or platform.processor()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    isa = tuple(flag for flag in _ISA_FLAGS if flag in flags)
    return Cpu(name or platform.machine(), usable, os.cpu_count() or usable, isa)


def memory() -> Memory:
    """The memory of this machine and what a container leaves of it."""
    info = _read("/proc/meminfo")
    total = _kilobytes(info, "MemTotal") or int(_sysctl("hw.memsize") or 0) or None
    return Memory(total, _kilobytes(info, "MemAvailable"), _cgroup_limit())


def peak_memory() -> int | None:
    """Most bytes this process has held in the main memory so far; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def nvidia_driver() -> str | None:
    """Version of the loaded NVIDIA kernel driver, None without one. Whether a device can be used only CUDA knows."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _read("/proc/driver/nvidia/version"))
    return found[1] if found else None


def _cgroup_limit() -> int | None:
    """The smallest memory limit of this process's control group, version 2 or 1."""
    limits = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += [_read(f"/sys/fs/cgroup{base}/memory.max") for base in ("", path)]
        elif "memory" in controllers.split(","):
            limits += [_read(f"/sys/fs/cgroup/memory{base}/memory.limit_in_bytes") for base in ("", path)]
    numbers = [int(limit) for limit in limits if limit.strip().isdigit()]
    return min((number for number in numbers if number < _NO_LIMIT), default=None)


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text("utf-8", "replace")
    return ""


def _field(text: str, names: str) -> str:
    found = re.search(rf"^(?:{names})\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _kilobytes(text: str, name: str) -> int | None:
    number = _field(text, name).split()
    return int(number[0]) * 1024 if number else None


def _sysctl(name: str) -> str:
    """A macOS kernel value; empty elsewhere."""
    if platform.system() != "Darwin":
        return ""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip()

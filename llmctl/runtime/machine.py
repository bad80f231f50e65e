"""What this machine is: processor, memory and devices, read from the system without any heavy import."""

from __future__ import annotations

import contextlib
import ctypes
import math
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
    """Model name, usable logical cores (affinity respected), the physical ones among them, the cores' worth of time that a
    container may use (None: all), all logical cores, and the instruction sets that kernels choose by, as Linux names them."""

    model: str
    usable_cores: int
    physical_cores: int
    quota: float | None
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
    usable = _usable_cores()
    isa = tuple(flag for flag in _ISA_FLAGS if flag in flags)
    cores = os.cpu_count() or len(usable)
    return Cpu(name or platform.machine(), len(usable), _physical_cores(usable), _cpu_quota(), cores, isa)


def default_threads() -> int:
    """Threads for computing: OMP_NUM_THREADS, else a thread for every physical core that this process may use, but no more
    than the container's share of time feeds."""
    stated = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if stated.isascii() and stated.isdigit() and int(stated):
        return int(stated)
    quota = _cpu_quota()
    cores = _physical_cores(_usable_cores())
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def memory() -> Memory:
    """The memory of this machine and what a container leaves of it."""
    info = _read("/proc/meminfo")
    total = _kilobytes(info, "MemTotal") or int(_sysctl("hw.memsize") or 0) or None
    return Memory(total, _kilobytes(info, "MemAvailable"), _cgroup_limit())


def return_free_memory() -> None:
    """Give what the C library holds but nobody uses back to the system; threads that come and go leave it scattered. Nothing
    happens where the library has no such call (it is glibc's)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_memory() -> int | None:
    """Most bytes this process has held in the main memory so far; None where the system does not tell.

    Linux is asked for the program's own peak: what `getrusage` tells there counts that of the process that started it, too.
    """
    if own := _kilobytes(_read("/proc/self/status"), "VmHWM"):
        return own
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


def _usable_cores() -> set[int]:
    """Logical cores this process may run on; on systems without affinity, all."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _physical_cores(logical: set[int]) -> int:
    """How many cores these logical ones belong to; the fast ones of a Mac."""
    if fast := _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu"):
        return int(fast)
    topology = "/sys/devices/system/cpu/cpu{}/topology/{}_list"
    siblings = {
        _read(topology.format(core, "core_cpus")) or _read(topology.format(core, "thread_siblings")) or str(core)
        for core in logical
    }
    return len(siblings)


def _cgroup_limit() -> int | None:
    """The smallest memory limit of this process's control group, version 2 or 1."""
    limits = [_read(f"{folder}/memory.max") for folder in _cgroup_folders("")]
    limits += [_read(f"{folder}/memory.limit_in_bytes") for folder in _cgroup_folders("memory")]
    numbers = [int(limit) for limit in limits if limit.strip().isdigit()]
    return min((number for number in numbers if number < _NO_LIMIT), default=None)


def _cpu_quota() -> float | None:
    """The fewest cores' worth of time that this process's control group and those above it grant."""
    limits = [_read(f"{folder}/cpu.max").split() for folder in _cgroup_folders("")]
    for folder in _cgroup_folders("cpu"):
        limits.append([_read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")])
    shares = [int(limit[0]) / int(limit[1]) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min((share for share in shares if share > 0), default=None)


def _cgroup_folders(controller: str) -> list[str]:
    """The folders of this process's control group and of those above it; controller "": those of version 2."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            parts = [part for part in path.split("/") if part]
            root = f"/sys/fs/cgroup/{controller}".rstrip("/")
            return ["/".join([root, *parts[:length]]) for length in range(len(parts) + 1)]
    return []


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

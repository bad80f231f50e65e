"""Reading what other machines would tell."""

from __future__ import annotations

import pytest

from llmctl.runtime import machine

ARM = "processor\t: 0\nFeatures\t: fp asimd asimdhp asimddp i8mm bf16 sve\nCPU part\t: 0xd40\n"
X86 = "model name\t: Some CPU\nflags\t\t: fpu avx2 fma avx512f amx_int8\n"


def pretend(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: files.get(path, ""))


def test_instruction_sets_of_both_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"/proc/cpuinfo": X86})
    assert (machine.cpu().model, machine.cpu().isa) == ("Some CPU", ("avx2", "fma", "avx512f", "amx_int8"))
    pretend(monkeypatch, {"/proc/cpuinfo": ARM})
    assert machine.cpu().isa == ("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve")
    assert machine.cpu().model


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"}, None),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/memory.max": "1048576\n"}, 1 << 20),
        (
            {
                "/proc/self/cgroup": "4:cpu,memory:/a\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2097152\n",
            },
            2 << 20,
        ),
    ],
)
def test_the_memory_limit_of_a_container(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], limit: int | None
) -> None:
    pretend(monkeypatch, {"/proc/meminfo": "MemTotal: 4 kB\nMemAvailable: 3 kB\n", **files})
    assert machine.memory() == machine.Memory(4096, 3072, limit)


@pytest.mark.parametrize(
    ("files", "quota", "threads"),
    [
        ({}, None, 4),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, None, 4),
        ({"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/cpu.max": "150000 100000\n"}, 1.5, 2),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "20000 100000\n"}, 0.2, 1),
        ({"/proc/self/cgroup": "0::/a\n", "/sys/fs/cgroup/a/cpu.max": "900000 100000\n"}, 9.0, 4),
        (
            {
                "/proc/self/cgroup": "4:cpu,cpuacct:/a\n0::/\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "/sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            3.0,
            3,
        ),
    ],
)
def test_threads_are_no_more_than_a_container_may_use(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], quota: float | None, threads: int
) -> None:
    pretend(monkeypatch, files)
    monkeypatch.setattr(machine, "_usable_cores", lambda: {0, 1, 2, 3})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert (machine.cpu().quota, machine.default_threads()) == (quota, threads)


def test_threads_of_one_core_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = {core: f"{core % 4},{core % 4 + 4}" for core in range(8)}
    topology = "/sys/devices/system/cpu/cpu{}/topology/core_cpus_list"
    pretend(monkeypatch, {topology.format(core): pair for core, pair in pairs.items()})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for usable, expected in (({*range(8)}, 4), ({0, 4, 1}, 2), ({6}, 1)):
        monkeypatch.setattr(machine, "_usable_cores", lambda usable=usable: usable)
        assert machine.default_threads() == machine.cpu().physical_cores == expected


@pytest.mark.parametrize(("stated", "expected"), [("3", 3), ("5,2", 5), ("0", 2), ("", 2), ("many", 2), ("-1", 2)])
def test_omp_num_threads_is_heeded(monkeypatch: pytest.MonkeyPatch, stated: str, expected: int) -> None:
    pretend(monkeypatch, {})
    monkeypatch.setattr(machine, "_usable_cores", lambda: {0, 1})
    monkeypatch.setenv("OMP_NUM_THREADS", stated)
    assert machine.default_threads() == expected


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    pretend(monkeypatch, {"/proc/driver/nvidia/version": line})
    assert machine.nvidia_driver() == "580.95.05"
    pretend(monkeypatch, {})
    assert machine.nvidia_driver() is None


def test_the_peak_of_this_process_only_grows() -> None:
    before = machine.peak_memory()
    held = b"x" * (64 << 20)
    after = machine.peak_memory()
    assert before is not None
    assert after is not None
    assert after >= before > 1 << 20
    assert after >= len(held)

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

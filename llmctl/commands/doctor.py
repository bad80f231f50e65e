"""llmctl doctor: what this machine has, and which op of which backend reads which format on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmctl.commands import console
from llmctl.commands.options import JsonOption, QuietOption

if TYPE_CHECKING:
    from pathlib import Path


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Import torch and ask it for CUDA devices (takes seconds).")
    ] = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show what this machine has: processor, memory, store, packages, and op × backend × format."""
    report = _report(deep)
    if json:
        console.print_json(report)
    else:
        _print(report)


def _report(deep: bool) -> dict[str, Any]:
    from llmctl.kernels.backend import capabilities
    from llmctl.runtime.machine import cpu, default_threads, memory, nvidia_driver

    return {
        "llmctl": _version("llmctl"),
        **_system(),
        "cpu": asdict(cpu()),
        "default_threads": default_threads(),
        "memory_bytes": asdict(memory()),
        "store": _store(),
        "nvidia_driver": nvidia_driver(),
        **(_torch() if deep else {"cuda_devices": None, "torch_error": None}),
        "packages": {name: _version(name) for name in _requirements()},
        "capabilities": [asdict(capability) for capability in capabilities()],
    }


def _system() -> dict[str, str]:
    import platform
    import sys

    return {"python": platform.python_version(), "executable": sys.executable, "platform": platform.platform()}


def _store() -> dict[str, Any]:
    import shutil

    from llmctl.runtime.store import list_models, store_folder

    folder = store_folder()
    return {
        "folder": folder,
        "models": len(list_models()),
        "free_bytes": shutil.disk_usage(_existing(folder)).free,
    }


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists: its disk is the one that would be written to."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _torch() -> dict[str, Any]:
    """What torch itself sees. A torch that cannot be imported is a finding, not a failure of doctor."""
    try:
        from llmctl.kernels._reference_devices import cuda_devices

        return {"cuda_devices": [asdict(device) for device in cuda_devices()], "torch_error": None}
    except (ImportError, OSError, RuntimeError) as error:
        return {"cuda_devices": None, "torch_error": console.one_line(f"{type(error).__name__}: {error}")}


def _requirements() -> list[str]:
    """Names of the packages llmctl depends on, as its metadata states them (extras left out)."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        stated = [line for line in requires("llmctl") or [] if "extra ==" not in line]
    except PackageNotFoundError:  # run from a source tree that is not installed
        return []
    return [match[0] for line in stated if (match := re.match(r"[\w.-]+", line))]


def _version(package: str) -> str | None:
    """The installed version, without importing the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(report: dict[str, Any]) -> None:
    rows = _machine_rows(report)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.result(f"{name:<{width}}  {value}")
    console.result()
    lines = [
        (c["op"], c["backend"], "yes" if c["available"] else "no", " ".join(c["formats"]))
        for c in report["capabilities"]
    ]
    console.table(("OP", "BACKEND", "HERE", "FORMATS"), lines)


def _machine_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory, store = report["cpu"], report["memory_bytes"], report["store"]
    limit = f", limit {console.format_bytes(memory['limit'])}" if memory["limit"] else ""
    return [
        ("llmctl", f"{report['llmctl'] or 'not installed as a package'}"),
        ("python", f"{report['python']} ({report['executable']})"),
        ("platform", report["platform"]),
        ("cpu", f"{cpu['model']}, {cpu['usable_cores']} of {cpu['cores']} cores usable"),
        ("threads", f"{report['default_threads']} unless -t says otherwise ({_describe_cores(cpu)})"),
        ("isa", " ".join(cpu["isa"]) or "none that kernels choose by"),
        ("memory", f"{_size(memory['total'])}, {_size(memory['available'])} available{limit}"),
        ("store", f"{store['folder']}, models: {store['models']}, {_size(store['free_bytes'])} free"),
        ("nvidia", f"driver {report['nvidia_driver']}" if report["nvidia_driver"] else "no driver loaded"),
        ("cuda", _describe_cuda(report["cuda_devices"], report["torch_error"])),
        *_backend_rows(report["capabilities"]),
        ("packages", ", ".join(f"{name} {version or 'missing'}" for name, version in report["packages"].items())),
    ]


def _backend_rows(capabilities: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What serves each backend here, or why it cannot be used."""
    found = {c["backend"]: ("" if c["available"] else "no: ") + c["reason"] for c in capabilities}
    return [(backend, console.one_line(reason)) for backend, reason in found.items()]


def _describe_cores(cpu: dict[str, Any]) -> str:
    quota = "" if cpu["quota"] is None else f", a container's share of {cpu['quota']:g} cores"
    return f"physical cores: {cpu['physical_cores']}{quota}"


def _describe_cuda(devices: list[dict[str, Any]] | None, failure: str | None) -> str:
    if failure:
        return f"torch cannot be used: {failure}"
    if devices is None:
        return "not asked (--deep imports torch and asks it)"
    described = [f"{d['index']}: {d['name']} (sm_{d['compute_capability']}, {_size(d['memory'])})" for d in devices]
    return ", ".join(described) or "torch sees no device"


def _size(count: int | None) -> str:
    return "unknown" if count is None else console.format_bytes(count)

"""Kernels compiled for GPUs that are not here, and what the compiled code takes: registers, spills, shared memory, instructions.

Every `_triton*.py` lists its kernels in `kernel_cases()`. A kernel that is interpreted cannot be compiled: the process
must not have TRITON_INTERPRET set.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from llmctl.kernels.triton_lib.launch import interpreting

ARCHITECTURES = (80, 90, 89)
SHARED_LIMITS = {80: 166_912, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that a block of threads may have: triton compiles a kernel that wants more, its launch fails."""
TABLE = Path(__file__).with_name("resources.json")
_READING = 1
"""Raised when the same code would be counted differently: what was kept of earlier compilations counts no more."""
_THREADS_PER_WARP = 32


@dataclass(frozen=True)
class Case:
    """One kernel in one configuration.

    name               "linear.decode.Q4_K.m1", unique
    kernel             the function that triton.jit made
    types              argument → "*fp16", "*i32", "i32", "fp32" …; those absent are constants
    constants          the constexpr arguments
    aligned            arguments divisible by 16
    archs              for which GPUs, 90 for compute capability 9.0
    weights_per_loop   weights that one thread handles in one turn of the hot loop
    most_per_weight    instructions a weight may take there
    every_commit       False: only checked with --all-kernels
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    archs: tuple[int, ...] = (80, 90)
    weights_per_loop: int | None = None
    most_per_weight: float | None = None
    every_commit: bool = True


@dataclass(frozen=True)
class Resources:
    """What one thread of a compiled kernel takes. spills: bytes stored and loaded; shared: bytes of a block of threads;
    per_weight: instructions in one turn of the hot loop for each weight it handles, where the case says how many."""

    registers: int
    spills: int
    shared: int
    per_weight: float | None = None


def kernel_cases() -> list[Case]:
    """The kernels of all folders. Errors: ValueError where two have one name."""
    cases = [case for module in _modules() for case in module.kernel_cases()]
    twice = sorted({case.name for case in cases if sum(other.name == case.name for other in cases) > 1})
    if twice:
        raise ValueError(f"kernels share a name: {', '.join(twice)}")
    return cases


def _modules() -> Iterator[Any]:
    """Every module beside a contract that lists kernels."""
    root = Path(__file__).parents[1]
    for path in sorted([*root.glob("_triton*.py"), *root.glob("*/_triton*.py")]):
        module = importlib.import_module(".".join(("llmctl.kernels", *path.relative_to(root).with_suffix("").parts)))
        if hasattr(module, "kernel_cases") and module.kernel_cases.__module__ == module.__name__:
            yield module


def compile_case(case: Case, arch: int, cache: Path | None = None) -> Resources:
    """Compile for one GPU. cache: a folder in which results are kept by what was compiled.

    Errors: ValueError in a process that interprets; what triton raises for a kernel that does not compile.
    """
    if interpreting():
        raise ValueError("kernels cannot be compiled in a process that interprets them: unset TRITON_INTERPRET")
    source = _source(case)
    kept = cache and cache / f"{_key(case, arch, source)}.json"
    if kept and kept.exists():
        return Resources(**json.loads(kept.read_text("utf-8")))
    found = _compile(case, arch, source)
    if kept:
        cache.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(asdict(found)), "utf-8")
    return found


def complaints(case: Case, arch: int, found: Resources, table: dict[str, Any]) -> list[str]:
    """What is wrong with a compiled kernel: against the limits of the GPU and of the case, and against the table."""
    name = row_name(case, arch)
    limits = {"spills": 0, "shared": SHARED_LIMITS[arch], "per_weight": case.most_per_weight}
    wrong = [
        f"{name}: {field} {value}, at most {limits[field]} allowed"
        for field, value in asdict(found).items()
        if limits.get(field) is not None and (value is None or value > limits[field])
    ]
    if table["triton"] != triton.__version__:
        return wrong  # another compiler: its registers are its own
    before = table["kernels"].get(name)
    if before is None:
        return [*wrong, f"{name} is not in {TABLE.name}: scripts/compile_kernels.py --record"]
    worse = [key for key in ("registers", "shared", "per_weight") if _is_worse(getattr(found, key), before.get(key))]
    hint = "(if it must be: scripts/compile_kernels.py --record)"
    return [*wrong, *(f"{name}: {key} {before[key]} became {getattr(found, key)} {hint}" for key in worse)]


def _is_worse(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and now > before


def row_name(case: Case, arch: int) -> str:
    """A kernel's name in the table."""
    return f"{case.name} sm_{arch}"


def read_table() -> dict[str, Any]:
    """The table in the repository: the triton it was made with and, of every kernel and GPU, its resources."""
    return json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {"triton": triton.__version__, "kernels": {}}


def write_table(rows: dict[str, Resources]) -> None:
    """Replace it, one line a kernel."""
    lines = [f'    "{name}": {json.dumps(_row(found))}' for name, found in sorted(rows.items())]
    text = f'{{\n  "triton": "{triton.__version__}",\n  "kernels": {{\n' + ",\n".join(lines) + "\n  }\n}\n"
    TABLE.write_text(text, "utf-8")


def _row(found: Resources) -> dict[str, Any]:
    return {field.name: value for field in fields(found) if (value := getattr(found, field.name)) is not None}


def _source(case: Case) -> ASTSource:
    names = case.kernel.arg_names
    missing = [name for name in names if name not in case.constants and name not in case.types]
    unknown = sorted({*case.constants, *case.types, *case.aligned} - {*names})
    if missing or unknown:
        raise ValueError(f"{case.name}: arguments without a type {missing}, arguments that the kernel does not have {unknown}")
    signature = {name: "constexpr" if name in case.constants else case.types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    return ASTSource(case.kernel, signature, case.constants, attributes)


def _key(case: Case, arch: int, source: ASTSource) -> str:
    parts = (source.hash(), arch, case.num_warps, case.num_stages, case.weights_per_loop, triton.__version__, _READING)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _compile(case: Case, arch: int, source: ASTSource) -> Resources:
    """Compile anew: what ptxas says of registers and spills is told then only."""
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), triton.knobs.compilation.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, _THREADS_PER_WARP), options=options)
    weights = case.weights_per_loop
    per_weight = round(len(hot_loop(compiled.asm["sass"])) / weights, 3) if weights else None
    spills = _number(log.getvalue(), r"(\d+) bytes spill stores") + _number(log.getvalue(), r"(\d+) bytes spill loads")
    return Resources(_number(log.getvalue(), r"Used (\d+) registers"), spills, compiled.metadata.shared, per_weight)


def _number(log: str, pattern: str) -> int:
    found = re.search(pattern, log)
    if found is None:
        raise ValueError(f"ptxas says nothing of {pattern!r}:\n{log}")
    return int(found[1])


def hot_loop(sass: str) -> list[str]:
    """The instructions of the longest loop that has no loop inside; of code without loops none."""
    labels, instructions = {}, []
    for line in map(str.strip, sass.splitlines()):
        if label := re.match(r"\.?(L\w+):", line):
            labels[label[1]] = len(instructions)
        elif line.endswith(";"):
            instructions.append(line.rsplit("\t", 1)[-1])
    loops = []
    for end, text in enumerate(instructions):
        target = re.search(r"\bBRA\b.*?\.?(L\w+)", text)
        if target and labels.get(target[1], end) < end:
            loops.append((labels[target[1]], end))
    inner = [loop for loop in loops if not any(o != loop and loop[0] <= o[0] and o[1] <= loop[1] for o in loops)]
    begin, end = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, -1))
    return instructions[begin : end + 1]

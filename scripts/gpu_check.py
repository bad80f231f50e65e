#!/usr/bin/env python3
"""Everything there is to know about the Triton backend on the GPU at hand, by one command, in under eight minutes.

    python scripts/gpu_check.py [--output build/gpu_check.jsonl] [--seconds 460]
    python scripts/gpu_check.py --dry-run      the same code on tiny shapes, interpreted: no GPU is needed, figures mean nothing

Versions; the kernels compiled in parallel; what the device does at best (copy, read, matrix product, an empty graph);
correctness against float64 with poisoned results and guard bands; a decode step of the shape of an 8B, eager and by graph, at
contexts of 128, 8k and 32k; kernels by graph replay over rotated buffers. Predictions stand beside the results. Rows are written
as they land; the exit code is 1 if one failed. What the time does not allow is left out, and the row says so.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_COMPILE_SECONDS = 90
_PROCESSES = 12
CONTEXTS_8B = (128, 8192, 32768)


def main() -> int:
    """The exit code."""
    choices = _parse()
    if choices.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, which settles it
    from gpu_rows import Report

    report = Report(choices.output, choices.seconds)
    _run(choices, report)
    print(report.table())
    wrong = sum(row.is_wrong for row in report.rows)
    print(f"{len(report.rows)} rows, {wrong} failed; {choices.output}")
    return int(bool(wrong))


def _run(choices: argparse.Namespace, report: Any) -> None:
    import gpu_kernels
    from gpu_decode import SHAPE_8B, SHAPE_TINY, time_decode
    from gpu_timing import CudaTimer, DryTimer, measure_ceilings

    device = "cpu" if choices.dry_run else "cuda"
    report.facts(**_versions(choices.dry_run))
    _compile(choices, report)
    timer = DryTimer() if choices.dry_run else CudaTimer()
    sizes = gpu_kernels.TINY if choices.dry_run else gpu_kernels.Sizes()
    bench = gpu_kernels.Bench(report, timer, device, sizes)
    bench.ceilings = measure_ceilings(timer, device, *((1 << 16, 64) if choices.dry_run else (1 << 30, 8192)))
    report.facts(**{name: round(value, 1) for name, value in vars(bench.ceilings).items()})
    report.facts(compiled_ahead=_compile_ahead(sizes, device))
    gpu_kernels.check_all(bench)
    time_decode(bench, *((SHAPE_TINY, (40,)) if choices.dry_run else (SHAPE_8B, CONTEXTS_8B)))
    gpu_kernels.time_all(bench)


def _versions(is_dry: bool) -> dict[str, Any]:
    import platform

    import numpy
    import torch
    import triton

    found = {"python": platform.python_version()} | {each.__name__: each.__version__ for each in (torch, triton, numpy)}
    if is_dry:
        return found | {"device": "none, interpreted"}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.mem", "--format=csv,noheader"]
    driver = "unknown"
    if shutil.which(query[0]):
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return found | {"device": properties.name, "capability": f"{properties.major}.{properties.minor}", "driver": driver}


def _compile(choices: argparse.Namespace, report: Any) -> None:
    """A row of resources for every kernel; the compiler needs no GPU, but processes that do not interpret."""
    from compile_kernels import chosen, compile_named
    from gpu_rows import Row, failed

    from llmctl.kernels.triton_lib.compilation import row_name

    jobs = chosen(not choices.dry_run, "rms_norm.h128" if choices.dry_run else "", [choices.arch or _arch(choices.dry_run)])
    count, context = max(1, min(len(jobs), os.cpu_count() or 1)), multiprocessing.get_context("spawn")
    with _not_interpreting(), ProcessPoolExecutor(count, mp_context=context) as pool:
        tasks = [pool.submit(compile_named, case.name, arch, choices.cache) for case, arch in jobs]
        for (case, arch), task in zip(jobs, tasks, strict=True):
            name = row_name(case, arch)
            try:
                found = task.result(timeout=_COMPILE_SECONDS)
            except Exception as failure:
                report.add(Row("compiled", name, remark=failed(failure)))
                continue
            remark = "FAILED: spills" if found.spills else ""
            report.add(Row("compiled", name, registers=found.registers, spills=found.spills, remark=remark))


def _compile_ahead(sizes: Any, device: str) -> int:
    """What will be measured is compiled by processes beside each other, into triton's cache. How many products and attentions."""
    from gpu_kernels import compile_part

    if device == "cpu":  # the interpreter compiles nothing: the last of them runs, to see that it does
        return compile_part(sizes, device, 2, 3)
    parts = min(_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
        return sum(pool.map(compile_part, [sizes] * parts, [device] * parts, range(parts), [parts] * parts))


@contextmanager
def _not_interpreting() -> Iterator[None]:
    """Within: processes that are started compile kernels."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def _arch(is_dry: bool) -> int:
    """The one of those that kernels are listed for that is nearest to the device's; 90 in a dry run."""
    if is_dry:
        return 90
    import torch

    capability = torch.cuda.get_device_capability()
    return 90 if capability >= (9, 0) else 89 if capability >= (8, 9) else 80


def _parse() -> argparse.Namespace:
    root = Path(__file__).parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=root / "build" / "gpu_check.jsonl", help="rows, one JSON object a line")
    parser.add_argument("--seconds", type=float, default=460.0, help="after which no further row is begun (460)")
    parser.add_argument("--arch", type=int, help="compile for this compute capability, such as 90, instead of the device's")
    parser.add_argument("--cache", type=Path, default=root / ".cache" / "kernels", help="where compilers' findings are kept")
    parser.add_argument("--dry-run", action="store_true", help="interpreted, on tiny shapes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

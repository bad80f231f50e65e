"""Compile the Triton kernels for GPUs that need not be here, and hold what they take against the table in the repository.

    scripts/compile_kernels.py                       what every commit is tested with
    scripts/compile_kernels.py --all-kernels         every configuration
    scripts/compile_kernels.py --record              write what was found into the table; lines of other kernels stay
    scripts/compile_kernels.py --only linear.decode  names that contain this

One line a kernel: registers, spilled bytes, shared bytes, instructions a weight in the hot loop.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from llmctl.kernels.triton_lib import compilation
from llmctl.kernels.triton_lib.compilation import Case, Resources

CACHE = Path(__file__).parents[1] / ".cache" / "kernels"


def main() -> int:
    """Exit code 1 where a kernel is worse than the table or over a limit, or does not compile."""
    choices = _parse()
    jobs = chosen(choices.all_kernels, choices.only, choices.arch)
    found: dict[str, Resources] = {}
    wrong: list[str] = []
    table = compilation.read_table()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(choices.jobs, mp_context=context) as pool:
        tasks = [pool.submit(compile_named, case.name, arch, choices.cache) for case, arch in jobs]
        for (case, arch), task in zip(jobs, tasks, strict=True):
            name = compilation.row_name(case, arch)
            try:
                found[name] = task.result()
            except Exception as error:  # one kernel's failure is a finding, the others are still wanted
                wrong.append(f"{name} does not compile: {type(error).__name__}: {error}")
                continue
            if not choices.record:
                wrong += compilation.complaints(case, arch, found[name], table)
            print(line(name, found[name]), flush=True)
    if choices.record:
        kept = {name: Resources(**row) for name, row in table["kernels"].items() if name in every_name()}
        compilation.write_table(kept | found)
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


def chosen(all_kernels: bool, only: str, archs: list[int] | None) -> list[tuple[Case, int]]:
    """The kernels and GPUs that these choices ask for."""
    cases = [case for case in compilation.kernel_cases() if (all_kernels or case.every_commit) and only in case.name]
    return [(case, arch) for case in cases for arch in case.archs if not archs or arch in archs]


def every_name() -> set[str]:
    """The table's rows that a kernel stands behind."""
    return {compilation.row_name(case, arch) for case in compilation.kernel_cases() for arch in case.archs}


def compile_named(name: str, arch: int, cache: Path) -> Resources:
    """In a process of its own: kernels do not travel between processes, names do."""
    case = next(case for case in compilation.kernel_cases() if case.name == name)
    return compilation.compile_case(case, arch, cache)


def line(name: str, found: Resources) -> str:
    """One row for people."""
    per_weight = "" if found.per_weight is None else f"  {found.per_weight:.2f} a weight"
    return f"{name:<60} {found.registers:>4} registers {found.spills:>4} spilled {found.shared:>7} shared{per_weight}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all-kernels", action="store_true", help="every configuration")
    parser.add_argument("--record", action="store_true", help="write the table")
    parser.add_argument("--only", default="", help="a part of the kernels' names")
    parser.add_argument("--arch", type=int, nargs="+", choices=compilation.ARCHITECTURES, help="for these GPUs only")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"where results are kept ({CACHE})")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

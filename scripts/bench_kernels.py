#!/usr/bin/env python3
"""The native linear kernels by themselves, one thread, against what the machine can do at best.

    python scripts/bench_kernels.py [--isa avx2] [--formats Q4_0,Q4_K] [--tokens 1,8,512] [--json]

One product of a prepared matrix with TOKENS rows of activations. Up to 8 tokens the matrix is larger than the caches, so that
GB/s of its prepared bytes are to be held against the memory's; beyond that it lies in them, and billions of operations a
second count (a multiplication and an addition are two). The ceilings are measured before every row, by the same thread: one
GiB read, and the kernels' products on numbers in registers. Weights are random bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llmctl.commands.console import format_table
from llmctl.commands.number_list import number_list
from llmctl.errors import LlmctlError, UsageError
from llmctl.kernels.native import why_missing

FORMATS = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "I4", "I8"),
)
_PLAIN = ("F32", "F16", "BF16")
_GROUP = {"I4": 128, "I8": 128}
_COLUMNS = 4096
_ROWS = 1024  # of a matrix that stays in the caches
_FEW_TOKENS = 8


@dataclass(frozen=True)
class Row:
    """One measurement. ceiling: of the figure that bounds this kernel."""

    format: str
    activations: str
    tokens: int
    microseconds: float
    gigabytes_per_s: float
    gigaoperations_per_s: float
    memory_ceiling: float
    operations_ceiling: float

    @property
    def share(self) -> float:
        """Of the ceiling that is nearer."""
        return max(self.gigabytes_per_s / self.memory_ceiling, self.gigaoperations_per_s / self.operations_ceiling)


class Bench:
    """The kernels of one instruction set."""

    def __init__(self, isa: str, mebibytes: int) -> None:
        from llmctl.kernels.native import _native

        self._native, self._isa, self._bytes = _native, isa, mebibytes << 20
        self._reader, self._pool = _native.MemoryReader(1 << 30), _native.ThreadPool(1)

    def measure(self, name: str, tokens: int, int8: bool) -> Row:
        """Time one format with so many tokens."""
        native, group = self._native, _GROUP.get(name, 0)
        rows = self._rows(name) if tokens <= _FEW_TOKENS else _ROWS
        random = np.random.default_rng(0)
        packed = random_bytes(random, native.PackedWeight(name, rows, _COLUMNS, group).nbytes)
        x = random.standard_normal((tokens, _COLUMNS), np.float32)
        memory = self._reader.bytes / min(self._reader.seconds(self._pool) for _ in range(3)) / 1e9
        ceiling = native.peak_operations(self._isa, int8) / 1e9
        seconds = native.time_linear(self._isa, name, packed, rows, _COLUMNS, group, x, int8, repeats=5, calls=1)
        operations = 2 * rows * _COLUMNS * tokens / seconds / 1e9
        kind = "int8" if int8 else "float"
        return Row(name, kind, tokens, seconds * 1e6, len(packed) / seconds / 1e9, operations, memory, ceiling)

    def _rows(self, name: str) -> int:
        """Rows of a matrix of about as many bytes as asked for."""
        tile = self._native.PackedWeight(name, 16, _COLUMNS, _GROUP.get(name, 0)).nbytes
        return 16 * max(1, self._bytes // tile)


def random_bytes(random: np.random.Generator, count: int) -> np.ndarray:
    """Codes and scales of a prepared matrix that are numbers whatever they mean: no byte makes an infinity or a NaN."""
    return np.frombuffer(random.bytes(count), np.uint8) & 0x3F


def chosen(options: argparse.Namespace) -> list[tuple[str, int, bool]]:
    """(format, tokens, int8) of every measurement. Errors: UsageError."""
    names = options.formats.upper().split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        raise UsageError(f"--formats {','.join(unknown)}: known are {', '.join(FORMATS)}")
    counts = number_list([options.tokens], "--tokens", minimum=1)
    kinds = {"int8": [True], "float": [False], "both": [True, False]}[options.activations]
    return [(n, t, k) for n in names for k in kinds for t in counts if not (k and n in _PLAIN)]


def line(row: Row) -> tuple[Any, ...]:
    """A row of the table; each figure beside its ceiling."""
    gigabytes = f"{row.gigabytes_per_s:.1f} / {row.memory_ceiling:.1f}"
    operations = f"{row.gigaoperations_per_s:.0f} / {row.operations_ceiling:.0f}"
    return row.format, row.activations, row.tokens, f"{row.microseconds:.0f}", gigabytes, operations, f"{row.share:.0%}"


def main(arguments: list[str] | None = None) -> int:
    """Measure from the command line and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", help="instruction set; default: the one in use")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default="1,4,8,32,512")
    parser.add_argument("--activations", choices=("int8", "float", "both"), default="int8")
    parser.add_argument("--megabytes", type=int, default=256, help="MiB of the matrix up to 8 tokens (256)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        if missing := why_missing():
            raise UsageError(missing)
        from llmctl.kernels.native import _native

        isas, isa = _native.available_isas(), options.isa or _native.active_isa()
        if isa not in isas:
            raise UsageError(f"--isa {isa}: this machine and build have {', '.join(isas)}")
        plan = chosen(options)
    except LlmctlError as error:
        print(f"bench_kernels: {error}", file=sys.stderr)
        return 1
    bench = Bench(isa, options.megabytes)
    rows = []
    for name, tokens, int8 in plan:
        print(f"{name} × {tokens}", file=sys.stderr, flush=True)
        rows.append(bench.measure(name, tokens, int8))
    if options.json:
        print(json.dumps({"isa": isa, "rows": [{**asdict(row), "share": row.share} for row in rows]}))
    else:
        headers = (isa.upper(), "ACTIVATIONS", "TOKENS", "µs", "GB/S", "GOP/S", "OF THE CEILING")
        print("\n".join(format_table(headers, map(line, rows), right=(2, 3, 4, 5, 6))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

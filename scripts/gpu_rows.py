"""The table of scripts/gpu_check.py: rows as they land, in a file of JSON lines and on the terminal."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmctl.commands.console import format_table


@dataclass(frozen=True)
class Row:
    """One result. error: relative, against float64. gigabytes_per_s or teraflops: whichever bounds the kernel. of_ceiling: its
    share of the ceiling that was measured in the same run. of_torch: times as fast as what torch has. predicted_us: written
    down before."""

    kernel: str
    shape: str
    config: str = ""
    registers: int | None = None
    spills: int | None = None
    error: float | None = None
    microseconds: float | None = None
    gigabytes_per_s: float | None = None
    teraflops: float | None = None
    of_ceiling: float | None = None
    of_torch: float | None = None
    predicted_us: float | None = None
    remark: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it is a failure, of the kernel or of its measurement."""
        return self.remark.startswith("FAILED")


def failed(failure: Exception) -> str:
    """The remark of a row that could not be had."""
    return f"FAILED: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


class Report:
    """Rows go to the file at once: a run that ends early has told what it found. deadline: seconds from now."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.rows: list[Row] = []
        self._path, self._end = path, time.monotonic() + seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", "utf-8")

    @property
    def is_late(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() > self._end

    def facts(self, **facts: Any) -> None:
        """A line of facts, such as versions."""
        self._write(facts)
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)

    def add(self, row: Row) -> None:
        """One more."""
        self.rows.append(row)
        self._write(asdict(row))
        print(_line(row), flush=True)

    def _write(self, values: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value for name, value in values.items() if value not in (None, "")}) + "\n")

    def table(self) -> str:
        """All rows, for people."""
        columns = ("KERNEL", "SHAPE", "CONFIG", "REGS", "SPILL", "ERROR", "US", "RATE", "CEILING", "TORCH", "PREDICTED", "REMARK")
        return "\n".join(format_table(columns, [_cells(row) for row in self.rows]))


def _cells(row: Row) -> tuple[str, ...]:
    rate = "" if row.gigabytes_per_s is None else f"{row.gigabytes_per_s:.0f} GB/s"
    rate = rate if row.teraflops is None else f"{row.teraflops:.1f} TFLOP/s"
    return (
        *(row.kernel, row.shape, row.config, _text(row.registers, "{}"), _text(row.spills, "{}"), _text(row.error, "{:.1e}")),
        *(_text(row.microseconds, "{:.1f}"), rate, _text(row.of_ceiling, "{:.0%}"), _text(row.of_torch, "{:.2f}x")),
        *(_text(row.predicted_us, "{:.1f}"), row.remark),
    )


def _text(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _line(row: Row) -> str:
    return "  ".join(cell for cell in _cells(row) if cell)

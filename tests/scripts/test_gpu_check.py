"""The one script for a GPU, on tiny shapes in the interpreter: all of its sections run, and nothing fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gpu_timing
import pytest
import torch
from gpu_rows import Report, Row

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


def test_a_dry_run_goes_through_everything(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, SCRIPT, "--dry-run", "--output", output, "--cache", SCRIPT.parents[1] / ".cache" / "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    kernels = {row.get("kernel", "").split(".")[0] for row in rows}
    assert kernels == {"", "compiled", "linear", "rms_norm", "attention", "decode"}
    assert "triton" in rows[0]
    measured = [row for row in rows if "microseconds" in row]
    assert all(row["predicted_us"] > 0 and row["of_ceiling"] > 0 for row in measured)
    assert {row["config"] for row in measured if row["kernel"] == "decode.8B"} == {"eager", "graph"}
    assert {"attention.decode.q8_0", "attention.prefill"} <= {row["kernel"] for row in measured}


def test_rows_are_in_the_file_as_they_land_and_a_late_report_says_so(tmp_path: Path) -> None:
    report = Report(tmp_path / "new" / "rows.jsonl", seconds=0.0)
    report.add(Row("linear", "8x8", microseconds=3.0, teraflops=1.5, remark="FAILED: it is wrong"))
    assert json.loads((tmp_path / "new" / "rows.jsonl").read_text("utf-8"))["remark"] == "FAILED: it is wrong"
    assert report.is_late
    assert report.rows[0].is_wrong
    assert "1.5 TFLOP/s" in report.table()


def test_a_timer_tells_the_time_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which every call takes 20 µs, and that tells milliseconds."""
    called, clock = [], [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def record(recorder: object, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        called.clear()
        result, count = run(), len(called)

        def replay() -> None:
            clock[0] += count * 0.020

        return replay, result

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_timing.CudaRecorder, "record", record)
    buffers = [lambda i=i: called.append(i) or torch.zeros(1) for i in range(3)]
    assert gpu_timing.CudaTimer().microseconds(buffers) == pytest.approx(20.0)
    assert called == [i % 3 for i in range(20)], "so many calls that a graph takes 400 µs, over buffers in turns"

"""The table and the sums of bench_quant.py; the tools themselves are run by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from bench_quant import Point, bytes_for, equal_quality, main, plot, split_text, table
from peer_programs import PeerError, run_program


def point(tool: str, type_name: str, nbytes: int, kl: float) -> Point:
    return Point(tool, type_name, nbytes, kl, 2 * kl, 0.9)


POINTS = [
    point("llama.cpp", "Q4_K_M", 100_000_000, 0.04),
    point("llmctl", "Q4_K_M", 100_000_000, 0.02),
    point("llmctl", "Q4_0", 90_000_000, 0.08),
]


def test_a_line_a_file_with_the_ratio_beside_ours() -> None:
    head, first, second, third = table(POINTS)
    assert head.split() == ["TYPE", "TOOL", "MB", "KL", "99", "%", "SAME", "TOP", "RATIO"]
    assert first.split()[:4] == ["Q4_0", "llmctl", "90.0", "0.08000"]
    assert first.split()[-1] == "%"  # llama.cpp has no such file: no ratio
    assert second.split()[:2] == ["Q4_K_M", "llama.cpp"]
    assert third.split()[-1] == "0.500"


def test_types_by_measurement_are_held_against_ours_of_the_same_bytes() -> None:
    lines = table([*POINTS, point("llmctl", "as Q4_K_M", 99_000_000, 0.015)])
    assert lines[2].split()[:3] == ["as", "Q4_K_M", "llmctl"]
    assert lines[2].split()[-1] == "0.750"


def test_the_plot_has_a_line_a_tool_and_falls_to_the_right() -> None:
    fitted = [point("llmctl", "4.5 bpw", 95_000_000, 0.02), point("llmctl", "as Q4_0", 90_000_000, 0.07)]
    root = ElementTree.fromstring(plot([*POINTS, *fitted]))
    name = "{http://www.w3.org/2000/svg}"
    lines = [line.get("points", "").split() for line in root.iter(f"{name}polyline")]
    assert [len(line) for line in lines] == [1, 2, 2]
    (left, high), (right, low) = ([float(x) for x in place.split(",")] for place in lines[1])
    assert left < right
    assert high < low  # a picture's rows count downwards
    words = [text.text for text in root.iter(f"{name}text")]
    assert {"llama.cpp", "llmctl", "llmctl, types by measurement", "Q4_K_M", "90 MB", "0.05"} <= set(words)


def test_a_program_that_is_not_done_in_time_is_said() -> None:
    with pytest.raises(PeerError, match="was not done after 0 s"):
        run_program([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)


def test_bytes_for_the_same_quality_lie_on_the_line_of_logarithms() -> None:
    ours = POINTS[1:]
    assert bytes_for(ours, 0.04) == pytest.approx(95_000_000)
    assert bytes_for(ours, 0.08 / math.sqrt(2)) == pytest.approx(92_500_000)
    assert bytes_for(ours, 0.01) is None
    assert equal_quality(POINTS) == ["as close as llama.cpp's Q4_K_M: 95.0 MB, 0.950 of its bytes"]


def test_a_file_that_is_beaten_in_both_is_not_on_the_line() -> None:
    worse = point("llmctl", "Q4_1", 97_000_000, 0.09)
    assert bytes_for([*POINTS[1:], worse], 0.04) == pytest.approx(95_000_000)


def test_the_text_is_cut_at_a_line(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one line\n" * 100, "utf-8")
    first, second = (path.read_text("utf-8") for path in split_text(text, tmp_path))
    assert first + second == "one line\n" * 100
    assert first.endswith("\n")
    assert abs(len(first) - len(second)) <= 18
    text.write_text("no line")
    with pytest.raises(PeerError, match="no line to cut"):
        split_text(text, tmp_path)


def test_a_program_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("a\n" * 9)
    missing = str(tmp_path / "nothing")
    code = main(["model", "--text", str(tmp_path / "text"), "--out", str(tmp_path / "out"), "--llama-imatrix", missing])
    assert code == 1
    assert "nothing is not a program" in capsys.readouterr().err

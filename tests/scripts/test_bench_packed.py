"""The table of bench_packed.py, and one folder of each method through the command; llm-compressor itself is run by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_packed import Made, main, table
from make_tiny_model import make_tiny_model


def test_plain_rounding_and_the_peer_are_what_is_compared_with() -> None:
    lines = table(
        [
            Made("llmctl", "rtn", "4:64", 0.4, 0.7, None),
            Made("llmctl", "gptq", "4:64", 0.1, 0.8, 12.4),
            Made("llm-compressor", "gptq", "4:64", 0.2, 0.75, 60.0),
            Made("llmctl", "gptq", "4:32", 0.05, 0.9, 9.0),
        ]
    )
    rows = [line.split() for line in lines[1:]]
    assert rows[0] == ["4:64", "rtn", "llmctl", "0.40000", "70.0", "%"]
    assert rows[1][6:] == ["75.0", "%", "0.500", "12"]
    assert rows[2][6:] == ["50.0", "%", "60"]  # of plain rounding too, but not of itself
    assert rows[3][6:] == ["9"]  # nothing of this grid to compare with


def test_folders_are_made_once_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny", "llama", tokenizer="bpe", num_hidden_layers=1, max_position_embeddings=512)
    text = tmp_path / "text"
    text.write_text("A line of text about nothing in particular.\n" * 120, "utf-8")
    command = [str(model), "--text", str(text), "--out", str(tmp_path / "out"), "--grids", "3:32", "--methods", "rtn,gptq"]
    command += ["--chunks", "2", "--eval-chunks", "1", "-t", "1", "--json", str(tmp_path / "found.json")]
    assert main(command) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["method"] for one in found] == ["rtn", "gptq"]
    assert found[1]["kl"] < found[0]["kl"]
    assert all(one["seconds"] > 0 for one in found)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.safetensors")}.items() <= times.items()

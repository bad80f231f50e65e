"""What bench_speculation.py makes of runs, with a tiny model and with llama.cpp's words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench_speculation import Run, llama_cpp, main, predicted
from make_tiny_model import make_tiny_model

from llmctl.runtime.engine.speculation import SpeculationStats


def test_the_prediction_follows_from_the_parts_of_the_run() -> None:
    plain = Run(list(range(101)), seconds=10.0)  # a step takes a tenth of a second
    stats = SpeculationStats(drafted=120, accepted=70, rounds=25, round_tokens=95, plain_steps=5, draft_s=1.5, verify_s=3.0)
    run = Run(list(range(101)), seconds=5.0, stats=stats)
    assert predicted(plain, run) == pytest.approx(10.0 / (1.5 + 3.0 + 0.5))
    assert predicted(plain, Run([1, 2], 1.0, SpeculationStats(plain_steps=5))) is None


def test_a_row_for_every_draft_and_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", tokenizer="bpe", max_position_embeddings=2048)
    options = ["--draft", "ngram", "--draft", "self:Q8_0", "--prompts", "edit", "-n", "8", "-r", "1", "-t", "1"]
    assert main([str(folder), *options]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["draft"], row["prompts"]) for row in rows] == [("ngram", "edit"), ("self:Q8_0", "edit")]
    assert all(row["speedup"] > 0 for row in rows)


def program(path: Path, says: str) -> Path:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


def test_llama_cpps_speeds_are_read_from_what_it_says(tmp_path: Path) -> None:
    speculative = program(tmp_path / "s", "decoded   65 tokens in    1.25 seconds, speed:   52.000 t/s")
    said = "llama_perf:        eval time =    640.00 ms /    63 runs   (   10.16 ms per token,    98.44 tokens per second)"
    completion = program(tmp_path / "c", said)
    args = argparse.Namespace(model="m", tokens=64, threads=1, num_draft_tokens=None)
    assert llama_cpp((speculative, completion), "d", "text", args) == (98.44, 52.0)

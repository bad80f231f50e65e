"""What bench_speculation.py makes of runs, with a tiny model and with llama.cpp's words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench_speculation import Run, draft_options, llama_cpp, main, predicted
from make_tiny_model import make_tiny_model
from peer_programs import PeerError

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


def test_a_useless_draft_is_wrong_each_time_and_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", tokenizer="bpe", max_position_embeddings=2048)
    options = ["--draft", "self:Q8_0", "--useless", "--num-draft-tokens", "2", "-n", "12", "-r", "1", "-t", "1"]
    assert main([str(folder), *options]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (row["accepted"], row["tokens_per_step"]) == (0, 1)
    assert row["drafted"] > 100
    assert row["lost"] == pytest.approx(1 / row["speedup"] - 1)


def program(path: Path, says: str, help_text: str = "") -> Path:
    """Says the one or the other, and notes what it was asked."""
    helps = f"if [ $1 = --help ]; then echo '{help_text}'; exit; fi"
    path.write_text(f"#!/bin/sh\n{helps}\necho \"$@\" >> {path}.asked\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("help_text", "asked"),
    [
        ("--draft, --draft-max N\n--draft-min N", "--draft-max 3 --draft-min 0 --draft-p-min 0.0"),
        ("--spec-draft-n-max N\n--draft-max N removed", "--spec-type draft-simple --spec-draft-n-max 3 --spec-draft-n-min 0"),
    ],
)
def test_llama_cpps_speeds_are_read_from_what_it_says(tmp_path: Path, help_text: str, asked: str) -> None:
    says = "decoded   65 tokens in    1.25 seconds, speed:   52.000 t/s\nI accept    = 80.000%"
    speculative = program(tmp_path / "s", says, help_text)
    said = "llama_perf:        eval time =    640.00 ms /    63 runs   (   10.16 ms per token,    98.44 tokens per second)"
    completion = program(tmp_path / "c", said)
    args = argparse.Namespace(model="m", tokens=64, threads=1, num_draft_tokens=3)
    assert llama_cpp((speculative, completion), "d", "text", args) == (98.44, 52.0, 0.8)
    assert asked in (tmp_path / "s.asked").read_text()


def test_a_program_that_cannot_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="names neither"):
        draft_options(program(tmp_path / "s", "", "--other"), 3)
    completion, args = program(tmp_path / "c", "nothing"), argparse.Namespace(model="m", tokens=4, threads=1, num_draft_tokens=3)
    with pytest.raises(PeerError, match="printed no"):
        llama_cpp((tmp_path / "s", completion), "d", "text", args)

"""What bench_chat.py measures, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench_chat import main, open_chat, time_turn
from make_tiny_model import make_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_model(tmp_path_factory.mktemp("chat") / "model", "llama", tokenizer="bpe", max_position_embeddings=4096)
    stated = made / "tokenizer_config.json"
    stated.write_text(json.dumps({**json.loads(stated.read_text("utf-8")), "chat_template": TEMPLATE}), "utf-8")
    return made


def test_only_the_new_turn_is_computed(folder: Path) -> None:
    chat = open_chat(folder, 1, 600)
    row = time_turn(chat, "And then?")
    assert row["history_tokens"] > 500
    assert 0 < row["new_tokens"] <= row["computed_tokens"] < row["new_tokens"] + 64
    assert row["first_token_ms"] > 0
    assert row["ratio"] == pytest.approx(row["first_token_ms"] / (row["decode_step_ms"] + row["prefill_ms"]))


@pytest.mark.skipif(sys.platform == "win32", reason="reads the first byte of a pipe")
def test_both_lines_are_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), "--history", "300", "-r", "2", "-t", "1"]) == 0
    chat, process = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (chat["measured"], process["measured"]) == ("chat", "process")
    assert chat["ratio_range"][0] <= chat["ratio"] <= chat["ratio_range"][1]
    assert 0 < process["first_byte_s"] <= process["first_byte_range_s"][1]

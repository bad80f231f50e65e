"""Calibration text: what becomes of files, folders, lines and conversations; no padding, nothing lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from llmctl.errors import ChatTemplateError, FormatError, ModelNotFoundError, UsageError
from llmctl.quant.calibration import BUILT_IN, Calibration, read_calibration
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"


@pytest.fixture
def tokenizer(tiny: Callable[..., Path]) -> Tokenizer:
    return load_tokenizer(open_checkpoint(tiny("llama")))


def read(source: Path | None, tokenizer: Tokenizer, **choices: int) -> Calibration:
    return read_calibration(source, tokenizer, **{"num_samples": 1000, "row_length": 8, "seed": 0, **choices})


def lines(path: Path, *values: object) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n\n", "utf-8")
    return path


def test_short_rows_are_kept_and_long_ones_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Rows of 3 and 5 tokens and one of 20: statistics see 28 tokens, none of them padding."""
    ids = tokenizer.encode("the quick brown fox jumps over the lazy dog and then some more text " * 3, add_special=False)
    texts = [tokenizer.decode(ids[:count]) for count in (3, 5, 20)]
    expected = [tokenizer.encode(text) for text in texts]
    found = read(lines(tmp_path / "rows.jsonl", *texts), tokenizer)
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos else []
    joined, wanted = (list(chain.from_iterable(row[len(begin) :] for row in rows)) for rows in (found.rows, expected))
    assert joined == wanted
    assert max(map(len, found.rows)) <= 8
    assert all(row[: len(begin)] == begin for row in found.rows)
    assert found.num_tokens == sum(map(len, found.rows))
    assert found.documents == 3


def test_a_text_is_one_document(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text.txt"
    path.write_text("\ufeffone two three four five six seven eight nine ten\n\neleven twelve", "utf-8")
    found = read(path, tokenizer, row_length=4)
    assert found.documents == 1
    assert "\ufeff" not in tokenizer.decode(found.rows[0])
    assert {len(row) for row in found.rows[:-1]} == {4}


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "b.txt").write_text("beta", "utf-8")
    (tmp_path / "deep").mkdir()
    lines(tmp_path / "deep" / "c.jsonl", {"text": "gamma"})
    (tmp_path / "a.md").write_text("alpha", "utf-8")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    found = read(tmp_path, tokenizer, row_length=100)
    assert [tokenizer.decode(row).strip() for row in found.rows] == ["alpha", "beta", "gamma"]


@pytest.mark.parametrize(
    "value",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}],
    ],
    ids=["messages", "sharegpt", "list"],
)
def test_conversations_are_written_by_the_template(tmp_path: Path, tokenizer: Tokenizer, value: object) -> None:
    tokenizer.chat_templates = {"default": TEMPLATE}
    found = read(lines(tmp_path / "chat.jsonl", value), tokenizer, row_length=100)
    assert tokenizer.decode(found.rows[0]).strip() == "<user>Hi<assistant>Yes"


def test_a_conversation_without_a_template_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.chat_templates = {}
    path = lines(tmp_path / "chat.jsonl", {"text": "fine"}, {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(ChatTemplateError, match=r"chat.jsonl, line 2: this model has no chat template"):
        read(path, tokenizer)


def test_the_seed_decides_which_rows_are_taken(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = lines(tmp_path / "many.jsonl", *(f"number {i}" for i in range(60)))
    all_rows = read(path, tokenizer, row_length=100).rows
    first, again, other = (
        read(path, tokenizer, row_length=100, num_samples=20, seed=seed, num_held_out=5) for seed in (1, 1, 2)
    )
    assert first.rows == again.rows != other.rows
    assert first.digest == again.digest != other.digest
    places = [all_rows.index(row) for row in first.rows]
    assert places == sorted(places)
    assert len(places) == 20


def test_held_out_rows_are_of_the_same_text_and_were_not_used(tokenizer: Tokenizer) -> None:
    found = read(None, tokenizer, row_length=64, num_samples=50, num_held_out=8)
    assert len(found.held_out) == 8
    assert {len(row) for row in found.held_out} == {64}
    assert not any(row in found.rows for row in found.held_out)
    assert found.name == BUILT_IN


def test_the_built_in_set_is_large_enough_for_the_defaults(tokenizer: Tokenizer) -> None:
    found = read(None, tokenizer, row_length=512, num_samples=128)
    assert len(found.rows) == 128
    assert found.num_tokens > 65_000


@pytest.mark.parametrize(
    ("name", "data", "error", "message"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": ', FormatError, r"bad.jsonl, line 2: is no JSON"),
        ("keys.jsonl", b'{"question": 1}', FormatError, r"line 1: expected an object with one of .* found .*question"),
        ("latin.txt", b"caf\xe9", FormatError, r"latin.txt: is not UTF-8 text \(byte 3\)"),
        ("empty.txt", b" \n", UsageError, r"empty.txt: there is no text to calibrate with"),
        (None, b"", ModelNotFoundError, r"missing.txt: there is no such file or folder"),
    ],
)
def test_what_is_no_text_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, name: str | None, data: bytes, error: type[Exception], message: str
) -> None:
    path = tmp_path / (name or "missing.txt")
    if name:
        path.write_bytes(data)
    with pytest.raises(error, match=message):
        read(path, tokenizer)


def test_a_folder_without_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelNotFoundError, match=r"the folder has no \.txt, \.md, \.jsonl, \.ndjson files"):
        read(tmp_path, tokenizer)

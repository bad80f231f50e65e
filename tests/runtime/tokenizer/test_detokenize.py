"""A stream shows what the whole text is, at once and no later than it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer import StreamingDetokenizer, Tokenizer, load_tokenizer


@pytest.fixture(scope="module", params=["llama-spm", "gpt-2"])
def tokenizer(request: pytest.FixtureRequest, vocabulary: Callable[[str], GgufCheckpoint]) -> Tokenizer:
    return load_tokenizer(vocabulary(request.param))


def pieces(*tokens: bytes, strip_space: bool) -> list[str]:
    """What is shown after each token, and at the end."""
    stream = StreamingDetokenizer(lambda token_id: tokens[token_id], strip_space=strip_space)
    return [*map(stream.push, range(len(tokens))), stream.flush()]


def test_one_space_at_the_beginning_is_dropped_once() -> None:
    assert pieces(b" ", b" lead", b" x", strip_space=True) == ["", " lead", " x", ""]
    assert pieces(b" in the", strip_space=True) == ["in the", ""]
    assert pieces(b"", b" in", b" the", strip_space=True) == ["", "in", " the", ""]
    assert pieces(b"a", b" in", strip_space=True) == ["a", " in", ""]
    assert pieces(b" in", strip_space=False) == [" in", ""]


def test_case_21_through_a_sentencepiece_vocabulary(vocabulary: Callable[[str], GgufCheckpoint]) -> None:
    tokenizer = load_tokenizer(vocabulary("llama-spm"))
    index = {tokenizer.token_text(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    for texts in (["▁", "▁lead", "▁x"], ["▁in", "▁the"], ["▁", "▁", "▁"], ["x"]):
        ids = [index[text] for text in texts]
        stream = tokenizer.stream()
        joined = "".join([*map(stream.push, ids), stream.flush()])
        assert joined == tokenizer.decode(ids) == "".join(texts).replace("▁", " ").removeprefix(" ")
    unstripped = tokenizer.stream(strip_space=False)
    assert unstripped.push(index["▁the"]) == " the"


def test_a_character_is_shown_with_its_last_byte() -> None:
    assert pieces(b"\xe2", b"\x82", b"\xac!", strip_space=False) == ["", "", "€!", ""]
    assert pieces(b"a\xf0\x9f", b"\x98\x80", strip_space=False) == ["a", "😀", ""]


def test_what_stays_incomplete_is_replaced() -> None:
    assert pieces(b"a", b"\xf0\x9f", strip_space=False) == ["a", "", "\ufffd"]
    assert pieces(b"\xf0", b"'", strip_space=False) == ["", "\ufffd'", ""]
    assert pieces(b"\xff", b"a", strip_space=False) == ["\ufffd", "a", ""]


@given(st.lists(st.binary(max_size=5)), st.booleans())
def test_joined_stream_is_the_whole_for_any_bytes(tokens: list[bytes], strip_space: bool) -> None:
    whole = b"".join(tokens)
    expected = (whole.removeprefix(b" ") if strip_space else whole).decode("utf-8", "replace")
    assert "".join(pieces(*tokens, strip_space=strip_space)) == expected


@given(st.data())
def test_joined_stream_is_decode_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    for skip_special in (False, True):
        stream = tokenizer.stream(skip_special=skip_special)
        assert "".join([*map(stream.push, ids), stream.flush()]) == tokenizer.decode(ids, skip_special=skip_special)


@given(st.text())
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    plain = text.replace("▁", " ") if tokenizer.token_text(263) == "▁a" else text  # to SentencePiece they are the same
    assert tokenizer.decode(ids) == plain
    assert not any(map(tokenizer.is_control, ids[len(ids) - len(tokenizer.encode(text, add_special=False)) :]))


def test_special_tokens_are_left_out_of_the_middle_of_a_character() -> None:
    parts = {0: b"\xe2\x82", 1: b"", 2: b"\xac"}
    stream = StreamingDetokenizer(parts.__getitem__, strip_space=False)
    assert "".join([*map(stream.push, [0, 1, 2]), stream.flush()]) == "€"

"""What the metadata of a GGUF file says about a tokenizer, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.runtime.checkpoint.string_array import StringArray
from llmctl.runtime.tokenizer import Tokenizer
from llmctl.runtime.tokenizer.gguf_source import content_parts, describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


def bpe(*special: tuple[str, int], **keys: Any) -> dict[str, Any]:
    """Letters, two merges, then the special tokens (from id 7 on)."""
    tokens = ["a", "b", "c", "Ġ", "ab", "abc", "Ġab", *(text for text, _ in special)]
    types = [NORMAL] * 7 + [kind for _, kind in special]
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array(types, np.int32),
        "merges": ["a b", "ab c", "Ġ ab"],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | keys).items() if value is not None}


def spm(*pieces: tuple[str, float, int], **keys: Any) -> dict[str, Any]:
    """Unknown, BOS, EOS, a few pieces, then those given (from id 8 on)."""
    fixed = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL), ("▁", -9, NORMAL), ("a", -9, NORMAL)]
    fixed += [("b", -9, NORMAL), ("ab", -1, NORMAL), ("▁ab", -2, NORMAL), *pieces]
    base = {
        "model": "llama",
        "tokens": [text for text, _, _ in fixed],
        "scores": np.array([score for _, score, _ in fixed], np.float32),
        "token_type": np.array([kind for _, _, kind in fixed], np.int32),
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (base | keys).items() if value is not None}


def made(metadata: dict[str, Any], **options: Any) -> Tokenizer:
    return build_tokenizer(describe_gguf(metadata, **options))


def test_merges_and_words() -> None:
    tokenizer = made(bpe())
    assert tokenizer.encode("abc ab") == [5, 6]
    assert tokenizer.encode("cab") == [2, 4]
    assert tokenizer.encode("") == []
    assert tokenizer.decode([5, 6]) == "abc ab"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.unk_token_id) == (None, (), None)


def test_letters_without_a_token_leave_nothing() -> None:
    assert made(bpe()).encode("cxa") == [2, 0]
    assert made(bpe()).encode("axb") == [4]  # as the `tokenizers` library does: the letter might as well not be there


def test_the_reader_s_own_arrays_and_plain_lists_mean_the_same() -> None:
    plain, lazy = bpe(), bpe()
    for name in ("tokens", "merges"):
        lazy[f"tokenizer.ggml.{name}"] = StringArray.encode(plain[f"tokenizer.ggml.{name}"])
    assert made(lazy).encode("abc ab") == made(plain).encode("abc ab") == [5, 6]
    del plain["tokenizer.ggml.token_type"]
    assert made(plain).encode("abc ab") == [5, 6]


@pytest.mark.parametrize("kind", [CONTROL, UNKNOWN])
def test_special_tokens_in_text(kind: int) -> None:
    tokenizer = made(bpe(("abc", kind), merges=["a b"]))
    assert tokenizer.encode("abc") == [4, 2]
    assert tokenizer.encode("abcab", parse_special=True) == [7, 4]
    assert tokenizer.decode([7, 4]) == "ab"
    assert tokenizer.is_control(7)
    assert not tokenizer.is_control(5)


def test_bos_and_eos_flags() -> None:
    special = [("<s>", CONTROL), ("</s>", CONTROL)]
    ids = {"bos_token_id": 7, "eos_token_id": 8}
    assert made(bpe(*special, **ids)).encode("a") == [0]
    assert made(bpe(*special, **ids, add_bos_token=True)).encode("a") == [7, 0]
    both = made(bpe(*special, **ids, add_bos_token=True, add_eos_token=True))
    assert both.encode("a") == [7, 0, 8]
    assert both.encode("a", add_special=False) == [0]
    assert both.encode("<s>a", parse_special=True) == [7, 0, 8]
    assert (both.add_bos, both.add_eos) == (True, True)
    assert both.named_special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert made(bpe(*special, **ids, pre="llama-bpe")).encode("a") == [7, 0]  # what the rule implies
    assert made(bpe(*special, **ids, pre="llama-bpe", add_bos_token=False)).encode("a") == [0]
    assert made(bpe(add_bos_token=True)).encode("a") == [0]  # there is none to add


def test_ignore_merges_comes_with_the_rule() -> None:
    assert made(bpe(merges=["b c"], tokens=["a", "b", "c", "Ġ", "bc", "abc", "x"])).encode("abc") == [0, 4]
    assert made(bpe(merges=["b c"], tokens=["a", "b", "c", "Ġ", "bc", "abc", "x"], pre="llama-bpe")).encode("abc") == [5]


def test_end_tokens_are_a_union() -> None:
    special = [("<s>", CONTROL), ("</s>", CONTROL), ("<eot>", CONTROL), ("<eom>", CONTROL), ("<|im_end|>", CONTROL)]
    tokenizer = made(bpe(*special, eos_token_id=8, eot_token_id=9, eom_token_id=10))
    assert tokenizer.eos_token_ids == (8, 9, 10, 11)


def test_end_of_turn_typed_as_text_is_a_control_token_all_the_same() -> None:
    for kind in (NORMAL, USER):
        tokenizer = made(bpe(("<|im_end|>", kind), ("<tool>", USER)))
        assert tokenizer.eos_token_ids == (7,)
        assert tokenizer.encode("a<|im_end|>") == [0]
        assert tokenizer.encode("a<|im_end|><tool>", parse_special=True) == [0, 7, 8]
        assert tokenizer.encode("<tool>") == [8]


def test_end_of_message_does_not_end_a_harmony_answer() -> None:
    harmony = [("<|end|>", CONTROL), ("<|return|>", CONTROL), ("<|call|>", CONTROL)]
    assert made(bpe(*harmony)).eos_token_ids == (8, 9)
    assert made(bpe(*harmony, eos_token_id=7)).eos_token_ids == (7, 8, 9)
    assert made(bpe(harmony[0])).eos_token_ids == (7,)


def test_special_ids_out_of_range_are_ignored_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = made(bpe(bos_token_id=7, eos_token_id=True, padding_token_id="x"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (None, (), None)
    assert caplog.text.count("which is none of the 7 tokens: ignored") == 3


def test_a_missing_rule_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert made(bpe(pre=None)).encode("abc ab") == [5, 6]
    assert "names no pre-tokenizer rule" in caplog.text


def test_the_rule_can_be_overridden() -> None:
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer rule 'odd'"):
        made(bpe(pre="odd"))
    assert made(bpe(pre="odd"), pre="gpt-2").encode("abc ab") == [5, 6]


def test_raw_bpe_writes_spaces_as_markers() -> None:
    tokens = ["<s>", "a", "▁", "▁a", "\n", "\n\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = np.array([CONTROL] + [NORMAL] * 5 + [BYTE] * 256, np.int32)
    keys = {"tokens": tokens, "token_type": types, "merges": ["▁ a", "\n \n"], "model": "gemma4", "pre": None, "bos_token_id": 0}
    tokenizer = made(bpe(**keys))
    assert tokenizer.encode("a a\n\né") == [0, 1, 3, 5, 6 + 0xC3, 6 + 0xA9]
    assert tokenizer.decode([0, 1, 3, 5, 6 + 0xC3, 6 + 0xA9]) == "a a\n\né"


def test_templates() -> None:
    keys = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B", "tokenizer.chat_templates": ["tool_use"]}
    assert made(bpe() | keys).chat_templates == {"default": "A", "tool_use": "B"}


def test_sentencepiece_defaults() -> None:
    tokenizer = made(spm())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.unk_token_id) == (1, (2,), 0)
    assert tokenizer.encode("ab") == [1, 7]
    assert tokenizer.encode("ab", add_special=False) == [7]
    assert made(spm(add_space_prefix=False)).encode("ab") == [1, 6]
    assert made(spm(add_bos_token=False, add_eos_token=True)).encode("ab") == [7, 2]
    assert tokenizer.encode("a?!b", add_special=False) == [3, 4, 0, 5]  # a run of unknown characters is one
    other = spm(token_type=np.full(8, NORMAL, np.int32))
    assert (made(other).bos_token_id, made(other).eos_token_ids) == (None, ())


def test_sentencepiece_user_defined_pieces() -> None:
    tokenizer = made(spm(("  ", 0, USER), ("<t>", 0, USER), add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("ab  ab") == [6, 8, 6]
    assert tokenizer.encode("a b") == [4, 3, 5]
    assert tokenizer.decode([6, 8, 6]) == "ab  ab"
    assert tokenizer.token_bytes(8) == b"  "
    spaced = made(spm(("<t>", 0, USER), add_bos_token=False))
    assert spaced.encode("ab<t>ab") == [7, 8, 7]  # each stretch of text has its own space


def test_higher_score_first_then_leftmost() -> None:
    pieces = [("c", -9, NORMAL), ("bc", -0.5, NORMAL), ("ca", -0.5, NORMAL)]
    tokenizer = made(spm(*pieces, add_space_prefix=False, add_bos_token=False))
    assert tokenizer.encode("abc") == [4, 9]
    assert tokenizer.encode("bca") == [9, 4]
    assert tokenizer.encode("cabc") == [10, 9]


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", "hybriddna", "whitespace"])
def test_other_kinds_are_refused_by_name(model: str) -> None:
    with pytest.raises(UnsupportedError, match=f"tokenizer.ggml.model is '{model}'; supported are"):
        describe_gguf(bpe(model=model))


@pytest.mark.parametrize("model", ["none", "no_vocab", None])
def test_no_tokenizer(model: str | None) -> None:
    with pytest.raises(UnsupportedError, match="carries no tokenizer"):
        describe_gguf(bpe(model=model))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe(tokens=None), "tokens is missing or empty"),
        (bpe(tokens=[]), "tokens is missing or empty"),
        (bpe(merges=None), "merges is missing"),
        (bpe(merges=["ab"]), "merges holds b'ab', which is no pair"),
        (bpe(merges=["a "]), "merges holds b'a ', which is no pair"),
        (bpe(merges=["a x"]), "needs the token b'x', which is not in the vocabulary"),
        (bpe(merges=["b a"]), "needs the token b'ba', which is not in the vocabulary"),
        (bpe(token_type=np.ones(3, np.int32)), "token_type must hold a number for each of 7 tokens, found int32\\[3\\]"),
        (bpe(token_type=np.ones(7, np.float32)), "token_type must hold .* found float32\\[7\\]"),
        (bpe(tokens=[1, 2]), "tokens is no array of strings"),
        (bpe(merges="a b"), "merges is no array of strings"),
        (bpe(pre=["gpt-2"]), "pre must be a string"),
        (bpe(add_bos_token=1), "add_bos_token must be a bool, found '1'"),
        (spm(add_space_prefix="yes"), "add_space_prefix must be a bool"),
        (bpe(("<x>", BYTE)), "byte token b'<x>' is not spelled <0xNN>"),
        (bpe(("<0x+1>", BYTE)), "is not spelled <0xNN>"),
        (spm(scores=None), "scores must hold a number for each of 8 tokens, found float64\\[0\\]"),
        (spm(scores=np.ones(7, np.float32)), "scores must hold .* found float32\\[7\\]"),
    ],
)
def test_inconsistent_metadata_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        made(metadata)


ODD_VALUES = [None, True, -1, 1 << 40, 1.5, "", "x", [], ["a"], [["a"]], np.zeros(0), np.zeros(3, np.int64), np.full(9, np.nan)]


@pytest.mark.parametrize("base", [bpe(("<s>", CONTROL), bos_token_id=7), spm(("<0x41>", 0, BYTE))])
def test_any_value_of_any_key_is_read_or_refused(base: dict[str, Any]) -> None:
    names = ["add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces", "pre", "scores", "eos_token_id"]
    for key in {*base, *(f"tokenizer.ggml.{name}" for name in names), "tokenizer.chat_template", "general.name"}:
        for value in ODD_VALUES:
            list(content_parts(base | {key: value}))
            try:
                made(base | {key: value}).encode("ab <s>", parse_special=True)
            except LlmctlError as error:
                assert "\n" not in str(error)  # noqa: PT017


def test_content_tells_every_change_of_the_tokenizer() -> None:
    base = bpe(("<s>", CONTROL), bos_token_id=7) | {"general.name": "x"}
    parts = list(content_parts(base))
    assert parts == list(content_parts(base | {"llama.block_count": 3}))
    for name, value in (
        ("tokenizer.ggml.bos_token_id", 6),
        ("tokenizer.ggml.add_bos_token", True),
        ("tokenizer.ggml.token_type", np.ones(8, np.int32)),
        ("tokenizer.ggml.merges", ["a b", "ab c"]),
        ("tokenizer.chat_template", "t"),
        ("general.name", "phi-3"),
    ):
        assert parts != list(content_parts(base | {name: value}))


def test_text_that_a_vocabulary_has_no_piece_for_and_no_unknown_token() -> None:
    """It is left out: no id stands for it. (An id of None would reach the embedding.)"""
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.scores": np.zeros(2, np.float32),
        "tokenizer.ggml.add_space_prefix": False,
    }
    assert build_tokenizer(describe_gguf(metadata)).encode("abzb") == [0, 1, 1]

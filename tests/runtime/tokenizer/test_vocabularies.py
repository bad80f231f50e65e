"""Public vocabularies with known answers, from GGUF metadata alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[2] / "data" / "vocab"
OpenVocabulary = Callable[[str], GgufCheckpoint]

# special_tokens: how many; end: ids that end generation; surrounded: the ids of "a" with what the model expects around it.
KNOWN = {
    "deepseek-coder": {"size": 32256, "special": 3, "end": (32014, 32021), "surrounded": [32013, 64]},
    "gpt-2": {"size": 50257, "special": 1, "end": (50256,), "surrounded": [64]},
    "llama-bpe": {"size": 128256, "special": 256, "end": (128001, 128009), "surrounded": [128000, 64]},
    "llama-spm": {"size": 32000, "special": 3, "end": (2,), "surrounded": [1, 263]},
    "phi-3": {"size": 32064, "special": 66, "end": (32000, 32007), "surrounded": [1, 263]},
    "qwen2": {"size": 151936, "special": 3, "end": (151643, 151645), "surrounded": [64]},
}


def cases(name: str) -> Iterator[tuple[str, list[int]]]:
    texts = (DATA / "inputs.txt").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (DATA / f"ggml-vocab-{name}.out").read_text().split("\n")
    return zip(texts, [[int(number) for number in line.split()] for line in lines], strict=True)


@pytest.fixture
def tokenizer(vocabulary: OpenVocabulary, vocabulary_name: str) -> Tokenizer:
    return load_tokenizer(vocabulary(vocabulary_name))


@pytest.mark.parametrize("state", ["first", "cached"])
def test_ids_are_the_published_ones(vocabulary: OpenVocabulary, vocabulary_name: str, state: str) -> None:
    tokenizer = load_tokenizer(vocabulary(vocabulary_name))
    wrong = [text for text, ids in cases(vocabulary_name) if tokenizer.encode(text, add_special=False) != ids]
    assert wrong == []
    assert len(list(cases(vocabulary_name))) == 47


def test_published_ids_decode_to_their_text(tokenizer: Tokenizer, vocabulary_name: str) -> None:
    assert [text for text, ids in cases(vocabulary_name) if tokenizer.decode(ids) != text] == []


def test_parsing_special_tokens_changes_no_plain_text(tokenizer: Tokenizer, vocabulary_name: str) -> None:
    for text, ids in cases(vocabulary_name):
        assert tokenizer.encode(text, add_special=False, parse_special=True) == ids


def test_facts(tokenizer: Tokenizer, vocabulary_name: str) -> None:
    known = KNOWN[vocabulary_name]
    assert tokenizer.vocab_size == known["size"]
    assert len(tokenizer.special_tokens()) == known["special"]
    assert tokenizer.eos_token_ids == known["end"]
    assert tokenizer.encode("a") == known["surrounded"]
    assert tokenizer.add_bos == (len(known["surrounded"]) == 2)
    assert not tokenizer.add_eos


def test_every_token_has_text_and_bytes(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        assert tokenizer.token_text(token_id)
        assert tokenizer.token_bytes(token_id)
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(IndexError, match=f"token id {token_id} is none"):
            tokenizer.token_bytes(token_id)


def test_control_tokens_come_from_text_only_when_asked(tokenizer: Tokenizer) -> None:
    for text, token_id in tokenizer.special_tokens().items():
        assert tokenizer.encode(text, add_special=False, parse_special=True) == [token_id]
        plain = tokenizer.encode(text, add_special=False)
        assert not any(map(tokenizer.is_control, plain))
        assert tokenizer.decode(plain) == text
        assert tokenizer.decode([token_id]) == ""
        assert tokenizer.decode([token_id], skip_special=False) == text


def test_user_defined_tokens_are_always_found(vocabulary: OpenVocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary("deepseek-coder"))
    fim = "<｜fim▁begin｜>"
    for parse_special in (False, True):
        assert tokenizer.encode(f"a{fim}b", add_special=False, parse_special=parse_special) == [64, 32016, 65]
    assert tokenizer.decode([64, 32016, 65]) == f"a{fim}b"


def test_own_bos_is_not_doubled(vocabulary: OpenVocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary("llama-bpe"))
    bos = tokenizer.token_text(tokenizer.bos_token_id)
    assert tokenizer.encode(f"{bos}a", parse_special=True) == [128000, 64]
    assert tokenizer.encode("a", parse_special=True) == [128000, 64]
    assert tokenizer.encode(f"{bos}a").count(128000) == 1
    assert tokenizer.encode(f"{bos}{bos}a", parse_special=True) == [128000, 128000, 64]


def test_phi_3_swallows_space_behind_special_tokens(vocabulary: OpenVocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary("phi-3"))
    user, end = tokenizer.special_tokens()["<|user|>"], tokenizer.special_tokens()["<|end|>"]
    tight = tokenizer.encode("<|user|>Hi<|end|>", parse_special=True, add_special=False)
    assert [tight[0], tight[-1]] == [user, end]
    assert tokenizer.encode("<|user|>\n Hi<|end|>\n", parse_special=True, add_special=False) == tight


def test_sentencepiece_byte_tokens(vocabulary: OpenVocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary("llama-spm"))
    assert tokenizer.token_text(13) == "<0x0A>"
    assert tokenizer.token_bytes(13) == b"\n"
    assert tokenizer.encode("a\n€", add_special=False) == [263, 13, 30181]
    assert tokenizer.decode([263, 13, 30181]) == "a\n€"
    spelled = tokenizer.encode("<0x0A>", add_special=False)
    assert 13 not in spelled
    assert tokenizer.decode(spelled) == "<0x0A>"


def test_one_space_is_put_before_each_stretch_and_one_dropped(vocabulary: OpenVocabulary) -> None:
    tokenizer = load_tokenizer(vocabulary("llama-spm"))
    hello = tokenizer.encode("Hello", add_special=False)
    assert [tokenizer.token_text(token_id) for token_id in hello] == ["▁Hello"]
    assert tokenizer.encode("Hello</s>Hello", parse_special=True) == [1, *hello, 2, *hello]
    assert tokenizer.decode([1, *hello]) == "Hello"
    assert tokenizer.decode(tokenizer.encode("  Hello")) == "  Hello"

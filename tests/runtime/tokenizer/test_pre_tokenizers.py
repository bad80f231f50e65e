"""The rules that cut text into words."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from llmctl.errors import UnsupportedError
from llmctl.runtime.tokenizer import pre_tokenizers
from llmctl.runtime.tokenizer.pre_tokenizers import RULES, Rule, rule, rule_name, to_json

TEXT = "Hello  wörld, it's 12345 I'LL\n\n x=½ 東京タワー ราคา\tdef f():\n\t  return 'a'  \u00a0 👨‍👩‍👧 naïve_case ΑΒγ 12,345.6 "


def cut(chosen: Rule, text: str) -> list[str]:
    """The words, as text again."""
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    plain = {**to_json(chosen)}
    plain["pretokenizers"] = [step for step in plain["pretokenizers"] if step["type"] != "ByteLevel"]
    document = {"version": "1.0", "added_tokens": [], "pre_tokenizer": plain, "model": empty}
    document |= {"normalizer": None, "post_processor": None, "decoder": None}
    splitter = Tokenizer.from_str(json.dumps(document)).pre_tokenizer
    return [word for word, _ in splitter.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", RULES)
def test_every_rule_compiles_and_loses_nothing(name: str) -> None:
    words = cut(RULES[name], TEXT)
    assert "".join(words) == TEXT
    assert len(words) > 1


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's 12345  x", ["it", "'s", " 12345", " ", " x"]),
        ("gpt-2", "I'LL", ["I", "'", "LL"]),
        ("llama-bpe", "I'LL 12345", ["I", "'LL", " ", "123", "45"]),
        ("llama-bpe", "a.\n\nb", ["a", ".\n\n", "b"]),
        ("qwen2", "a 123", ["a", " ", "1", "2", "3"]),
        ("smollm", "abc 12345 don't", ["abc", " ", "1", "2", "3", "4", "5", " don", "'t"]),
        ("default", "a 1234", ["a", " ", "123", "4"]),
        ("deepseek-llm", "ab 東京 12\n", ["ab", " ", "東京", " ", "12", "\n"]),
        ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
        ("deepseek-v3", "1234東京.com", ["123", "4", "東京", ".com"]),
        ("tekken", "iPhone 12", ["i", "Phone", " ", "1", "2"]),
        ("tekken", "HTTPServer", ["HTTPServer"]),
        ("gpt-4o", "don't 1234", ["don't", " ", "123", "4"]),
        ("gpt-4o", "myVarName", ["my", "Var", "Name"]),
        ("bloom", "a, b", ["a", ",", " b"]),
        ("viking", "a12", ["a", "1", "2"]),
        ("kimi-k2", "hi東京hi", ["hi", "東京", "hi"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "12345a", ["12", "345", "a"]),
        ("superbpe", "1234567 a", ["1", "234", "567", " a"]),
        ("chameleon", "a  b1", ["a", "  ", "b", "1"]),
        ("ufakzeka", "Ankara'da", ["Ankara", "'da"]),
        ("seed-coder", "a.\n", ["a", ".", "\n"]),
        ("bailingmoe", "a\n\nb", ["a", "\n\n", "b"]),
        ("jais-2", "a" + " " * 7 + "b", ["a", " " * 4, "  ", " b"]),
        ("exaone-moe", "a b  c", ["a b", " ", " c"]),
        ("gemma4", "a b\n\nc", ["a b", "\n\n", "c"]),
    ],
)
def test_words(name: str, text: str, words: list[str]) -> None:
    assert cut(RULES[name], text) == words


def test_other_names_of_a_rule() -> None:
    assert rule("llama3") is rule("llama-bpe")
    assert rule("starcoder") is rule("smollm")
    assert rule("exaone4") is rule("phi-2") is RULES["gpt-2"]
    assert rule("glm4").ignore_merges
    assert not rule("chatglm-bpe").ignore_merges
    assert all(main in RULES for main in pre_tokenizers._ALIASES)
    assert not set(pre_tokenizers._NAMES) & set(RULES)


def test_unknown_rules_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"unknown pre-tokenizer rule 'no-such'.*known: a\.x-4\.0.*qwen2"):
        rule("no-such")


@pytest.mark.parametrize("name", [name for name, found in RULES.items() if found.byte_level and name != "glm4"])
def test_a_rule_is_recognised_in_a_tokenizer_json(name: str) -> None:
    assert rule_name(to_json(RULES[name]), ignore_merges=RULES[name].ignore_merges) == name


def test_rules_spelled_in_other_ways() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    assert rule_name(byte_level, ignore_merges=False) == "gpt-2"
    assert rule_name({"type": "Sequence", "pretokenizers": [digits, byte_level]}, ignore_merges=False) == "smollm"
    assert rule_name({"type": "Sequence", "pretokenizers": [digits]}, ignore_merges=False) is None
    assert rule_name(byte_level | {"add_prefix_space": True}, ignore_merges=False) is None
    assert rule_name(byte_level, ignore_merges=True) is None
    assert rule_name(None, ignore_merges=False) is None
    split = {"type": "Split", "pattern": {"Regex": pre_tokenizers.GPT2}, "behavior": "Removed", "invert": True}
    tail = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    assert rule_name({"type": "Sequence", "pretokenizers": [split, tail]}, ignore_merges=False) == "gpt-2"
    split["invert"] = False
    assert rule_name({"type": "Sequence", "pretokenizers": [split, tail]}, ignore_merges=False) is None

"""Answers by a grammar: whatever the model says, they fit, and they end."""

from __future__ import annotations

import importlib
import json
import re
import sys

import numpy as np
import pytest

from llmctl.errors import LlmctlError, UnsupportedError, UsageError
from llmctl.runtime.constraints.grammar import Grammar, _Vocabulary, compile_grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["ä", "b\n", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "(" word ("," word){0,3} ")"\nword: /[a-z]{1,3}/\n'
GBNF = 'root ::= "(" word ("," word){0,3} ")"\nword ::= [a-z] [a-z]? [a-z]?\n'


@pytest.fixture(scope="module")
def make(vocabulary):
    def of(kind: str, source: str) -> Grammar:
        return Grammar(compile_grammar(kind, source)[0], vocabulary.tokenizer, vocabulary.num_tokens, vocabulary.ends)

    return of


@pytest.mark.parametrize("greedy", [False, True])
def test_every_answer_by_a_schema_parses_and_fits(make, babble, vocabulary, greedy: bool) -> None:
    maker = make("json_schema", json.dumps(SCHEMA))
    for seed in range(8):
        ids = babble(maker, seed, temperature=0.0 if greedy else 1.0)
        assert ids[-1] in vocabulary.ends
        found = json.loads(vocabulary.tokenizer.decode(ids))
        assert set(found) == {"name", "age", "tags"}
        assert len(found["name"]) <= 8
        assert isinstance(found["age"], int)
        assert 0 <= found["age"] <= 150
        assert set(found["tags"]) <= {"ä", "b\n", "c"}


def test_every_answer_by_an_expression_matches(make, babble, vocabulary) -> None:
    expression = r"(yes|no): [0-9]{2,4}(\.[0-9]+)?€"
    maker = make("regex", expression)
    for seed in range(8):
        ids = babble(maker, seed)
        assert ids[-1] in vocabulary.ends
        assert re.fullmatch(expression, vocabulary.tokenizer.decode(ids))


@pytest.mark.parametrize("source", [LARK, GBNF], ids=["lark", "gbnf"])
def test_every_answer_by_a_grammar_is_of_its_language(make, babble, vocabulary, source: str) -> None:
    maker = make("grammar", source)
    for seed in range(6):
        ids = babble(maker, seed)
        assert ids[-1] in vocabulary.ends
        assert re.fullmatch(r"\([a-z]{1,3}(,[a-z]{1,3}){0,3}\)", vocabulary.tokenizer.decode(ids))


def test_an_answer_may_end_only_where_it_is_complete(make, vocabulary) -> None:
    constraint = make("regex", "ab?")()
    row = np.zeros(vocabulary.num_tokens, np.float32)
    constraint.forbid(row)
    assert not constraint.is_complete
    assert row[list(vocabulary.ends)].tolist() == [-np.inf] * len(vocabulary.ends)
    constraint.accept(vocabulary.tokenizer.encode("a", add_special=False)[0])
    row = np.zeros(vocabulary.num_tokens, np.float32)
    constraint.forbid(row)
    assert constraint.is_complete
    allowed = {*np.flatnonzero(np.isfinite(row)).tolist()}
    assert allowed == {*vocabulary.ends, vocabulary.tokenizer.encode("b", add_special=False)[0]}


def test_the_sequences_of_one_grammar_do_not_share_a_state(make, vocabulary) -> None:
    maker = make("regex", "ab")
    first, second = maker(), maker()
    first.accept(vocabulary.tokenizer.encode("a", add_special=False)[0])
    rows = [np.zeros(vocabulary.num_tokens, np.float32) for _ in range(2)]
    first.forbid(rows[0])
    second.forbid(rows[1])
    assert rows[0].tolist() != rows[1].tolist()


def test_control_tokens_are_not_the_text_they_are_spelled_with(make, vocabulary) -> None:
    row = np.zeros(vocabulary.num_tokens, np.float32)
    make("regex", r"<\|im_start\|>")().forbid(row)
    assert row[vocabulary.tokenizer.special_tokens()["<|im_start|>"]] == -np.inf
    assert np.isfinite(row[vocabulary.tokenizer.encode("<", add_special=False)[0]])


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("regex", "(a", "invalid regex"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("grammar", "start: foo", "unknown name"),
        ("grammar", "start: (", "Expected"),
        ("grammar", "root ::= (", "GBNF"),
        ("json_schema", '{"$ref": "http://example.org/x.json"}', "example.org"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(kind: str, source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        compile_grammar(kind, source)
    assert "\n" not in str(refused.value)


def test_a_model_without_an_end_token_is_refused(vocabulary) -> None:
    with pytest.raises(UnsupportedError, match="no end token"):
        Grammar(compile_grammar("regex", "a")[0], vocabulary.tokenizer, vocabulary.num_tokens, [])


def test_a_token_against_the_grammar_is_an_error_not_a_wrong_answer(make, vocabulary) -> None:
    constraint = make("regex", "ab")()
    with pytest.raises(LlmctlError, match="cannot be followed"):
        constraint.accept(vocabulary.tokenizer.encode("z", add_special=False)[0])


def test_without_llguidance_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UnsupportedError, match="package llguidance"):
        compile_grammar("regex", "a")


def test_nothing_imports_llguidance_before_it_is_needed() -> None:
    for name in [name for name in sys.modules if name.startswith("llmctl.runtime.constraints")]:
        importlib.reload(sys.modules[name])
    source = importlib.import_module("llmctl.runtime.constraints.grammar").__dict__
    assert "llguidance" not in source


@pytest.mark.parametrize("text", ["abc def", " x", "", "\n\n", "ü€"])
def test_a_text_that_goes_on_is_encoded_without_a_space_before_it(vocabulary, text: str) -> None:
    words = _Vocabulary(vocabulary.tokenizer, vocabulary.num_tokens, vocabulary.ends[0])
    assert b"".join(words.tokens[i] for i in words(text)) == text.encode()
    assert b"".join(words.tokens[i] for i in words(text.encode())) == text.encode()

"""Answers that match a JSON schema, a regular expression or a grammar, by llguidance (github.com/guidance-ai/llguidance).

llguidance is imported when the first grammar is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal

import numpy as np

from llmctl.errors import LlmctlError, UnsupportedError, UsageError
from llmctl.kernels.sample import keep_allowed
from llmctl.runtime.tokenizer import Tokenizer

Kind = Literal["json_schema", "regex", "grammar"]
_JSON_SPACE = r"( |\n {0,24})?"
"""White space between two tokens of JSON: compact or indented. Without a bound a weak model may add to it for ever."""
_SPECIAL = b"\xff"  # how llguidance tells a control token from text that is spelled the same


def compile_grammar(kind: Kind, source: str) -> tuple[str, list[str]]:
    """A grammar as llguidance takes it, and what it warns of. `kind` "grammar": Lark as llguidance has it, or GBNF.

    UsageError with llguidance's reason where it is none.
    """
    llguidance = _library()
    try:
        if kind == "json_schema":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": _JSON_SPACE})
        else:
            grammar = llguidance.grammar_from(kind, source)
    except ValueError as error:
        raise UsageError(_reason(str(error))) from None
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise UsageError(_reason(messages[0]))
    return grammar, [_reason(message) for message in messages]


class Grammar:
    """Makes the constraint of each sequence: only tokens that go on with what the grammar allows, an end token only where the
    answer is complete.

    grammar: of `compile_grammar`. eos_token_ids: tokens that may end the answer. UnsupportedError if there is none, UsageError
    if the tokens of this model cannot spell the grammar.
    """

    def __init__(self, grammar: str, tokenizer: Tokenizer, num_tokens: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer, self._num_tokens = tokenizer, num_tokens
        self._eos_token_ids = sorted(i for i in eos_token_ids if i < num_tokens)
        if not self._eos_token_ids:
            raise UnsupportedError("the model has no end token, so an answer by a grammar could not end")
        self._first = _library().LLMatcher(self._vocabulary, grammar, log_level=0)
        if self._first.is_error():
            raise UsageError(_reason(self._first.get_error()))

    def __call__(self) -> GrammarConstraint:
        return GrammarConstraint(self._first.deep_copy(), self._num_tokens)

    @cached_property
    def _vocabulary(self) -> Any:
        llguidance = _library()
        wrapper = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, self._num_tokens, self._eos_token_ids[0]))
        return llguidance.LLTokenizer(wrapper, n_vocab=self._num_tokens, eos_token=self._eos_token_ids)


class GrammarConstraint:
    """One answer so far."""

    def __init__(self, matcher: Any, num_tokens: int) -> None:
        self._matcher, self._allowed = matcher, np.zeros(-(-num_tokens // 32), np.uint32)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def forbid(self, logits: np.ndarray) -> None:
        """As `Constraint`."""
        self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        self._require_sound()
        keep_allowed(logits, self._allowed)

    def accept(self, token_id: int) -> None:
        """As `Constraint`."""
        self._matcher.consume_token(token_id)
        self._require_sound()

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise LlmctlError(f"the grammar cannot be followed further: {_reason(self._matcher.get_error())}")


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, tokenizer.bos_token_id
        self.special_token_ids = [i for i in range(num_tokens) if tokenizer.is_control(i)]
        special = set(self.special_token_ids)
        self.tokens = [(_SPECIAL if i in special else b"") + tokenizer.token_bytes(i) for i in range(num_tokens)]

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids of a text that continues another: without the space some vocabularies put before the first word."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        ids, before = self._tokenizer.encode("\n" + text, add_special=False), b""
        for count, token_id in enumerate(ids):
            before += self._tokenizer.token_bytes(token_id)
            if before in (b"\n", b" \n"):
                return ids[count + 1 :]
        return self._tokenizer.encode(text, add_special=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UnsupportedError(f"grammars need the package llguidance, which cannot be imported: {error}") from None
    return llguidance


def _reason(message: str) -> str:
    """llguidance's message without the picture of the place, which needs lines of its own."""
    return message.split("\n", 1)[0].strip()

"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache

from llmctl.runtime.tokenizer.bpe import BpeEngine
from llmctl.runtime.tokenizer.detokenize import StreamingDetokenizer
from llmctl.runtime.tokenizer.facts import AddedToken, Facts, TokenType
from llmctl.runtime.tokenizer.matcher import TokenMatcher
from llmctl.runtime.tokenizer.spm import SentencePieceEngine
from llmctl.runtime.tokenizer.vocabulary import Buffer

_ENGINES = {"bpe": BpeEngine, "sentencepiece": SentencePieceEngine}
_RECENT = 1024
"""Stretches of text whose ids are kept, none of more than _LONG characters."""
_LONG = 4096


class Tokenizer:
    """Any of the supported vocabularies. Safe to use from several threads.

    vocab_size: number of tokens; the model's embedding may have more rows.
    bos_token_id, unk_token_id, pad_token_id: or None.
    eos_token_ids: every token that ends generation: the union of all sources, the tokenizer's own first.
    add_bos, add_eos: whether `encode` puts them around the text.
    chat_templates: name → Jinja source, the usual one under "default".
    named_special: bos_token, eos_token, unk_token, pad_token → text, as templates expect them.
    """

    def __init__(self, facts: Facts, sections: Mapping[str, Buffer]) -> None:
        self._facts = facts
        outer, inner = _divide(facts)
        self._outer = outer
        self._engine = _ENGINES[facts.engine](facts.settings, sections, inner)
        self._recent = lru_cache(_RECENT)(lambda text, first: tuple(self._engine.encode(text, first=first)))
        self._added = {token.id: token for token in facts.added}
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = facts.vocab_size
        self.bos_token_id = facts.bos_token_id
        self.eos_token_ids = facts.eos_token_ids
        self.unk_token_id = facts.unk_token_id
        self.pad_token_id = facts.pad_token_id
        self.add_bos = facts.bos_token_id is not None and facts.bos_token_id in facts.prefix_ids
        self.add_eos = bool(set(facts.suffix_ids) & set(facts.eos_token_ids))
        # An empty template is none: some files carry the key without a text.
        self.chat_templates = {name: source for name, source in facts.chat_templates.items() if source.strip()}
        self.named_special = facts.named

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False, plain: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """The ids of a text.

        add_special: put what the model expects around it (BOS, EOS).
        parse_special: read control tokens spelled out in the text as such. Without it the text, whatever it says, yields
        no control token; user-defined tokens are found in either case. A text that spells out its own BOS gets no second
        one (unlike in transformers: a rendered chat template usually brings it along).
        plain: stretches of the text (start, end), in order, from which no control token comes even so.
        Lone surrogates are read as U+FFFD.
        """
        ids: list[int] = []
        matcher = self._all_matcher if parse_special else self._text_matcher
        for position, part in enumerate(matcher.split(_clean(text), plain)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encode_stretch(part, position == 0))
        return self._surround(ids, parse_special) if add_special else ids

    def _encode_stretch(self, text: str, first: bool) -> Sequence[int]:
        """The ids of what stands between two special tokens. A chat brings the same stretches with every turn."""
        return self._engine.encode(text, first=first) if len(text) > _LONG else self._recent(text, first)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of the ids; bytes that are no UTF-8 become U+FFFD.

        skip_special: leave out control and unknown tokens. Where encoding puts a space before the text, one space at the
        beginning is dropped.
        """
        stream = self.stream(skip_special=skip_special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, skip_special: bool = True, strip_space: bool | None = None) -> StreamingDetokenizer:
        """A detokenizer for ids that come one by one; joined, its output is what `decode` gives.

        strip_space: False for ids that continue a text, whose first space belongs to it.
        """
        strips = self._facts.settings["strip_space"] if strip_space is None else strip_space
        return StreamingDetokenizer(self._shown_bytes if skip_special else self.token_bytes, strip_space=strips)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it (with Ġ or ▁ for a space). IndexError if there is no such token."""
        added = self._added.get(token_id)
        return self._engine.vocabulary.text(self._checked(token_id)) if added is None else added.text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for in text, which need not be whole characters. IndexError if there is none."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._make_bytes(self._checked(token_id))
        return known

    def is_control(self, token_id: int) -> bool:
        """Whether the token never stands for text: a control or the unknown token."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary (control or user-defined), not learned with it."""
        return token_id in self._added

    @cached_property
    def num_used_tokens(self) -> int:
        """Tokens without the unused ones at the end, which only pad the vocabulary to the embedding's rows."""
        used = self.vocab_size
        while used and used - 1 not in self._added and self._engine.vocabulary.type(used - 1) == TokenType.UNUSED:
            used -= 1
        return used

    def special_tokens(self) -> dict[str, int]:
        """Text → id of the control tokens (the unknown token among them)."""
        return {token.text: token.id for token in self._facts.added if token.special}

    @cached_property
    def _text_matcher(self) -> TokenMatcher:
        return TokenMatcher(token for token in self._outer if not token.special)

    @cached_property
    def _all_matcher(self) -> TokenMatcher:
        return TokenMatcher(self._outer)

    def _surround(self, ids: list[int], parse_special: bool) -> list[int]:
        prefix = list(self._facts.prefix_ids)
        if prefix and parse_special and ids[: len(prefix)] == prefix:
            prefix = []
        return [*prefix, *ids, *self._facts.suffix_ids]

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_control(token_id) else self.token_bytes(token_id)

    def _make_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.text.encode("utf-8", "replace")
        if self._engine.vocabulary.type(token_id) == TokenType.BYTE:
            return bytes([int(self._engine.vocabulary.raw(token_id)[3:5], 16)])
        return self._engine.bytes_of(token_id)

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise IndexError(f"token id {token_id} is none of the {self.vocab_size} tokens")
        return token_id


def _divide(facts: Facts) -> tuple[list[AddedToken], list[AddedToken]]:
    """The added tokens to seek in the text as it is, and those to seek once it is normalized.

    Text between outer tokens is normalized on its own (and, with prefix "always", gets its own space).
    """
    if facts.engine == "bpe":
        inner = {token.id for token in facts.added if token.normalized and not token.special}
    else:
        always = facts.settings["prefix"] == "always"
        inner = {token.id for token in facts.added if not (token.special or token.strips or always)}
    outer = [token for token in facts.added if token.id not in inner]
    return outer, [token for token in facts.added if token.id in inner]


def _clean(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text

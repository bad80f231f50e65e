"""What is known about a tokenizer besides the words it knows: special tokens, what surrounds a prompt, templates."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple


class TokenType(IntEnum):
    """The kinds of token that GGUF and SentencePiece know, with their numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# How texts that end a turn or a document are spelled by the models that have them. Such a token ends generation, also
# where a file forgets to say so, and is a control token, also where a file types it as text.
END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|EOT|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[e~[",
    "<｜end▁of▁sentence｜>",
)


class AddedToken(NamedTuple):
    """A token found in text as it stands, before the text is cut into words.

    special: a control (or unknown) token: found only where special tokens are asked for, and left out of decoded text.
    lstrip, rstrip: swallows the white space before, after it. single_word: not inside a word.
    normalized: sought in the normalized text.
    """

    id: int
    text: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False

    @property
    def strips(self) -> bool:
        """Whether white space or words beside it matter."""
        return self.lstrip or self.rstrip or self.single_word


@dataclass
class Facts:
    """Everything about a tokenizer but its vocabulary and merges. Can be written as JSON.

    engine: "bpe" merges by a list of pairs, "sentencepiece" by the scores of the pieces.
    vocab_size: number of tokens (highest id + 1).
    eos_token_ids: every token that ends generation, the tokenizer's own first.
    prefix_ids, suffix_ids: what surrounds a prompt when special tokens are added.
    added: control, unknown and user-defined tokens.
    named: bos_token, eos_token … → text, for templates.
    settings: what the engine alone understands.
    """

    engine: Literal["bpe", "sentencepiece"]
    vocab_size: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    added: tuple[AddedToken, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the many added tokens in a compact form."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["added"] = [_pack(token) for token in self.added]
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Facts:
        """The reverse of `to_json`."""
        values = dict(plain)
        values["added"] = tuple(_unpack(*packed) for packed in plain["added"])
        for name in ("eos_token_ids", "prefix_ids", "suffix_ids"):
            values[name] = tuple(plain[name])
        return cls(**values)


def _pack(token: AddedToken) -> tuple[int, str, int]:
    token_id, text, special, lstrip, rstrip, single_word, normalized = token
    return token_id, text, special | lstrip << 1 | rstrip << 2 | single_word << 3 | normalized << 4


def _unpack(token_id: int, text: str, flags: int) -> AddedToken:
    return AddedToken(token_id, text, *(bool(flags >> bit & 1) for bit in range(5)))


def end_token_ids(stated: list[int | None], control: dict[str, int]) -> tuple[int, ...]:
    """The union of the stated end tokens, in order, and of the control tokens known to end a turn.

    stated: ids from every source; None is passed over.
    control: text → id of the control tokens.
    """
    known = [control[text] for text in END_TEXTS if text in control]
    # Harmony-style vocabularies end a message with <|end|> and go on: only <|return|> and the calls end the answer.
    if "<|end|>" in control and _speaks_in_messages(control) and control["<|end|>"] not in stated:
        known.remove(control["<|end|>"])
    return tuple(dict.fromkeys(token_id for token_id in [*stated, *known] if token_id is not None))


def _speaks_in_messages(control: dict[str, int]) -> bool:
    calls = "<|call|>" in control or "<|calls|>" in control
    return calls and ("<|return|>" in control or "<|flush|>" in control)

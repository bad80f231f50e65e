"""A tokenizer as its source describes it, before it is prepared for use (or written to another file)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmctl.errors import FormatError
from llmctl.runtime.tokenizer.bpe import MARKER, build_merges, joiners
from llmctl.runtime.tokenizer.facts import AddedToken, Facts, TokenType
from llmctl.runtime.tokenizer.spm import rank_scores
from llmctl.runtime.tokenizer.vocabulary import Buffer, build_vocabulary


@dataclass
class Description:
    """Vocabulary and merges, or scores.

    texts: per id, UTF-8. types: uint8 per id, a TokenType.
    scores: per id, for SentencePiece. merges: pairs in order of rank, for BPE; index: text → id, both str or both bytes.
    """

    facts: Facts
    texts: list[bytes]
    types: np.ndarray
    scores: Sequence[float] | None = None
    merges: list[Any] | None = None
    index: Mapping[Any, int] | None = None


def prepare(description: Description) -> dict[str, Buffer]:
    """The flat buffers an engine works on; completes `facts.settings` by what follows from the vocabulary."""
    settings = description.facts.settings
    settings["byte_ids"] = _byte_ids(description.texts, description.types)
    sections = build_vocabulary(description.texts, description.types)
    if description.facts.engine == "sentencepiece":
        settings["joiners"] = _joiners(description.texts, sections)
        settings["has_unused"] = bool((description.types == TokenType.UNUSED).any())
        return sections | {"ranks": rank_scores(description.scores)}
    settings["joiners"] = None if settings["byte_level"] else _joiners(description.texts, sections)
    barred = np.flatnonzero(np.isin(description.types, (TokenType.CONTROL, TokenType.UNKNOWN)))
    return sections | build_merges(description.index or {}, description.merges or [], barred)


def retype(types: np.ndarray, added: Sequence[AddedToken], unk_token_id: int | None) -> None:
    """Give the added tokens the types their flags say."""
    for special, kind in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
        types[[token.id for token in added if token.special is special]] = kind
    if unk_token_id is not None and unk_token_id < len(types) and types[unk_token_id] == TokenType.CONTROL:
        types[unk_token_id] = TokenType.UNKNOWN


def name_special(facts: Facts, texts: Sequence[bytes]) -> dict[str, str]:
    """The texts of the named special tokens."""
    eos = facts.eos_token_ids[0] if facts.eos_token_ids else None
    ids = {"bos_token": facts.bos_token_id, "eos_token": eos}
    ids |= {"unk_token": facts.unk_token_id, "pad_token": facts.pad_token_id}
    return {
        name: texts[token_id].decode("utf-8", "replace")
        for name, token_id in ids.items()
        if token_id is not None and token_id < len(texts)
    }


def _joiners(texts: Sequence[bytes], sections: Mapping[str, Buffer]) -> str:
    """See `bpe.joiners`. The few texts with a ▁ inside are found by numpy."""
    blob, offsets = np.frombuffer(sections["texts"], np.uint8), np.frombuffer(sections["offsets"], np.uint32)
    first, second, third = MARKER.encode()
    hits = np.flatnonzero((blob[:-2] == first) & (blob[1:-1] == second) & (blob[2:] == third))
    owners = np.searchsorted(offsets, hits, side="right") - 1
    inside = np.unique(owners[hits > offsets[owners]]).tolist()
    return joiners([texts[token_id].decode("utf-8", "replace") for token_id in inside])


def _byte_ids(texts: Sequence[bytes], types: np.ndarray) -> list[int] | None:
    """Per byte the id of its token <0xNN>, or -1; None if the vocabulary has no byte token at all."""
    found = [-1] * 256
    for token_id in np.flatnonzero(types == TokenType.BYTE).tolist():
        found[byte_value(texts[token_id])] = token_id
    return None if max(found) < 0 else found


def byte_value(text: bytes) -> int:
    """The byte a token <0xNN> stands for; FormatError for any other text."""
    if len(text) == 6 and text.startswith(b"<0x") and text.endswith(b">"):
        digits = text[3:5].decode("latin-1")
        if all(digit in "0123456789abcdefABCDEF" for digit in digits):
            return int(digits, 16)
    raise FormatError(f"the byte token {text[:20]!r} is not spelled <0xNN>")

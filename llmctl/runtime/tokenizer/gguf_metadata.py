"""A tokenizer as the metadata of a GGUF file: the reverse of `gguf_source`, and a check that nothing was lost.

Which of GGUF's two models it becomes is decided by how the tokenizer works, not by the files it came in: byte-level BPE is
"gpt2" with a named splitting rule; BPE that writes the space as ▁ is "llama", whose pieces have scores. Such a BPE without
scores gets them from the order of its merges, if every way to make a piece is a merge; else no scores do the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.string_array import StringArray
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer import pre_tokenizers
from llmctl.runtime.tokenizer.bpe import MARKER
from llmctl.runtime.tokenizer.description import Description
from llmctl.runtime.tokenizer.facts import END_TEXTS, Facts, TokenType
from llmctl.runtime.tokenizer.tokenizer_json import space_prefix

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_MERGED = frozenset({TokenType.NORMAL, TokenType.USER_DEFINED})
_PADDING_SCORE = -10000.0  # far below every piece; a padding token is no piece of any text


@dataclass
class TokenizerMetadata:
    """keys: as a GGUF writer takes them. warnings: what GGUF has no key for, a sentence each."""

    keys: dict[str, Any]
    warnings: list[str] = field(default_factory=list)


def gguf_metadata(
    description: Description, rows: int, *, pre: str | None = None, drop_surplus: bool = False
) -> TokenizerMetadata:
    """The tokenizer.* keys for a model whose embedding has `rows` rows.

    Ids without a token, up to `rows`, become unused tokens. pre: the splitting rule, in place of recognising it.
    drop_surplus: leave out tokens beyond the embedding, which otherwise are an error.
    Raises FormatError naming the first surplus token; UnsupportedError naming what GGUF cannot express.
    """
    facts = description.facts
    texts, types = _fitted(description, rows, drop_surplus)
    byte_level = facts.engine == "bpe" and facts.settings["byte_level"]
    if pre is not None and not byte_level:
        raise UnsupportedError("--pre is for byte-level BPE; this tokenizer writes the space as ▁ and needs no rule")
    made = TokenizerMetadata({})
    spelling = _byte_level_keys(description, pre) if byte_level else _marker_keys(description, rows, made.warnings)
    made.keys[f"{_KEY}model"] = spelling.pop("model")
    made.keys[f"{_KEY}pre"] = spelling.pop("pre")
    made.keys[f"{_KEY}tokens"] = StringArray.encode(texts if byte_level else _spelled(texts, types))
    made.keys[f"{_KEY}token_type"] = np.array(types, np.int32)
    made.keys |= {f"{_KEY}{name}": value for name, value in spelling.items()}
    _add_special(made, facts, rows)
    _add_templates(made, facts.chat_templates)
    _warn_of_flags(made, facts)
    return made


def _fitted(description: Description, rows: int, drop_surplus: bool) -> tuple[list[bytes], list[int]]:
    """Texts and types of `rows` tokens, ids that have no token filled with unused ones."""
    texts, types = list(description.texts[:rows]), list(description.types[:rows])
    surplus = [i for i in range(rows, len(description.texts)) if description.texts[i]]
    if surplus and not drop_surplus:
        text = description.texts[surplus[0]].decode("utf-8", "replace")
        raise FormatError(
            f"the embedding has {rows} rows, but there are {len(surplus)} tokens beyond them, the first is {quoted(text)} "
            f"(id {surplus[0]}); --drop-surplus leaves them out"
        )
    texts += [b""] * (rows - len(texts))
    types += [TokenType.UNUSED] * (rows - len(types))
    for token_id, text in enumerate(texts):
        if not text:
            texts[token_id], types[token_id] = b"[PAD%d]" % token_id, TokenType.UNUSED
    return texts, [int(kind) for kind in types]


def _spelled(texts: list[bytes], types: list[int]) -> list[bytes]:
    """GGUF keeps user-defined tokens of SentencePiece as they stand in text, with plain spaces, and all other pieces with ▁."""
    marker = MARKER.encode()
    return [
        text.replace(marker, b" ") if kind == TokenType.USER_DEFINED else text for text, kind in zip(texts, types, strict=True)
    ]


def _byte_level_keys(description: Description, pre: str | None) -> dict[str, Any]:
    settings = description.facts.settings
    if pre is not None:
        pre_tokenizers.rule(pre)
    else:
        pre = pre_tokenizers.rule_name(settings["pre_tokenizer"], ignore_merges=settings["ignore_merges"])
        if pre is None:
            raise UnsupportedError(
                f"GGUF has no name for how this tokenizer splits text ({_describe(settings['pre_tokenizer'])}"
                f"{', ignore_merges' if settings['ignore_merges'] else ''}); --pre NAME says which rule to write"
            )
    return {"model": "gpt2", "pre": pre, "merges": StringArray.encode(map(_merge_text, description.merges or []))}


def _describe(pre_tokenizer: Any) -> str:
    """A pre_tokenizer in few words: the types of its steps, and their patterns."""
    if not isinstance(pre_tokenizer, dict):
        return "no pre_tokenizer"
    if pre_tokenizer.get("type") == "Sequence":
        return ", ".join(map(_describe, pre_tokenizer.get("pretokenizers", [])))
    pattern = pre_tokenizer.get("pattern")
    shown = next(iter(pattern.values()), "") if isinstance(pattern, dict) else ""
    return f"{pre_tokenizer.get('type')} {shown}".strip()


def _merge_text(pair: tuple[Any, Any]) -> bytes:
    left, right = (half if isinstance(half, bytes) else half.encode("utf-8", "surrogatepass") for half in pair)
    if b" " in left[1:]:
        raise UnsupportedError(f"the merge {quoted(left)} + {quoted(right)} has a space inside, which GGUF cannot store")
    return left + b" " + right


def _marker_keys(description: Description, rows: int, warnings: list[str]) -> dict[str, Any]:
    settings = description.facts.settings
    if description.scores is not None:
        scores, prefix, collapse = list(description.scores), settings["prefix"], settings["collapse"]
        if settings["charsmap"]:
            warnings.append("the tokenizer normalizes text (precompiled_charsmap), readers of GGUF do not")
    else:
        scores, prefix, collapse = _scores(description), _prefix(settings), False
    if prefix == "first":
        warnings.append("the tokenizer puts a space before the first word only, readers of GGUF also after special tokens")
    keys = {"model": "llama", "pre": "default", "scores": _fitted_scores(scores, rows)}
    keys["add_space_prefix"] = prefix != "never"
    return keys | ({"remove_extra_whitespaces": True} if collapse else {})


def _fitted_scores(scores: list[float], rows: int) -> np.ndarray:
    return np.array([*scores[:rows], *[_PADDING_SCORE] * (rows - len(scores))], np.float32)


def _prefix(settings: Mapping[str, Any]) -> str:
    found = space_prefix(settings)
    if found is None or settings["ignore_merges"]:
        raise UnsupportedError(
            f"GGUF cannot express how this tokenizer normalizes and splits text (normalizer {_describe(settings['normalizer'])}, "
            f"pre_tokenizer {_describe(settings['pre_tokenizer'])})"
        )
    return found["prefix"]


def _scores(description: Description) -> list[float]:
    """Minus the rank of each piece in the order the merges first make it; 0 for what no merge makes.

    Scores let any two neighbours join that make a piece, merges only those listed: so all ways to make a piece must be
    listed, one after the other.
    """
    index: Mapping[Any, int] = description.index or {}
    made: dict[Any, int] = {}
    last, rank = None, 0
    for left, right in description.merges or []:
        piece = left + right
        if piece != last:
            if piece in made:
                raise UnsupportedError(f"GGUF cannot express merges of {quoted(piece)} that come before and after others")
            made[piece], last, rank = rank, piece, rank + 1
    _check_all_ways(index, description)
    scores = [0.0] * len(description.texts)
    for piece, place in made.items():
        scores[index[piece]] = -float(place)
    return scores


def _check_all_ways(index: Mapping[Any, int], description: Description) -> None:
    """UnsupportedError naming a piece that two pieces make which are no merge."""
    listed = Counter(left + right for left, right in description.merges or [])
    pieces = {piece for piece, token_id in index.items() if description.types[token_id] in _MERGED}
    joined = pieces | {letter for piece in pieces for letter in piece}  # characters are joined whether they are pieces or not
    for piece in pieces:
        ways = sum(piece[:at] in joined and piece[at:] in joined for at in range(1, len(piece)))
        if ways != listed.get(piece, 0):
            raise UnsupportedError(
                f"the piece {quoted(piece)} can be made of pieces in {ways} ways, of which {listed.get(piece, 0)} are merges: "
                "GGUF cannot express that, since the scores it has for such a tokenizer allow them all"
            )


def _add_special(made: TokenizerMetadata, facts: Facts, rows: int) -> None:
    eos = facts.eos_token_ids[0] if facts.eos_token_ids else None
    ids = {"bos": facts.bos_token_id, "eos": eos, **_further_ends(made, facts)}
    ids |= {"unknown": facts.unk_token_id, "padding": facts.pad_token_id}
    for name, token_id in ids.items():
        if token_id is not None and token_id < rows:
            made.keys[f"{_KEY}{name}_token_id"] = token_id
    made.keys[f"{_KEY}add_bos_token"] = _surrounds(facts.prefix_ids, facts.bos_token_id, "before")
    made.keys[f"{_KEY}add_eos_token"] = _surrounds(facts.suffix_ids, eos, "after")


def _further_ends(made: TokenizerMetadata, facts: Facts) -> dict[str, int]:
    """End tokens beyond the first: those whose text readers know need no key, and there are two keys for others."""
    known = {token.id for token in facts.added if token.special and token.text in END_TEXTS}
    others = [token_id for token_id in facts.eos_token_ids[1:] if token_id not in known]
    if others[2:]:
        made.warnings.append(f"GGUF has no key for the end tokens {others[2:]}: generation will not stop at them")
    return dict(zip(("eot", "eom"), others, strict=False))


def _surrounds(ids: tuple[int, ...], expected: int | None, where: str) -> bool:
    if ids and ids != (expected,):
        raise UnsupportedError(
            f"the tokenizer puts the tokens {list(ids)} {where} a text, GGUF can only say whether {expected} is put there"
        )
    return bool(ids)


def _add_templates(made: TokenizerMetadata, templates: Mapping[str, str]) -> None:
    others = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    if "default" in templates:
        made.keys[_TEMPLATE] = templates["default"]
    if others:
        made.keys[f"{_TEMPLATE}s"] = list(others)
    made.keys |= {f"{_TEMPLATE}.{name}": text for name, text in others.items()}


def _warn_of_flags(made: TokenizerMetadata, facts: Facts) -> None:
    flagged = [token.text for token in facts.added if token.strips]
    if flagged:
        more = f" and {len(flagged) - 3} more" if flagged[3:] else ""
        made.warnings.append(
            f"GGUF has no flags for tokens that swallow the white space beside them: {', '.join(map(repr, flagged[:3]))}{more}"
        )
    normalizer = facts.settings.get("normalizer")
    if facts.engine == "bpe" and facts.settings["byte_level"] and _kinds(normalizer):
        made.warnings.append(f"readers of GGUF do not normalize text as this tokenizer does ({', '.join(_kinds(normalizer))})")


def _kinds(normalizer: Any) -> list[str]:
    return list(_walk(normalizer))


def _walk(step: Any) -> Iterator[str]:
    if isinstance(step, dict) and step.get("type") == "Sequence":
        for inner in step.get("normalizers", []):
            yield from _walk(inner)
    elif isinstance(step, dict):
        yield str(step.get("type"))

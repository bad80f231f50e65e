"""The tokenizer that the metadata of a GGUF file describes. Keys as llama.cpp writes and reads them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer import pre_tokenizers
from llmctl.runtime.tokenizer.bpe import MARKER
from llmctl.runtime.tokenizer.description import Description, name_special
from llmctl.runtime.tokenizer.facts import END_TEXTS, AddedToken, Facts, TokenType, end_token_ids

_log = logging.getLogger(__name__)

_PREFIX = "tokenizer."
_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_MATCHED = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
# GGUF has no key for the flags of added tokens. Those of Phi-3 swallow the white space behind them, but for these three.
_KEEPS_SPACE_BEHIND = {"<unk>", "<s>", "<|endoftext|>"}


def content_parts(metadata: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """All that `describe_gguf` looks at, for naming a cache entry."""
    for name in sorted(metadata):
        if name.startswith(_PREFIX) or name == "general.name":
            value = metadata[name]
            yield name.encode("utf-8", "surrogatepass")
            if hasattr(value, "offsets"):  # a StringArray
                yield memoryview(value.buffer)
            elif hasattr(value, "tobytes"):
                yield value.tobytes()
            else:
                yield repr(value).encode("utf-8", "surrogatepass")


def describe_gguf(metadata: Mapping[str, Any], *, pre: str | None = None) -> Description:
    """The tokenizer in a GGUF file's metadata.

    metadata: key → value; string arrays may be lists of str or the reader's own arrays.
    pre: name of the pre-tokenizer rule, in place of the file's.
    Errors: UnsupportedError for other kinds of tokenizer and unknown rules, FormatError for inconsistent metadata.
    """
    model = metadata.get(f"{_KEY}model", "none")
    if not isinstance(model, str):
        raise FormatError(f"{_KEY}model must be a string, found {str(model)[:40]!r}")
    if model == "llama":
        return _describe_spm(metadata)
    if model in ("gpt2", "gemma4"):
        return _describe_bpe(metadata, pre or ("gemma4" if model == "gemma4" else metadata.get(f"{_KEY}pre")))
    if model in ("none", "no_vocab"):
        raise UnsupportedError("the file carries no tokenizer (tokenizer.ggml.model)")
    raise UnsupportedError(f"tokenizer.ggml.model is {quoted(model)}; supported are 'gpt2' (BPE) and 'llama' (SentencePiece BPE)")


def _describe_spm(metadata: Mapping[str, Any]) -> Description:
    texts, types = _vocabulary(metadata)
    scores = _numbers(metadata, "scores", len(texts), "fiu")
    facts = _facts(metadata, "sentencepiece", texts, types, default_bos=1, default_eos=2, default_unk=0, add_bos=True)
    prefix = "always" if _flag(metadata, "add_space_prefix", True) else "never"
    facts.settings = {
        "prefix": prefix,
        "prefix_unless_space": False,
        "strip_space": prefix == "always",
        "collapse": _flag(metadata, "remove_extra_whitespaces", False),
        "charsmap": None,
        "unk": facts.unk_token_id,
    }
    for token_id in np.flatnonzero(types == TokenType.USER_DEFINED).tolist():
        # Stored with plain spaces, while every other piece has ▁.
        texts[token_id] = texts[token_id].replace(b" ", MARKER.encode())
    return Description(facts, texts, types, scores=scores)


def _describe_bpe(metadata: Mapping[str, Any], pre: str | None) -> Description:
    if pre is None:
        _log.warning("the file names no pre-tokenizer rule (tokenizer.ggml.pre): 'default' is used, ids may be wrong")
        pre = "default"
    if not isinstance(pre, str):
        raise FormatError(f"{_KEY}pre must be a string, found {str(pre)[:40]!r}")
    rule = pre_tokenizers.rule(pre)
    texts, types = _vocabulary(metadata)
    if f"{_KEY}merges" not in metadata:
        raise FormatError(f"{_KEY}merges is missing")
    merges = _pairs(_strings(metadata, "merges"))
    facts = _facts(metadata, "bpe", texts, types, add_bos=rule.add_bos)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": MARKER}
    facts.settings = {
        "pre_tokenizer": pre_tokenizers.to_json(rule),
        "normalizer": None if rule.byte_level else escape,
        "byte_level": rule.byte_level,
        "ignore_merges": rule.ignore_merges,
        "strip_space": False,
        "unk": None if rule.byte_level else facts.unk_token_id,
        "fuse_unk": False,
    }
    return Description(facts, texts, types, merges=merges, index=_index(texts))


def _pairs(merges: list[bytes]) -> list[tuple[bytes, bytes]]:
    """The halves of each merge, at its first space; a half may itself begin with one."""
    pairs = [(left, right) for left, _, right in [merge.partition(b" ") for merge in merges]]
    if all(map(all, pairs)):
        return pairs
    for place, merge in enumerate(merges):
        if not all(pairs[place]):
            at = merge.find(b" ", 1)
            if at < 0 or at + 1 == len(merge):
                raise FormatError(f"{_KEY}merges holds {merge[:40]!r}, which is no pair")
            pairs[place] = merge[:at], merge[at + 1 :]
    return pairs


def _strings(metadata: Mapping[str, Any], name: str) -> list[bytes]:
    """The array of strings under a key; [] if there is none."""
    value = metadata.get(f"{_KEY}{name}", [])
    if hasattr(value, "tobytes_list"):
        return value.tobytes_list()
    if not isinstance(value, list) or not all(isinstance(item, (str, bytes)) for item in value):
        raise FormatError(f"{_KEY}{name} is no array of strings")
    return [item if isinstance(item, bytes) else item.encode("utf-8", "surrogatepass") for item in value]


def _numbers(metadata: Mapping[str, Any], name: str, count: int, kinds: str) -> np.ndarray:
    """The first `count` of the array of numbers under a key."""
    value = metadata.get(f"{_KEY}{name}")
    numbers = np.asarray([] if value is None else value)
    if numbers.ndim != 1 or len(numbers) < count or numbers.dtype.kind not in kinds:
        found = f"{numbers.dtype}{list(numbers.shape)}"
        raise FormatError(f"{_KEY}{name} must hold a number for each of {count} tokens, found {found}")
    return numbers[:count]


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"{_KEY}{name}", default)
    if not isinstance(value, bool):
        raise FormatError(f"{_KEY}{name} must be a bool, found {str(value)[:40]!r}")
    return value


def _index(texts: list[bytes]) -> dict[bytes, int]:
    """Text → id, the lowest of several."""
    return dict(zip(reversed(texts), range(len(texts) - 1, -1, -1), strict=True))


def _vocabulary(metadata: Mapping[str, Any]) -> tuple[list[bytes], np.ndarray]:
    texts = _strings(metadata, "tokens")
    if not texts:
        raise FormatError(f"{_KEY}tokens is missing or empty")
    if f"{_KEY}token_type" not in metadata:
        return texts, np.full(len(texts), TokenType.NORMAL, np.uint8)
    types = _numbers(metadata, "token_type", len(texts), "iu")
    return texts, np.where(np.isin(types, list(TokenType)), types, TokenType.NORMAL).astype(np.uint8)


def _facts(
    metadata: Mapping[str, Any],
    engine: Any,
    texts: list[bytes],
    types: np.ndarray,
    *,
    add_bos: bool,
    default_bos: int | None = None,
    default_eos: int | None = None,
    default_unk: int | None = None,
) -> Facts:
    _control_end_texts(texts, types)
    control = {texts[i].decode("utf-8", "replace"): i for i in np.flatnonzero(types == TokenType.CONTROL).tolist()}
    eos = _special(metadata, "eos", types, default_eos)
    facts = Facts(
        engine,
        len(texts),
        bos_token_id=_special(metadata, "bos", types, default_bos),
        eos_token_ids=end_token_ids([eos, _special(metadata, "eot", types), _special(metadata, "eom", types)], control),
        unk_token_id=_special(metadata, "unknown", types, default_unk),
        pad_token_id=_special(metadata, "padding", types),
        added=_added(metadata, texts, types),
        chat_templates=_templates(metadata),
    )
    if _flag(metadata, "add_bos_token", add_bos) and facts.bos_token_id is not None:
        facts.prefix_ids = (facts.bos_token_id,)
    if _flag(metadata, "add_eos_token", False) and eos is not None:
        facts.suffix_ids = (eos,)
    facts.named = name_special(facts, texts)
    return facts


def _control_end_texts(texts: list[bytes], types: np.ndarray) -> None:
    """Some converters type end-of-turn tokens as text. Left so, a user's message could end its own turn."""
    for text in {text.encode() for text in END_TEXTS}.intersection(texts):
        token_id = texts.index(text)
        if types[token_id] in (TokenType.NORMAL, TokenType.USER_DEFINED):
            types[token_id] = TokenType.CONTROL


def _special(metadata: Mapping[str, Any], name: str, types: np.ndarray, default: int | None = None) -> int | None:
    """The id under a key; without one, the default of old files, provided the token there is a special one."""
    key = f"{_KEY}{name}_token_id"
    value = metadata.get(key)
    if value is None:
        special = default is not None and default < len(types) and types[default] in (TokenType.CONTROL, TokenType.UNKNOWN)
        return default if special else None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(types):
        _log.warning("%s is %s, which is none of the %d tokens: ignored", key, repr(value)[:40], len(types))
        return None
    return value


def _added(metadata: Mapping[str, Any], texts: list[bytes], types: np.ndarray) -> tuple[AddedToken, ...]:
    name = str(metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name
    found = []
    ids = np.flatnonzero(np.isin(types, _MATCHED))
    for token_id, special in zip(ids.tolist(), (types[ids] != TokenType.USER_DEFINED).tolist(), strict=True):
        text = texts[token_id].decode("utf-8", "replace")
        swallows = phi3 and text not in _KEEPS_SPACE_BEHIND
        found.append(AddedToken(token_id, text, special, rstrip=swallows))
    return tuple(found)


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    for name, value in metadata.items():
        if isinstance(value, str) and name == _TEMPLATE:
            templates["default"] = value
        elif isinstance(value, str) and name.startswith(f"{_TEMPLATE}."):
            templates[name.removeprefix(f"{_TEMPLATE}.")] = value
    return templates

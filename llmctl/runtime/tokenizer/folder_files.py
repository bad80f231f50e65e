"""A tokenizer as the files of a Hugging Face folder: the reverse of `folder_source`.

tokenizer.json is what transformers reads. One that works by scores is written as the merges that do the same, the way
transformers itself converts such models, and as the tokenizer.model it once was, which has the scores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.runtime.tokenizer.bpe import MARKER
from llmctl.runtime.tokenizer.description import Description
from llmctl.runtime.tokenizer.facts import AddedToken, Facts, TokenType
from llmctl.runtime.tokenizer.folder_settings import TEMPLATE_FOLDER
from llmctl.runtime.tokenizer.spm_writer import write_spm_model

_FILLER = re.compile(rb"\[PAD(\d+)\]")
_PIECES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
_ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": MARKER}


@dataclass
class TokenizerFiles:
    """files: name → content. warnings: what the folder cannot say, a sentence each."""

    files: dict[str, bytes]
    warnings: list[str] = field(default_factory=list)


def tokenizer_files(description: Description, max_length: int) -> TokenizerFiles:
    """The files for this tokenizer. max_length: the model's context, for tokenizer_config.json.

    Tokens that only fill the embedding up ([PAD123], unused) are left out. Raises FormatError for a token that is no
    UTF-8, UnsupportedError for what a tokenizer.json cannot express.
    """
    made = TokenizerFiles({})
    texts = _texts(description)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, description) for token in description.facts.added if texts.get(token.id)],
        **_pipeline(description.facts),
        "model": _model(description, texts, made.warnings),
    }
    made.files["tokenizer.json"] = _json(document)
    made.files["tokenizer_config.json"] = _json(_config(description.facts, max_length))
    if description.scores is not None:
        _add_model_file(made, description, texts)
    for name, text in description.facts.chat_templates.items():
        file = "chat_template.jinja" if name == "default" else f"{TEMPLATE_FOLDER}/{_plain(name)}.jinja"
        made.files[file] = text.encode("utf-8", "surrogatepass")
    return made


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8") + b"\n"


def _plain(name: str) -> str:
    """A template's name comes from a file: it must not name another folder."""
    return re.sub(r"[^\w-]", "_", name)


def _texts(description: Description) -> dict[int, str]:
    """Id → text of every token that is one: fillers have none."""
    texts = {}
    for token_id, (raw, kind) in enumerate(zip(description.texts, description.types.tolist(), strict=True)):
        filler = _FILLER.fullmatch(raw) if kind == TokenType.UNUSED else None
        if not raw or (filler and int(filler[1]) == token_id):
            continue
        try:
            texts[token_id] = raw.decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"the token {token_id} is {raw[:40]!r}, no UTF-8: a tokenizer.json cannot hold it") from error
    return texts


def _added(token: AddedToken, description: Description) -> dict[str, Any]:
    """User-defined pieces of SentencePiece are sought in the text whose spaces are ▁ already, others as they stand."""
    written = description.texts[token.id].decode()
    flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip")}
    escaped = not token.special and MARKER in written
    return {"id": token.id, "content": written, **flags, "normalized": escaped or token.normalized, "special": token.special}


def _pipeline(facts: Facts) -> dict[str, Any]:
    """What happens to a text before and after the model."""
    settings = facts.settings
    if facts.engine == "bpe" and settings["byte_level"]:
        steps = {"normalizer": settings["normalizer"], "pre_tokenizer": settings["pre_tokenizer"]}
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    elif facts.engine == "bpe":
        steps = {"normalizer": settings["normalizer"], "pre_tokenizer": settings["pre_tokenizer"]}
        decoder = _marker_decoder(settings["strip_space"])
    else:
        steps = {"normalizer": _escaping(settings), "pre_tokenizer": None}
        decoder = _marker_decoder(settings["strip_space"])
    return {**steps, "post_processor": _surroundings(facts), "decoder": decoder}


def _escaping(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A normalizer that writes spaces as SentencePiece does."""
    if settings["collapse"] or settings["charsmap"] or settings["prefix"] == "first" or settings["prefix_unless_space"]:
        raise UnsupportedError("a tokenizer that normalizes text, or puts a space before the first word only, is not written yet")
    if settings["prefix"] == "never":
        return _ESCAPE
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARKER}, _ESCAPE]}


def _marker_decoder(strip_space: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": MARKER}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip_space:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _surroundings(facts: Facts) -> dict[str, Any] | None:
    """The post_processor that puts the tokens before and after a text."""
    if not facts.prefix_ids and not facts.suffix_ids:
        return None
    by_id = {token.id: token.text for token in facts.added}
    used = (*facts.prefix_ids, *facts.suffix_ids)
    if missing := [token_id for token_id in used if token_id not in by_id]:
        raise UnsupportedError(f"the token {missing[0]} is put around texts, but is no special token")
    before, after = ([by_id[i] for i in ids] for ids in (facts.prefix_ids, facts.suffix_ids))

    def around(name: str, kind: int) -> list[dict[str, Any]]:
        tokens = [{"SpecialToken": {"id": text, "type_id": kind}} for text in (*before, *after)]
        return [*tokens[: len(before)], {"Sequence": {"id": name, "type_id": kind}}, *tokens[len(before) :]]

    special = {by_id[i]: {"id": by_id[i], "ids": [i], "tokens": [by_id[i]]} for i in used}
    single, pair = around("A", 0), [*around("A", 0), *around("B", 1)]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _model(description: Description, texts: dict[int, str], warnings: list[str]) -> dict[str, Any]:
    vocabulary: dict[str, int] = {}
    for token_id, text in texts.items():
        vocabulary.setdefault(text, token_id)
    if len(vocabulary) < len(texts):
        twice = len(texts) - len(vocabulary)
        warnings.append(f"{twice} tokens have the text of another, a tokenizer.json keeps the first of each")
    settings = description.facts.settings
    unknown = settings["unk"]
    by_scores = description.scores is not None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else texts.get(unknown),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": by_scores or bool(settings["fuse_unk"]),
        "byte_fallback": bool((description.types == TokenType.BYTE).any()),
        "ignore_merges": False if by_scores else bool(settings["ignore_merges"]),
        "vocab": vocabulary,
        "merges": _merges_of_scores(description, vocabulary) if by_scores else _listed_merges(description),
    }


def _listed_merges(description: Description) -> list[Any]:
    """As texts "a b", which every version of the library reads, unless a half has a space inside."""
    pairs = [tuple(_text(half) for half in pair) for pair in description.merges or []]
    if any(" " in half for pair in pairs for half in pair):
        return [list(pair) for pair in pairs]
    return [" ".join(pair) for pair in pairs]


def _text(half: str | bytes) -> str:
    return half if isinstance(half, str) else half.decode()


def _merges_of_scores(description: Description, vocabulary: Mapping[str, int]) -> list[Any]:
    """Every way to make a piece of two pieces, the piece of the highest score first."""
    types, scores = description.types.tolist(), np.asarray(description.scores, np.float32).tolist()
    kept = {text: token_id for text, token_id in vocabulary.items() if types[token_id] in _PIECES}
    ranked = sorted(kept.items(), key=lambda item: (-scores[item[1]], item[1]))
    found: list[tuple[str, str]] = []
    for text, _ in ranked:
        ways = [(text[:at], text[at:]) for at in range(1, len(text)) if text[:at] in kept and text[at:] in kept]
        found += sorted(ways, key=lambda pair: (kept[pair[0]], kept[pair[1]])) if ways[1:] else ways
    return [[left, right] for left, right in found] if any(" " in text for text in kept) else list(map(" ".join, found))


def _config(facts: Facts, max_length: int) -> dict[str, Any]:
    return {
        # The class that takes tokenizer.json as it is; those named after a family build their own steps.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(facts.prefix_ids),
        "add_eos_token": bool(facts.suffix_ids),
        **facts.named,
    }


def _add_model_file(made: TokenizerFiles, description: Description, texts: dict[int, str]) -> None:
    """tokenizer.model beside the JSON, if SentencePiece loads such a one."""
    facts = description.facts
    count = max(texts) + 1
    pieces, types = description.texts[:count], description.types[:count]
    eos = facts.eos_token_ids[0] if facts.eos_token_ids else None
    special = {"unk": facts.settings["unk"], "bos": facts.bos_token_id, "eos": eos, "pad": facts.pad_token_id}
    try:
        made.files["tokenizer.model"] = write_spm_model(
            pieces,
            np.asarray(description.scores, np.float32)[:count].tolist(),
            _spm_types(types, facts.settings["unk"]),
            {name: token_id if token_id is not None and token_id < count else None for name, token_id in special.items()},
            add_dummy_prefix=facts.settings["prefix"] != "never",
            remove_extra_whitespaces=facts.settings["collapse"],
        )
    except LlmctlError as error:
        made.warnings.append(f"tokenizer.model is left out, tokenizer.json has it all: {error}")


def _spm_types(types: np.ndarray, unknown: int | None) -> list[int]:
    """SentencePiece has one unknown piece. GGUF files type it as they like, and some type others so that are control tokens."""
    changed = np.where(types == TokenType.UNKNOWN, np.uint8(TokenType.CONTROL), types)
    if unknown is not None and unknown < len(changed):
        changed[unknown] = TokenType.UNKNOWN
    return changed.tolist()

"""The tokenizer.json of a Hugging Face folder, as written by the `tokenizers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer.bpe import MARKER, text_parts
from llmctl.runtime.tokenizer.description import Description, name_special, retype
from llmctl.runtime.tokenizer.facts import AddedToken, Facts, TokenType
from llmctl.runtime.tokenizer.folder_settings import FolderSettings, added_token
from llmctl.runtime.tokenizer.spm_model import SpmModel

_VOCABULARY_BEGIN = re.compile(rb'"vocab"\s*:\s*\{\s*')
_MERGES_BEGIN = re.compile(rb'"merges"\s*:\s*\[')  # a token "merges" has a number behind it
_MERGES_END = re.compile(rb"\]\s*\}\s*\}\s*\Z")
_BYTE_TEXTS = [f"<0x{byte:02X}>" for byte in range(256)]


def read_document(path: Path, data: bytes) -> dict[str, Any]:
    """The document, checked as far as its outer form goes. Errors: FormatError, UnsupportedError naming the file."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not a tokenizer.json: {error}") from error
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise FormatError(f"{path}: not a tokenizer.json: it has no model")
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind != "BPE":
        raise UnsupportedError(f"{path}: the tokenizer's model is of type {kind}; only BPE is supported")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):
            raise UnsupportedError(f"{path}: the tokenizer's model has {name} {quoted(model[name])}, which is not supported")
    _check_vocabulary(path, model.get("vocab"))
    return document


def read_document_beside(path: Path, data: bytes, pieces: list[bytes]) -> dict[str, Any] | None:
    """The document without its merges, provided its vocabulary is that of these pieces, in their order.

    Parsing the merges of a 262k vocabulary takes most of a second, and their order follows from the scores of the pieces.
    None if it is another vocabulary, or written so that it is not found quickly.
    """
    begin = _VOCABULARY_BEGIN.search(data)
    merges = begin and _find_merges(data, begin.end())
    end = _MERGES_END.search(data, max(0, len(data) - 256))
    if not (begin and merges and end):
        return None
    try:
        vocabulary = json.loads(b"{" + data[begin.end() : merges.start()].rstrip().removesuffix(b","))
    except (ValueError, RecursionError):
        return None
    texts = b"\0".join(pieces).decode("utf-8", "replace")
    alike = len(vocabulary) == len(pieces) == texts.count("\0") + 1 and "\0".join(vocabulary) == texts
    if not alike or list(vocabulary.values()) != list(range(len(pieces))):
        return None
    document = read_document(path, b"".join([data[: begin.end()], b'"":0},', merges[0], data[end.start() :]]))
    document["model"]["vocab"] = vocabulary
    return document


def _find_merges(data: bytes, position: int) -> re.Match[bytes] | None:
    while (position := data.find(b'"merges"', position)) >= 0:
        if found := _MERGES_BEGIN.match(data, position):
            return found
        position += 1
    return None


def _check_vocabulary(path: Path, vocabulary: Any) -> None:
    if not isinstance(vocabulary, dict) or not vocabulary:
        raise FormatError(f"{path}: model.vocab must be an object of text → id with at least one entry")
    if set(map(type, vocabulary.values())) != {int}:
        raise FormatError(f"{path}: model.vocab holds an id that is no integer")
    low, high = min(vocabulary.values()), max(vocabulary.values())
    if low < 0 or high > 2 * len(vocabulary) + 65536:
        raise FormatError(f"{path}: model.vocab holds the ids {low} to {high} for {len(vocabulary)} tokens")


def describe_document(path: Path, document: Mapping[str, Any], settings: FolderSettings) -> Description:
    """The tokenizer, merged as the document says.

    Errors: FormatError, UnsupportedError naming the file.
    """
    with _structure_of(path):
        return _describe_document(path, document, settings)


def describe_pair(path: Path, document: Mapping[str, Any], spm: SpmModel, settings: FolderSettings) -> Description | None:
    """The tokenizer with the pieces and scores of a tokenizer.model and all else from the tokenizer.json beside it.

    document: see `read_document_beside`. None if it does what scores cannot. Errors as `describe_document`.
    """
    with _structure_of(path):
        return _describe_pair(path, document, spm, settings)


@contextmanager
def _structure_of(path: Path) -> Iterator[None]:
    """A document from a stranger may hold anything anywhere: what trips over it says so."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: not the structure of a tokenizer.json ({quoted(error)})") from error


def _describe_document(path: Path, document: Mapping[str, Any], settings: FolderSettings) -> Description:
    model = document["model"]
    vocabulary: dict[str, int] = model["vocab"]
    facts, types = _facts(path, document, settings)
    texts = _texts(facts, vocabulary)
    byte_level = _mentions(document, "ByteLevel")
    if model.get("byte_fallback"):
        types[[vocabulary[text] for text in _BYTE_TEXTS if text in vocabulary]] = TokenType.BYTE
    facts.settings = {
        "pre_tokenizer": document.get("pre_tokenizer"),
        "normalizer": document.get("normalizer"),
        "byte_level": byte_level,
        "ignore_merges": bool(model.get("ignore_merges", False)),
        "strip_space": _strips_space(path, document.get("decoder"), byte_level),
        "unk": _unknown(path, model),
        "fuse_unk": bool(model.get("fuse_unk", False)),
    }
    _check_text_parts(path, facts.settings)
    retype(types, facts.added, facts.settings["unk"])
    encoded = _encoded(texts)
    facts.named = name_special(facts, encoded) | settings.named
    return Description(facts, encoded, types, merges=_pairs(path, model.get("merges") or []), index=vocabulary)


def _describe_pair(path: Path, document: Mapping[str, Any], spm: SpmModel, settings: FolderSettings) -> Description | None:
    prefix = space_prefix(document)
    if prefix is None or not document["model"].get("byte_fallback") or spm.charsmap or spm.remove_extra_whitespaces:
        return None
    facts, _ = _facts(path, document, settings)
    if any(token.normalized for token in facts.added if not token.special):
        return None
    extra = facts.vocab_size - len(spm.pieces)
    texts = spm.pieces + [b""] * extra
    for token in facts.added:
        texts[token.id] = texts[token.id] or token.text.encode("utf-8", "replace")
    scores = np.append(spm.scores, np.zeros(extra, np.float32))
    types = np.append(spm.types, np.full(extra, TokenType.UNUSED, np.uint8))
    facts.settings = prefix | {
        "strip_space": _strips_space(path, document.get("decoder"), byte_level=False),
        "collapse": False,
        "charsmap": None,
        "unk": _unknown(path, document["model"]),
    }
    retype(types, facts.added, facts.settings["unk"])
    facts.engine = "sentencepiece"
    facts.named = name_special(facts, texts) | settings.named
    facts.added += pieces_found_whole(spm, {token.id for token in facts.added})
    return Description(facts, texts, types, scores=scores)


def pieces_found_whole(spm: SpmModel, known: set[int]) -> tuple[AddedToken, ...]:
    """The user-defined, control and unknown pieces of a model that are not among the known ids."""
    found = []
    ids = np.flatnonzero(np.isin(spm.types, (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)))
    for token_id, special in zip(ids.tolist(), (spm.types[ids] != TokenType.USER_DEFINED).tolist(), strict=True):
        if token_id not in known:
            text = spm.pieces[token_id].decode("utf-8", "replace")
            found.append(AddedToken(token_id, text if special else text.replace(MARKER, " "), special))
    return tuple(found)


def _facts(path: Path, document: Mapping[str, Any], settings: FolderSettings) -> tuple[Facts, np.ndarray]:
    """Facts from the document and the settings beside it, and a type per id, all normal."""
    vocabulary: dict[str, int] = document["model"]["vocab"]
    try:
        listed = [added_token(int(entry["id"]), entry) for entry in document.get("added_tokens") or []]
        size = max(vocabulary.values()) + 1
        added = settings.complete({token.id: token for token in listed}, vocabulary.get, size)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path}: added_tokens holds an entry that is no token ({quoted(error)})") from None
    size = max([size, *(token.id + 1 for token in added)])
    if size > 4 * len(vocabulary) + 131072 or any(token.id < 0 for token in added):
        raise FormatError(f"{path}: added_tokens holds ids up to {size - 1} for {len(vocabulary)} tokens")
    facts = Facts("bpe", size, added=added, unk_token_id=_unknown(path, document["model"]))
    by_text = {token.text: token.id for token in added}
    find: Callable[[str], int | None] = lambda text: by_text.get(text, vocabulary.get(text))  # noqa: E731
    facts.prefix_ids, facts.suffix_ids = _surroundings(document.get("post_processor"), find)
    for token_id in (*facts.prefix_ids, *facts.suffix_ids):
        if not isinstance(token_id, int) or not 0 <= token_id < size:
            raise FormatError(f"{path}: post_processor adds the id {quoted(token_id)}, which is none of the {size} tokens")
    settings.fill(facts, find)
    return facts, np.full(size, TokenType.NORMAL, np.uint8)


def _check_text_parts(path: Path, settings: Mapping[str, Any]) -> None:
    try:
        text_parts(settings["normalizer"], settings["pre_tokenizer"])
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error


def _texts(facts: Facts, vocabulary: Mapping[str, int]) -> list[str]:
    texts = list(vocabulary) + [""] * (facts.vocab_size - len(vocabulary))
    if list(vocabulary.values()) != list(range(len(vocabulary))):
        texts = [""] * facts.vocab_size
        for text, token_id in vocabulary.items():
            texts[token_id] = text
    for token in facts.added:
        texts[token.id] = texts[token.id] or token.text
    return texts


def _encoded(texts: list[str]) -> list[bytes]:
    """Every text as UTF-8, in one go where that is possible."""
    split = "\0".join(texts).encode("utf-8", "replace").split(b"\0")
    return split if len(split) == len(texts) else [text.encode("utf-8", "replace") for text in texts]


def _unknown(path: Path, model: Mapping[str, Any]) -> int | None:
    text = model.get("unk_token")
    if text is None:
        return None
    if text not in model["vocab"]:
        raise FormatError(f"{path}: model.unk_token is {quoted(text)}, which is not in the vocabulary")
    return model["vocab"][text]


def _pairs(path: Path, merges: list[Any]) -> list[list[str]]:
    """The merges, each written as a list of two or as two texts with a space between."""
    kinds = set(map(type, merges))
    pairs = [merge.split(" ") for merge in merges] if kinds == {str} else merges
    if kinds - {str, list} or set(map(len, pairs)) - {2} or set(map(type, chain.from_iterable(pairs))) - {str}:
        raise FormatError(f"{path}: model.merges holds {str(_first_odd(pairs))[:40]!r}, which is no pair")
    return pairs


def _first_odd(pairs: list[Any]) -> Any:
    good = lambda pair: isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair)  # noqa: E731
    return next((pair for pair in pairs if not good(pair)), pairs[:1])


def _steps(step: Any) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, pre_tokenizer, post_processor or decoder, sequences opened."""
    if not isinstance(step, dict):
        return
    inner = [step.get(name) for name in ("normalizers", "pretokenizers", "processors", "decoders")]
    if step.get("type") == "Sequence":
        for one in next((found for found in inner if isinstance(found, list)), []):
            yield from _steps(one)
    else:
        yield step


def _mentions(document: Mapping[str, Any], kind: str) -> bool:
    steps = [*_steps(document.get("pre_tokenizer")), *_steps(document.get("decoder"))]
    return any(step.get("type") == kind for step in steps)


def _surroundings(processor: Any, find: Callable[[str], int | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids a post_processor puts before and after a single text."""
    for step in _steps(processor):
        if step.get("type") == "TemplateProcessing":
            return _template(step, find)
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            return (step["cls"][1],), (step["sep"][1],)
    return (), ()


def _template(step: Mapping[str, Any], find: Callable[[str], int | None]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    sides: tuple[list[int], list[int]] = ([], [])
    after = 0
    for item in step.get("single") or []:
        if "Sequence" in item:
            after = 1
        else:
            text = item["SpecialToken"]["id"]
            ids = (step.get("special_tokens") or {}).get(text, {}).get("ids", [find(text)])
            sides[after].extend(token_id for token_id in ids if token_id is not None)
    return tuple(sides[0]), tuple(sides[1])


def _strips_space(path: Path, decoder: Any, byte_level: bool) -> bool:
    """Whether decoding drops one space at the beginning. UnsupportedError for decoders that join texts in other ways."""
    steps = list(_steps(decoder))
    if byte_level:
        return False
    if not any(_restores_spaces(step) for step in steps):
        raise UnsupportedError(f"{path}: its decoder is neither byte-level nor one that turns {MARKER} into a space")
    for step in steps:
        if step.get("type") == "Strip" and step.get("start"):
            return True
        if step.get("type") == "Metaspace":
            return step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    return False


def _restores_spaces(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": MARKER} and step.get("content") == " "
    return step.get("type") == "Metaspace" and step.get("replacement", MARKER) == MARKER


def space_prefix(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """How spaces and the prefix space are written, as settings of the SentencePiece engine; None if it cannot do it."""
    replaces = False
    scheme, unless_space = "never", False
    for step in _steps(document.get("normalizer")):
        if step == {"type": "Replace", "pattern": {"String": " "}, "content": MARKER}:
            replaces = True
        elif step == {"type": "Prepend", "prepend": MARKER} and not replaces:
            scheme = "always"
        else:
            return None
    for step in _steps(document.get("pre_tokenizer")):
        if step.get("type") == "Metaspace" and step.get("replacement") == MARKER and not step.get("split", True):
            if scheme != "never":
                return None
            scheme, unless_space, replaces = step.get("prepend_scheme", "always"), True, True
        elif not (step.get("type") == "Split" and step.get("pattern") == {"String": " "} and replaces):
            return None
    return {"prefix": scheme, "prefix_unless_space": unless_space} if replaces else None

"""The tokenizer in a Hugging Face folder: tokenizer.json, tokenizer.model, and the small files beside them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError
from llmctl.runtime.checkpoint.files import exists, regular_size
from llmctl.runtime.tokenizer.description import Description, name_special, retype
from llmctl.runtime.tokenizer.facts import Facts, TokenType
from llmctl.runtime.tokenizer.folder_settings import (
    SETTING_FILES,
    TEMPLATE_FOLDER,
    FolderSettings,
    read_folder_settings,
    template_files,
)
from llmctl.runtime.tokenizer.spm_model import SpmModel, read_spm_model
from llmctl.runtime.tokenizer.tokenizer_json import (
    describe_document,
    describe_pair,
    pieces_found_whole,
    read_document,
    read_document_beside,
)

_DOCUMENT = "tokenizer.json"
_MODEL = "tokenizer.model"
_NOT_READ = ("vocab.json", "merges.txt", "tekken.json", "tiktoken.model", "vocab.txt", "spiece.model")
_MAX_BYTES = 1 << 30
_SETTLED_SECONDS = 2.0  # coarsest time stamp of a file system in use


def identity(folder: Path) -> list[bytes]:
    """What tells one state of the folder from another: place, size, times and inode of every file that is read."""
    paths = [folder / name for name in (_DOCUMENT, _MODEL, *SETTING_FILES, TEMPLATE_FOLDER)]
    parts = [os.fsencode(folder.resolve())]
    for path in [*paths, *template_files(folder)]:
        stat = _stat(path)
        stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) if stat else ()
        parts.append(os.fsencode(path.name) + repr(stamp).encode())
    return parts


def is_settled(folder: Path) -> bool:
    """Whether every file is old enough that a later change must show in its time stamps."""
    newest = time.time() - _SETTLED_SECONDS
    paths = [folder / name for name in (_DOCUMENT, _MODEL, *SETTING_FILES, TEMPLATE_FOLDER)]
    stats = [stat for path in [*paths, *template_files(folder)] if (stat := _stat(path))]
    return all(max(stat.st_mtime, stat.st_ctime) < newest for stat in stats)


def describe_folder(folder: Path) -> Description:
    """The tokenizer in a folder.

    tokenizer.json counts where both vocabulary files are there: it is what transformers reads, and where later changes
    (added tokens, their flags) are made. If tokenizer.model holds the very same pieces, its scores stand in for the
    merges: the ids are the same and it is ready several times sooner. They differ only where the JSON forgot that a
    piece is user-defined (a copy made from a GGUF file forgets Gemma's runs of spaces): there the model file is right.
    Errors: ModelNotFoundError without either file, FormatError, UnsupportedError; each names the file.
    """
    document_path, model_path = folder / _DOCUMENT, folder / _MODEL
    settings = read_folder_settings(folder)
    data = _content(document_path)
    if data is None:
        return _from_model(model_path, settings)
    spm = _spm_beside(model_path)
    if spm is not None:
        document = read_document_beside(document_path, data, spm.pieces)
        description = document and describe_pair(document_path, document, spm, settings)
        if description:
            return description
    return describe_document(document_path, read_document(document_path, data), settings)


def _spm_beside(path: Path) -> SpmModel | None:
    """The model, if there is one that can be used; here it is but a shortcut."""
    data = _content(path)
    try:
        return None if data is None else read_spm_model(data)
    except LlmctlError:
        return None


def _from_model(path: Path, settings: FolderSettings) -> Description:
    data = _content(path)
    if data is None:
        others = [name for name in _NOT_READ if exists(path.with_name(name))]
        hint = f"; {', '.join(others)} cannot be read: save the tokenizer once with transformers, which writes {_DOCUMENT}"
        missing = f"{path.parent}: no tokenizer: neither {_DOCUMENT} nor {_MODEL} is there"
        raise ModelNotFoundError(missing + (hint if others else ""))
    try:
        return describe_model(read_spm_model(data), settings)
    except LlmctlError as error:
        raise type(error)(f"{path}: {error}") from error


def describe_model(spm: SpmModel, settings: FolderSettings) -> Description:
    """The tokenizer of a tokenizer.model alone, with the settings beside it."""
    index = {piece.decode("utf-8", "replace"): token_id for token_id, piece in enumerate(spm.pieces)}
    added = settings.complete({token.id: token for token in pieces_found_whole(spm, set())}, index.get, len(spm.pieces))
    size = max([len(spm.pieces), *(token.id + 1 for token in added)])
    extra = size - len(spm.pieces)
    texts, types = spm.pieces + [b""] * extra, np.append(spm.types, np.full(extra, TokenType.UNUSED, np.uint8))
    for token in added:
        texts[token.id] = texts[token.id] or token.text.encode("utf-8", "replace")
    facts = _model_facts(spm, size, settings)
    facts.added = added
    find = _finder(index, facts)
    settings.fill(facts, find)
    facts.named = name_special(facts, texts) | settings.named
    retype(types, added, facts.settings["unk"])
    return Description(facts, texts, types, scores=np.append(spm.scores, np.zeros(extra, np.float32)))


def _finder(index: dict[str, int], facts: Facts) -> Callable[[str], int | None]:
    by_text = {token.text: token.id for token in facts.added}
    return lambda text: by_text.get(text, index.get(text))


def _model_facts(spm: SpmModel, size: int, settings: FolderSettings) -> Facts:
    known = [None if token_id < 0 else token_id for token_id in (spm.bos_id, spm.eos_id, spm.unk_id)]
    bos, eos, unk = known
    facts = Facts("sentencepiece", size, bos_token_id=bos, unk_token_id=unk)
    facts.eos_token_ids = () if eos is None else (eos,)
    facts.prefix_ids = () if bos is None else (bos,)
    spaced = spm.add_dummy_prefix if settings.add_prefix_space is None else settings.add_prefix_space
    prefix = "never" if not spaced else "first" if settings.legacy is False else "always"
    facts.settings = {
        "prefix": prefix,
        "prefix_unless_space": False,
        "strip_space": prefix != "never",
        "collapse": spm.remove_extra_whitespaces,
        "charsmap": _base64(spm.charsmap),
        "unk": unk,
    }
    return facts


def _base64(charsmap: bytes) -> str | None:
    import base64

    return base64.b64encode(charsmap).decode() if charsmap else None


def _content(path: Path) -> bytes | None:
    if not exists(path):
        return None
    size = regular_size(path)  # a pipe would be waited for
    if size > _MAX_BYTES:
        raise FormatError(f"{path}: {size} bytes are no tokenizer, the limit is {_MAX_BYTES}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None

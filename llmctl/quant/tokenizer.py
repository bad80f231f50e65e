"""The tokenizer of a folder as GGUF keys, checked by tokenizing with what a reader will make of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from llmctl.errors import LlmctlError, UnsupportedError
from llmctl.runtime.tokenizer.folder_source import describe_folder
from llmctl.runtime.tokenizer.gguf_metadata import TokenizerMetadata, gguf_metadata
from llmctl.runtime.tokenizer.gguf_source import describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.same_ids import find_difference


class Folder(Protocol):
    """A Hugging Face folder, with its weights or without."""

    @property
    def folder(self) -> Path:
        """Where its files lie."""


def tokenizer_keys(
    checkpoint: Folder,
    rows: int,
    beside: Mapping[str, Any],
    *,
    pre: str | None = None,
    drop_surplus: bool = False,
) -> TokenizerMetadata:
    """The tokenizer.* keys for a model with `rows` rows of embedding.

    beside: the other keys of the file, since readers look at some of them too.
    They are read back as from a file, and both tokenizers must give the same ids for texts of every kind: UnsupportedError
    with the first difference. With `pre` the user vouches for the rule, and a difference is a warning.
    Other errors: those of `gguf_metadata` and of a tokenizer that cannot be read; ModelNotFoundError if there is none.
    """
    try:
        description = describe_folder(checkpoint.folder)
        made = gguf_metadata(description, rows, pre=pre, drop_surplus=drop_surplus)
        expected, found = build_tokenizer(description), build_tokenizer(describe_gguf({**beside, **made.keys}))
    except LlmctlError as error:
        raise type(error)(_located(str(error), checkpoint)) from error
    added = [token.text for token in description.facts.added if token.id < rows]
    if difference := find_difference(expected, found, added):
        message = f"with the tokenizer written, {difference}"
        if pre is None:
            raise UnsupportedError(f"{checkpoint.folder}: GGUF cannot express this tokenizer: {message}")
        made.warnings.append(message)
    if missed := sorted(set(expected.eos_token_ids) - set(found.eos_token_ids)):
        made.warnings.append(f"readers of the file will not take the tokens {missed} for an end")
    return made


def _located(message: str, checkpoint: Folder) -> str:
    return message if str(checkpoint.folder) in message else f"{checkpoint.folder}: {message}"

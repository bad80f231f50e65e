"""The tokenizer of a checkpoint, from the disk cache where it can be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmctl.errors import LlmctlError
from llmctl.runtime.checkpoint import Checkpoint
from llmctl.runtime.tokenizer import cache, folder_source, gguf_source
from llmctl.runtime.tokenizer.description import Description, prepare
from llmctl.runtime.tokenizer.tokenizer import Tokenizer


def load_tokenizer(checkpoint: Checkpoint, *, pre: str | None = None) -> Tokenizer:
    """The tokenizer that belongs to the checkpoint: in a GGUF file's metadata, or beside safetensors files.

    pre: the pre-tokenizer rule, where a GGUF file names none or a wrong one.
    Errors: FormatError, UnsupportedError, ModelNotFoundError (a folder without tokenizer files), naming the file.
    """
    if checkpoint.kind == "safetensors":
        return _from_folder(checkpoint.folder)
    try:
        return _from_gguf(checkpoint, pre)
    except LlmctlError as error:
        raise type(error)(f"{checkpoint.path}: {error}") from error


def build_tokenizer(description: Description) -> Tokenizer:
    """A tokenizer without the cache."""
    return Tokenizer(description.facts, prepare(description))


@contextmanager
def _no_collector() -> Iterator[None]:
    """Half a million strings and pairs are about to be made, no cycle among them: searching them over and over is waste."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _from_folder(folder: Path) -> Tokenizer:
    before = folder_source.identity(folder)
    name = cache.key([b"folder", *before])
    found = cache.load(name)
    if found is None:
        with _no_collector():
            description = folder_source.describe_folder(folder)
            found = description.facts, prepare(description)
        # A file changed while it was read, or so young that its next change may leave no trace, is not kept.
        if folder_source.is_settled(folder) and folder_source.identity(folder) == before:
            cache.save(name, *found)
    return Tokenizer(*found)


def _from_gguf(checkpoint: Checkpoint, pre: str | None) -> Tokenizer:
    # Named by the content itself: the file behind the path may have been replaced since it was opened.
    metadata = checkpoint.metadata
    name = cache.key([b"gguf", (pre or "").encode(), *gguf_source.content_parts(metadata)])
    found = cache.load(name)
    if found is None:
        with _no_collector():
            description = gguf_source.describe_gguf(metadata, pre=pre)
            found = description.facts, prepare(description)
        cache.save(name, *found)
    return Tokenizer(*found)

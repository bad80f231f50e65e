"""--prompt-cache, and chats that are saved and gone on with: what was said, and the cache it left."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.commands import console
from llmctl.errors import FormatError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from llmctl.commands.chat import Conversation
    from llmctl.runtime.engine import Engine


_LARGEST_UNASKED = 256 << 20
"""Bytes of cache that the end of a chat writes without being told to."""


class PromptCache:
    """The file of --prompt-cache beside one engine. It is read if it is there, and written where there is more to keep."""

    def __init__(self, path: Path, engine: Engine) -> None:
        from llmctl.runtime.saved_cache import page_layout

        self.path, self._engine, self._known = path, engine, 0
        page_layout(engine.model)  # refused before anything is computed

    @cached_property
    def _model(self) -> str:
        from llmctl.runtime.saved_cache import model_hash

        return model_hash(self._engine.model.checkpoint)

    def load(self, token_ids: list[int]) -> None:
        """Let the engine find what the file has. Errors: FormatError for a file that is none, or is of something else."""
        from llmctl.runtime.saved_cache import put_back, read_cache

        try:
            saved = read_cache(self.path)
        except FileNotFoundError:
            return
        try:
            put_back(self.path, saved, self._engine, self._model)
        except FormatError as error:
            raise FormatError(f"{error}; remove the file, or name another one with --prompt-cache") from None
        if saved.token_ids[: len(token_ids)] == token_ids[: len(saved.token_ids)]:
            self._known = len(saved.token_ids)

    def save(self, token_ids: list[int]) -> None:
        """Keep the text, unless the file has as much of it. Errors: OutputError."""
        from llmctl.runtime.cache.memory import BLOCK_SIZE
        from llmctl.runtime.saved_cache import save_cache

        if len(token_ids) // BLOCK_SIZE * BLOCK_SIZE > self._known:
            count = save_cache(self.path, self._engine, token_ids, self._model)
            console.detail(f"prompt cache: {count} tokens kept in {self.path}")


def last_chat() -> Path:
    """Where the last chat is kept for --continue."""
    from llmctl.runtime import paths

    return paths.home() / "last-chat.safetensors"


def keep_last_chat(conversation: Conversation) -> None:
    """Keep a chat for --continue, for its owner's eyes; without its cache where that is large. Errors: as `save_chat`."""
    path = last_chat()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_chat(conversation, path, most_bytes=_LARGEST_UNASKED)
    path.chmod(0o600)


def save_chat(conversation: Conversation, path: Path, *, most_bytes: int | None = None) -> int:
    """Write messages and cache, the latter if it takes at most so many bytes; returns the tokens whose cache is kept.

    Errors: OutputError, UsageError if nothing was said, UnsupportedError for a backend whose cache cannot be saved.
    """
    from llmctl.runtime.cache.memory import bytes_per_token
    from llmctl.runtime.saved_cache import model_hash, save_cache

    if not conversation.messages:
        raise UsageError("there is nothing to save yet")
    extra = {"messages": conversation.messages, "system": conversation.system, "first": conversation.first}
    sent = conversation.messages[conversation.first :]
    token_ids = conversation.token_ids(sent, reply=False)
    each = bytes_per_token(conversation.model.config.kv_layers(), conversation.model.kv_type) or 0
    if most_bytes is not None and each * len(token_ids) > most_bytes:
        token_ids = []
    return save_cache(path, conversation.engine, token_ids, model_hash(conversation.model.checkpoint), extra)


def load_chat(conversation: Conversation, path: Path) -> str:
    """Go on with a saved chat; says what was read. Where only the cache is of other kernels or another element type, it is
    computed again, which is said.

    Errors: FormatError for a file that is none or of another model; OSError. The conversation is then as before.
    """
    from llmctl.runtime.saved_cache import model_hash, put_back, read_cache

    saved = read_cache(path)
    messages, system, first = _checked(path, saved.extra)
    model = model_hash(conversation.model.checkpoint)
    if saved.model != model:
        raise FormatError(f"{path}: a chat with another model")
    try:
        count = put_back(path, saved, conversation.engine, model)
        kept = f"{count} tokens of it need not be computed again"
    except (FormatError, UnsupportedError) as error:
        kept = f"its cache is not used ({error})"
    conversation.messages, conversation.system, conversation.first, conversation.last = messages, system, first, None
    return f"{len(messages)} messages from {path}; {kept}."


def _checked(path: Path, extra: dict[str, Any]) -> tuple[list[dict[str, str]], str | None, int]:
    messages, system, first = extra.get("messages"), extra.get("system"), extra.get("first")
    is_sound = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not is_sound or not isinstance(system, (str, type(None))) or not isinstance(first, int) or not 0 <= first <= len(messages):
        raise FormatError(f"{path}: there is no chat in it")
    return messages, system, first

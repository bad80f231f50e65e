"""What is said to the model: which argument is the prompt, and the text of files and of stdin."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from llmctl.commands import console
from llmctl.errors import UsageError

_PATH_STARTS = ("/", "./", "../", "~")
_MODEL_SUFFIXES = (".gguf", ".safetensors", ".json")


def split_arguments(first: str | None, second: str | None, prompt: str | None) -> tuple[str | None, str | None]:
    """(MODEL, PROMPT) from the two positional arguments and --prompt.

    A lone argument beside --prompt is the model. Alone, it is the model if it exists as a path, looks like one, or could be a
    model's name (letters, digits and ._+=-/: only); anything else, such as text with spaces, is the prompt.
    """
    if second is not None and prompt is not None:
        raise UsageError("the prompt was given twice: as an argument and with --prompt")
    if second is not None or prompt is not None or first is None:
        return first, second if prompt is None else prompt
    return (first, None) if names_model(first) else (None, first)


def names_model(text: str) -> bool:
    """Whether a lone argument is meant as a model; that there is one is not said."""
    from llmctl.runtime.store import is_model_name

    looks_like_path = text.startswith(_PATH_STARTS) or text.lower().endswith(_MODEL_SUFFIXES)
    return looks_like_path or not text.strip() or is_model_name(text) or os.path.exists(text)  # noqa: PTH110 (any text)


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file, its byte order mark dropped. Errors: OSError, UsageError naming the first byte that is no UTF-8."""
    return _decode(path.read_bytes(), f"{what} {path}")


def read_stdin() -> str | None:
    """Piped stdin to its end; None on a terminal, where stdin is closed, and where there is nothing but white space."""
    if sys.stdin is None or console.is_terminal(sys.stdin):
        return None
    text = _decode(read_stdin_bytes(), "standard input")
    return text if text.strip() else None


def read_stdin_bytes() -> bytes:
    """Stdin to its end; nothing where it is closed. Errors: UsageError."""
    try:
        return b"" if sys.stdin is None else sys.stdin.buffer.read()
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror or error}") from error


def _decode(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}") from None


def join_prompt(piped: str | None, file_text: str | None, prompt: str | None) -> str | None:
    """The whole prompt: stdin, then --file, then the argument, each beginning on a line of its own. None if there is nothing.

    A line break that ends the last file or stdin is not part of the prompt.
    """
    parts = [part for part in (piped, file_text) if part is not None]
    if prompt is None:
        return _lines(parts[:-1]) + parts[-1].removesuffix("\n").removesuffix("\r") if parts else None
    return _lines(parts) + prompt


def whole_prompt(file: Path | None, argument: str | None) -> str | None:
    """The prompt of a command line: piped stdin, then --file (- is stdin alone), then the argument. None if there is nothing."""
    argument = None if argument is None else text_argument(argument, "the prompt argument")
    text = None if file is None or str(file) == "-" else read_text(file, "--file")
    return join_prompt(read_stdin(), text, argument)


def text_argument(text: str, what: str) -> str:
    """An argument that the model is to read, as UTF-8 whatever the locale. Errors: UsageError if its bytes are not."""
    if not any(0xD800 <= ord(c) < 0xE000 for c in text):
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None


def _lines(parts: list[str]) -> str:
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)

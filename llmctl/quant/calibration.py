"""Calibration text as rows of token ids: from a file, a folder, conversations, or the small set that comes with the program.

Long texts are split into rows, short ones kept as they are, and rows are never padded: what statistics are made of is text.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, UsageError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.tokenizer import Tokenizer
from llmctl.runtime.tokenizer.chat_template import encode_chat

BUILT_IN = "built-in (WikiText-2 excerpt, CC BY-SA 3.0)"
_TEXTS, _LINES = (".txt", ".md"), (".jsonl", ".ndjson")
_CONVERSATION_KEYS = ("messages", "conversations")
_TEXT_KEYS = ("text", "content", "prompt")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Calibration:
    """rows: ids of each, at most `row_length` of them. held_out: rows of the same text that are not calibrated with, for the
    overfit check. name: of the text, for reports. documents: texts or conversations read."""

    rows: list[list[int]]
    held_out: list[list[int]]
    name: str
    documents: int
    row_length: int

    @property
    def num_tokens(self) -> int:
        """Ids in all rows."""
        return sum(map(len, self.rows))

    @property
    def digest(self) -> str:
        """Of the rows, so that two runs can be told apart."""
        found = hashlib.sha256()
        for row in self.rows:
            found.update(np.array([len(row), *row], "<i8").tobytes())
        return found.hexdigest()


def read_calibration(
    source: Path | None, tokenizer: Tokenizer, *, num_samples: int, row_length: int, seed: int, num_held_out: int = 0
) -> Calibration:
    """Rows of text to calibrate with.

    source: a text, a .jsonl file (a text or a conversation a line; conversations are written by the model's chat template), a
    folder of such files, or None for the built-in set. num_samples: most rows; which ones the seed decides, in the order of the
    text. num_held_out: most rows for `held_out`, of those left over. Errors name the file and the line.
    """
    documents = list(_documents(source, tokenizer))
    rows = [row for ids in documents for row in split(ids, row_length, tokenizer)]
    if not rows:
        raise UsageError(f"{source}: there is no text to calibrate with")
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    chosen, others = sorted(order[:num_samples]), order[num_samples:]
    held_out = [rows[i] for i in sorted(i for i in others if len(rows[i]) == row_length)[:num_held_out]]
    name = BUILT_IN if source is None else str(source)
    return Calibration([rows[i] for i in chosen], held_out, name, len(documents), row_length)


def split(ids: list[int], row_length: int, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Rows of at most `row_length` ids; each of a longer text begins with BOS where the model wants one."""
    begin = [tokenizer.bos_token_id] if tokenizer.add_bos and tokenizer.bos_token_id is not None else []
    ids = ids[len(begin) :] if begin and ids[:1] == begin else ids
    step = row_length - len(begin)
    for start in range(0, len(ids), step):
        yield [*begin, *ids[start : start + step]]


def _documents(source: Path | None, tokenizer: Tokenizer) -> Iterator[list[int]]:
    if source is None:
        packed = (files("llmctl.quant") / "data" / "calibration.txt.gz").read_bytes()
        yield tokenizer.encode(gzip.decompress(packed).decode("utf-8"))
        return
    if not source.is_dir():
        yield from _of_file(source, tokenizer)
        return
    found = sorted(path for path in source.rglob("*") if path.suffix.lower() in (*_TEXTS, *_LINES))
    if not found:
        raise ModelNotFoundError(f"{source}: the folder has no {', '.join((*_TEXTS, *_LINES))} files to calibrate with")
    for path in found:
        yield from _of_file(path, tokenizer)


def _of_file(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    try:
        text = path.read_text("utf-8-sig")
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"--calibration {path}: there is no such file or folder") from error
    except UnicodeDecodeError as error:
        raise FormatError(f"--calibration {path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise LlmctlError(f"--calibration {path}: cannot be read: {error.strerror}") from error
    if path.suffix.lower() not in _LINES:
        if text.strip():
            yield tokenizer.encode(text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _of_line(f"--calibration {path}, line {number}", line, tokenizer)


def _of_line(where: str, line: str, tokenizer: Tokenizer) -> list[int]:
    """A conversation or a text, as JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: is no JSON: {error}") from error
    if isinstance(value, str):
        return tokenizer.encode(value)
    value = value if isinstance(value, dict) else {"messages": value}
    for key in _CONVERSATION_KEYS:
        if isinstance(value.get(key), list):
            return _of_conversation(where, value[key], tokenizer)
    for key in _TEXT_KEYS:
        if isinstance(value.get(key), str):
            return tokenizer.encode(value[key])
    expected = ", ".join(map(quoted, (*_CONVERSATION_KEYS, *_TEXT_KEYS)))
    raise FormatError(f"{where}: expected an object with one of {expected}, found {quoted(list(value)[:5])}")


def _of_conversation(where: str, messages: list[Any], tokenizer: Tokenizer) -> list[int]:
    messages = [_message(message) for message in messages]
    try:
        return encode_chat(tokenizer, messages, add_generation_prompt=False)
    except LlmctlError as error:
        raise type(error)(f"{where}: {error}") from error


def _message(message: Any) -> Any:
    """ShareGPT's spelling as everybody's."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        return {"role": _ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}
    return message

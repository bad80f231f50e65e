"""Ways to damage a model file: bytes and numbers of its header, its lengths and offsets, its JSON, its end."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

EXTREMES = (0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 4095, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53,
            2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip
_ODD_JSON: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, 1e-320, "", "0", "x" * 5000,
    "\0", "\ud800", "../../etc/passwd", "model.safetensors", [], {}, [[]], [None], {"": None}, [1] * 3000, "<|im_start|>",
    "[" * 200, "(a+)+$",
)  # fmt: skip
_TEXTS = (b"[" * 3000, b'{"a":' * 3000, b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b'"\\ud800"', b"\xff\xfe", b"\x00", b",,")


_ODD_VALUES: tuple[Any, ...] = (
    0, 1, -1, 7, 2**31, 2**32 - 1, 2**63, True, 0.0, -1.5, 1e30, float("nan"), "", "x" * 300, "llama", "gemma3", [0], [1, 2, 3],
    ["a"], [[1]], [0.5] * 40,
)  # fmt: skip


def damaged(content: bytes, header: int, rng: Random) -> bytes:
    """The content of a file with one to four faults. header: how many bytes at its beginning describe the rest."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        _pick(rng)(data, max(1, min(header, len(data))), rng)
    return bytes(data)


def damaged_json(content: bytes, rng: Random) -> bytes:
    """A JSON document with one to three of its values replaced, removed, repeated or moved, or its text damaged."""
    if rng.random() < 0.3:
        return damaged(content, len(content), rng)
    try:
        document = json.loads(content)
    except ValueError:
        return damaged(content, len(content), rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        document = _change_value(document, rng)
    raw = json.dumps(document, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:  # json.dumps writes no key twice
        at = raw.find(b":", rng.randrange(max(1, len(raw))))
        start = raw.rfind(b'"', 0, raw.rfind(b'"', 0, max(at, 0))) if at > 0 else -1
        if start >= 0:
            raw = raw[:start] + raw[start : at + 1] + b"1," + raw[start:]
    return raw


def damaged_safetensors(content: bytes, rng: Random) -> bytes:
    """A safetensors file: half the time its header is damaged as JSON with its length corrected, so that the fault is read."""
    length = struct.unpack("<Q", content[:8])[0]
    if rng.random() < 0.5:
        return damaged(content, 8 + length, rng)
    header = damaged_json(content[8 : 8 + length], rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice(EXTREMES)
    return struct.pack("<Q", stated % 2**64) + header + content[8 + length :]


def changed_gguf(source: Path, target: Path, rng: Random) -> bool:
    """A GGUF file that is well formed and says other things: keys changed, exchanged or left out, arrays cut or altered, tensors
    left out or under another's name. False if what came out cannot be written."""
    from llmctl.errors import LlmctlError
    from llmctl.runtime.checkpoint import open_checkpoint
    from llmctl.runtime.checkpoint.gguf_writer import GgufWriter

    with open_checkpoint(source) as checkpoint:
        metadata = checkpoint.typed_metadata()
        for _ in range(rng.choice((1, 1, 2, 3))):
            _change_key(metadata, rng)
        entries = checkpoint.entries()
        if rng.random() < 0.2:
            entries.pop(rng.randrange(len(entries)))
        names = [entry.name for entry in entries]
        if rng.random() < 0.2:
            rng.shuffle(names)
        try:
            with GgufWriter(target, metadata) as writer:
                for name, entry in zip(names, entries, strict=True):
                    writer.declare(name, entry.format, entry.shape)
                for name, entry in zip(names, entries, strict=True):
                    writer.write(name, checkpoint.read(entry.name))
        except LlmctlError:
            return False
    return True


def _change_key(metadata: dict[str, Any], rng: Random) -> None:
    key, how = rng.choice(list(metadata)), rng.randrange(5)
    value = metadata[key]
    if how == 0:
        del metadata[key]
    elif how == 1:
        metadata[key] = metadata[rng.choice(list(metadata))]
    elif how >= 3 and hasattr(value, "__len__") and len(value):
        items = list(value) if not hasattr(value, "tolist") else value.tolist()
        at = rng.randrange(len(items))
        kept = (items[:at], items[at:], [*items, items[at]], items[::-1], [*items[:at], items[0], *items[at + 1 :]])
        other = rng.choice(("", "\0", "a b", "<0x0A>", "▁" * 70) if isinstance(items[0], str) else (0, 1, 9))
        metadata[key] = rng.choice((*kept, [*items[:at], other, *items[at + 1 :]])) or [0]
    else:
        metadata[key] = deepcopy(rng.choice(_ODD_VALUES))


_Mutation = Callable[[bytearray, int, Random], None]


def _pick(rng: Random) -> _Mutation:
    return rng.choices([mutation for mutation, _ in _MUTATIONS], [weight for _, weight in _MUTATIONS])[0]


def _place(data: bytearray, header: int, rng: Random) -> int:
    """Mostly in the header, where everything is decided."""
    return rng.randrange(header if rng.random() < 0.9 else max(1, len(data)))


def _flip_bit(data: bytearray, header: int, rng: Random) -> None:
    if data:
        data[min(_place(data, header, rng), len(data) - 1)] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, header: int, rng: Random) -> None:
    at = _place(data, header, rng)
    data[at : at + 1] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))])


def _set_number(data: bytearray, header: int, rng: Random) -> None:
    at, size = _place(data, header, rng), rng.choice((2, 4, 4, 8, 8, 8))
    data[at : at + size] = (rng.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")


def _add_to_number(data: bytearray, header: int, rng: Random) -> None:
    at, size = _place(data, header, rng), rng.choice((4, 8))
    value = int.from_bytes(data[at : at + size], "little") + rng.choice((-256, -32, -1, 1, 2, 32, 256))
    data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")


def _remove(data: bytearray, header: int, rng: Random) -> None:
    at = _place(data, header, rng)
    del data[at : at + rng.choice((1, 2, 4, 8, 40, 1000))]


def _insert(data: bytearray, header: int, rng: Random) -> None:
    data[(at := _place(data, header, rng)) : at] = rng.randbytes(rng.choice((1, 4, 8, 40)))


def _insert_text(data: bytearray, header: int, rng: Random) -> None:
    data[(at := _place(data, header, rng)) : at] = rng.choice(_TEXTS)


def _repeat(data: bytearray, header: int, rng: Random) -> None:
    at, span = _place(data, header, rng), rng.choice((1, 8, 40, 400))
    data[at:at] = data[at : at + span]


def _copy(data: bytearray, header: int, rng: Random) -> None:
    """A piece of the header over another: sound parts at the wrong place."""
    source, target, span = _place(data, header, rng), _place(data, header, rng), rng.choice((4, 8, 12, 24, 60))
    data[target : target + span] = data[source : source + span]


def _truncate(data: bytearray, header: int, rng: Random) -> None:
    del data[rng.choice((_place(data, header, rng), max(0, len(data) - 1), len(data) // 2, header, 0)) :]


def _extend(data: bytearray, header: int, rng: Random) -> None:
    data += rng.choice((b"\0", bytes(32), rng.randbytes(100), bytes(5000)))


_MUTATIONS: tuple[tuple[_Mutation, int], ...] = (
    (_flip_bit, 3), (_set_byte, 3), (_set_number, 6), (_add_to_number, 3), (_remove, 2), (_insert, 2), (_insert_text, 1),
    (_repeat, 2), (_copy, 2), (_truncate, 2), (_extend, 1),
)  # fmt: skip


def _change_value(document: Any, rng: Random) -> Any:
    """The document with one value somewhere in it changed."""
    if not isinstance(document, (dict, list)) or not document or rng.random() < 0.05:
        return deepcopy(rng.choice(_ODD_JSON))
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = rng.choice(keys[:50] if rng.random() < 0.5 else keys)
    if rng.random() < 0.7 and isinstance(document[key], (dict, list)) and document[key]:
        document[key] = _change_value(document[key], rng)
        return document
    how = rng.randrange(5)
    if how == 0:
        del document[key]
    elif how == 1 and isinstance(document, dict):
        document[rng.choice(("", "x", "__metadata__", "w" * 300, rng.choice(keys)))] = deepcopy(document[key])
    elif how == 2:
        document[key] = deepcopy(document[rng.choice(keys)])
    elif isinstance(document[key], int) and how == 3:
        document[key] = document[key] + rng.choice((-1, 1, -(2**31), 2**31, 2**62))
    else:
        document[key] = deepcopy(rng.choice(_ODD_JSON))
    return document

"""Builders of files byte by byte, so that the tests can make what no writer would."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

U8, I8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 1, 4, 6, 7, 8, 9, 10


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


class RawGguf:
    """Pieces of a GGUF file, each as wrong as a test wants it."""

    string = staticmethod(_string)

    @staticmethod
    def key(name: str | bytes, value_type: int, payload: bytes) -> bytes:
        return _string(name) + struct.pack("<I", value_type) + payload

    @classmethod
    def u32(cls, name: str | bytes, value: int) -> bytes:
        return cls.key(name, U32, struct.pack("<I", value))

    @staticmethod
    def array(item_type: int, count: int, payload: bytes) -> bytes:
        return struct.pack("<IQ", item_type, count) + payload

    @staticmethod
    def tensor(name: str | bytes, dims: Iterable[int], type_id: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
        dims = list(dims)
        packed = b"".join(struct.pack("<Q", size) for size in dims)
        count = len(dims) if num_dims is None else num_dims
        return _string(name) + struct.pack("<I", count) + packed + struct.pack("<IQ", type_id, offset)

    @staticmethod
    def build(
        keys: Iterable[bytes] = (),
        tensors: Iterable[bytes] = (),
        data: bytes = b"",
        *,
        version: int = 3,
        num_keys: int | None = None,
        num_tensors: int | None = None,
        alignment: int = 32,
    ) -> bytes:
        keys, tensors = list(keys), list(tensors)
        header = b"GGUF" + struct.pack(
            "<IQQ",
            version,
            len(tensors) if num_tensors is None else num_tensors,
            len(keys) if num_keys is None else num_keys,
        )
        header += b"".join(keys) + b"".join(tensors)
        return header + bytes(-len(header) % alignment) + data


@pytest.fixture
def raw_gguf() -> type[RawGguf]:
    return RawGguf


@pytest.fixture
def raw_safetensors() -> Callable[..., bytes]:
    """header (an object, or text as it is) and data → the file's bytes."""

    def build(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        return struct.pack("<Q", len(raw) if length is None else length) + raw + data

    return build


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[str, bytes], Path]:
    def write(name: str, content: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write

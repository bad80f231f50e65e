"""GGUF files that lie: each lie is its own error, names the file, and costs neither memory nor time."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint import open_checkpoint

U64_MAX = 2**64 - 1


def refused(path: Path, match: str, error: type[Exception] = FormatError) -> None:
    """Opening fails with one line that names the file, and allocates nothing near what the file claims."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as caught:
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is error
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert peak < 2_000_000


@pytest.fixture
def check(write_file):
    def run(content: bytes, match: str, error: type[Exception] = FormatError) -> None:
        refused(write_file("hostile.gguf", content), match, error)

    return run


@pytest.mark.parametrize("length", [2**63, U64_MAX, 2**40, 100])
def test_string_lengths(check, raw_gguf, length: int) -> None:
    """As a value, as a key, as a tensor's name, as an array's item."""
    claim = struct.pack("<Q", length) + b"short"
    array = raw_gguf.array(8, 1, claim)
    check(raw_gguf.build([raw_gguf.key("k", 8, claim)], alignment=1), f"metadata key 'k' claims {length} bytes where 5 are left")
    check(raw_gguf.build([raw_gguf.key("k", 9, array)], alignment=1), f"'k': string 0 claims {length} bytes where 5 are left")
    key_error = "where 9 are left" if length == 100 else "the limit is 65535"
    check(raw_gguf.build([claim + bytes(4)], alignment=1), f"metadata key 0 claims {length} bytes.*{key_error}")
    check(raw_gguf.build([], [claim + bytes(12)], alignment=1), f"the name of tensor 0 claims {length} bytes, the limit is 64")


@pytest.mark.parametrize("count", [2**40, 2**61, U64_MAX])
@pytest.mark.parametrize(("item_type", "size"), [(0, 1), (4, 4), (10, 8), (8, 8), (9, 12)])
def test_array_counts(check, raw_gguf, count: int, item_type: int, size: int) -> None:
    array = raw_gguf.array(item_type, count, bytes(64))
    check(
        raw_gguf.build([raw_gguf.key("k", 9, array)], alignment=1),
        f"claims {count} .* in metadata key 'k', which need at least {count * size} bytes; 64 are left",
    )


@pytest.mark.parametrize("count", [1, 2, 5, 1 << 20])
def test_key_and_tensor_counts_above_the_bytes_left(check, raw_gguf, count: int) -> None:
    check(raw_gguf.build(num_keys=count, alignment=1), f"claims {count} metadata keys, .* 0 are left")
    check(raw_gguf.build(num_tensors=count, alignment=1), f"claims {count} tensors, .* 8 are left")


@pytest.mark.parametrize("count", [2**40, 2**63, U64_MAX])
def test_key_and_tensor_counts_above_the_limit(check, raw_gguf, count: int) -> None:
    check(raw_gguf.build(num_keys=count), f"claims {count} metadata keys, the limit is")
    check(raw_gguf.build(num_tensors=count), f"claims {count} tensors, the limit is")


@pytest.mark.parametrize("depth", [9, 10_000])
def test_nesting(check, raw_gguf, depth: int) -> None:
    nested = struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 0, 0)
    check(raw_gguf.build([raw_gguf.key("deep", 9, nested)]), "metadata key 'deep' nests arrays deeper than 8")


@pytest.mark.parametrize("alignment", [0, 1, 3, 4, 33, 48, 2**22, 2**30, 2**32 - 1])
def test_alignment(check, raw_gguf, alignment: int) -> None:
    content = raw_gguf.build([raw_gguf.u32("general.alignment", alignment)], [raw_gguf.tensor("w", [1])], bytes(4))
    check(content, f"general.alignment is {alignment}, expected a power of two from 8 to 2097152")


def test_alignment_of_another_type(check, raw_gguf) -> None:
    key = raw_gguf.key("general.alignment", 10, struct.pack("<Q", 32))
    check(raw_gguf.build([key]), "general.alignment must be a u32, found U64")
    key = raw_gguf.key("general.alignment", 9, raw_gguf.array(4, 1, bytes(4)))
    check(raw_gguf.build([key]), "general.alignment must be a u32, found ARRAY")


def test_names_empty_twice_or_no_text(check, raw_gguf) -> None:
    check(raw_gguf.build([raw_gguf.u32("", 1)]), "metadata key 0 is empty")
    check(raw_gguf.build([raw_gguf.u32("k", 1), raw_gguf.u32("k", 1)]), "metadata key 'k' appears twice")
    check(raw_gguf.build([raw_gguf.u32(b"\xff", 1)]), r"metadata key 0 is not UTF-8: b'\\xff' at byte 0")
    check(raw_gguf.build([raw_gguf.key("k", 8, raw_gguf.string(b"a\xe9b"))]), "metadata key 'k' is not UTF-8: .* byte 1")
    check(raw_gguf.build([], [raw_gguf.tensor("", [1])], bytes(4)), "tensor 0 has an empty name")
    check(raw_gguf.build([], [raw_gguf.tensor(b"\xff", [1])], bytes(4)), "the name of tensor 0 is not UTF-8")
    twice = [raw_gguf.tensor("w", [1]), raw_gguf.tensor("w", [1], offset=32)]
    check(raw_gguf.build([], twice, bytes(64)), "tensor 'w' appears twice")


def test_names_cannot_break_the_line_or_the_terminal(check, raw_gguf) -> None:
    key = raw_gguf.u32("\x1b[2J\nllmctl: done", 1)
    check(raw_gguf.build([key, key]), r"metadata key '\\x1b\[2J\\nllmctl: done' appears twice")
    long = raw_gguf.u32("k" * 60_000, 1)
    check(raw_gguf.build([long, long]), "metadata key 'k{59}…k{9}' appears twice")


def test_value_types(check, raw_gguf) -> None:
    check(raw_gguf.build([raw_gguf.key("k", 13, bytes(8))]), "unknown value type 13 for metadata key 'k'")
    array = raw_gguf.array(77, 1, bytes(8))
    check(raw_gguf.build([raw_gguf.key("k", 9, array)]), "unknown value type 77 for the items of metadata key 'k'")
    check(raw_gguf.build([raw_gguf.key("k", 7, b"\x02")]), "metadata key 'k' is a bool with the value 2")
    array = raw_gguf.array(7, 2, b"\x01\xff")
    check(raw_gguf.build([raw_gguf.key("k", 9, array)]), "metadata key 'k' holds bools with the value 255")


def test_dimensions(check, raw_gguf) -> None:
    def tensor(dims: list[int], type_id: int = 0, num_dims: int | None = None) -> bytes:
        return raw_gguf.build([], [raw_gguf.tensor("w", dims, type_id, num_dims=num_dims)], bytes(64))

    check(tensor([1] * 5), "claims 5 dimensions of tensor 'w', the limit is 4")
    check(tensor([1], num_dims=2**32 - 1), "claims 4294967295 dimensions of tensor 'w', the limit is 4")
    check(tensor([4, 0]), r"tensor 'w' has a dimension of 0: \[4, 0\]")
    check(tensor([2**32, 2**32]), f"tensor 'w' claims {2**64} elements")
    check(tensor([U64_MAX] * 4), f"tensor 'w' claims {U64_MAX**4} elements")
    check(tensor([33], 2), "tensor 'w': Q4_0 needs rows that are a multiple of 32 elements, got 33")
    check(tensor([], 2), "tensor 'w': Q4_0 needs rows that are a multiple of 32 elements, got 1")
    check(tensor([2**62]), f"file is .* bytes, needs {2**64 + 64}")


@pytest.mark.parametrize(("type_id", "name"), [(4, "Q4_2"), (15, "Q8_K"), (41, "Q1_0"), (99, "unknown"), (2**32 - 1, "unknown")])
def test_tensor_types(check, raw_gguf, type_id: int, name: str) -> None:
    content = raw_gguf.build([], [raw_gguf.tensor("w", [256], type_id)], bytes(1024))
    check(content, f"tensor 'w': tensor type {type_id} .{name}", UnsupportedError)


def test_offsets(check, raw_gguf) -> None:
    def pair(offset: int, size: int = 64) -> bytes:
        tensors = [raw_gguf.tensor("a", [16]), raw_gguf.tensor("b", [16], offset=offset)]
        return raw_gguf.build([], tensors, bytes(size))

    check(pair(65), "tensor 'b' has offset 65, not a multiple of 32")
    check(pair(32), "tensors 'a' and 'b' overlap")
    check(pair(0), "tensors '[ab]' and '[ab]' overlap")
    check(pair(2**63), f"file is 160 bytes, needs {2**63 + 64 + 96} .the end of tensor 'b'")
    check(pair(2**64 - 32), f"file is 160 bytes, needs {2**64 - 32 + 64 + 96} .the end of tensor 'b'")


def test_versions(check, raw_gguf) -> None:
    check(raw_gguf.build(version=1), "GGUF version 1 is not read; convert the model again", UnsupportedError)
    check(raw_gguf.build(version=4), "GGUF version 4 is not read; known versions are 2 and 3", UnsupportedError)
    check(raw_gguf.build(version=0), "GGUF version 0 is not read", UnsupportedError)
    check(raw_gguf.build(version=0x03000000), "big-endian GGUF is not read", UnsupportedError)


def test_minus_the_last_byte(write_file, raw_gguf) -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    whole = raw_gguf.build([], [raw_gguf.tensor("w", [4])], data)
    open_checkpoint(write_file("whole.gguf", whole))
    refused(write_file("cut.gguf", whole[:-1]), f"file is {len(whole) - 1} bytes, needs {len(whole)} .the end of tensor 'w'")
    refused(write_file("header.gguf", whole[: -len(data)]), f"file is {len(whole) - 16} bytes, needs {len(whole)}")


def test_cut_anywhere(write_file, raw_gguf) -> None:
    """Every prefix of a file is refused, with an error of its own and no other exception."""
    tokens = raw_gguf.array(8, 3, b"".join(map(raw_gguf.string, ["a", "", "ccc"])))
    keys = [raw_gguf.u32("n", 1), raw_gguf.key("s", 8, raw_gguf.string("text")), raw_gguf.key("t", 9, tokens)]
    whole = raw_gguf.build(keys, [raw_gguf.tensor("w", [2, 2])], bytes(range(16)))
    for size in range(len(whole)):
        with pytest.raises(FormatError, match=r"cut\.gguf: "):
            open_checkpoint(write_file("cut.gguf", whole[:size]))

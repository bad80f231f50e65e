"""safetensors headers that lie: each its own error that names the file."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint import open_checkpoint


def refused(path: Path, match: str, error: type[Exception] = FormatError) -> None:
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
def check(write_file, raw_safetensors):
    def run(header: object, data: bytes, match: str, error: type[Exception] = FormatError, **options: int) -> None:
        refused(write_file("model.safetensors", raw_safetensors(header, data, **options)), match, error)

    return run


def one(**changes: object) -> dict:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}}


def two(first: list[int], second: list[int]) -> dict:
    def entry(offsets: list[int]) -> dict:
        return {"dtype": "U8", "shape": [offsets[1] - offsets[0]], "data_offsets": offsets}

    return {"a": entry(first), "b": entry(second)}


def test_the_sound_file_opens(write_file, raw_safetensors) -> None:
    assert open_checkpoint(write_file("model.safetensors", raw_safetensors(one(), bytes(16)))).names() == ["w"]


@pytest.mark.parametrize("length", [100_000_001, 2**40, 2**63, 2**64 - 1])
def test_header_length_above_the_limit(check, length: int) -> None:
    check(one(), bytes(16), f"claims a header of {length} bytes, the limit is 100000000", length=length)


def test_header_length_above_the_file(check, write_file) -> None:
    check(b"{}", b"", "truncated in the header: file is 10 bytes, needs at least 1008", length=1000)
    for size in range(1, 8):
        content = struct.pack("<Q", 2)[:size]
        refused(write_file("m.safetensors", content), f"truncated: file is {size} bytes, a safetensors file needs at least 10")


def test_empty_header(check) -> None:
    check(b"", b"", "the header is not valid JSON")


@pytest.mark.parametrize(("header", "reason"), [
    (b"[]", "the header must be a JSON object, found list"),
    (b'"x"', "the header must be a JSON object, found str"),
    (b"{", "the header is not valid JSON"),
    (b'{"w": NaN}', "the header is not valid JSON: NaN is not a JSON number"),
    (b'{"\xff": 1}', "the header is not valid JSON: .*utf-8"),
    (b'{"a":' * 5000, "the header is not valid JSON"),
    (b'{"w": {"shape": [' + b"9" * 5000 + b"]}}", "the header is not valid JSON"),
])  # fmt: skip
def test_header_that_is_no_json_object(check, header: bytes, reason: str) -> None:
    check(header, b"", reason)


@pytest.mark.parametrize(("header", "key"), [
    (b'{"w": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "w": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', "w"),
    (b'{"w": {"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', "shape"),
    (b'{"__metadata__": {"k": "1", "k": "2"}}', "k"),
    (b'{"__metadata__": {}, "__metadata__": {}}', "__metadata__"),
])  # fmt: skip
def test_repeated_key_at_any_level(check, header: bytes, key: str) -> None:
    check(header, b"\0", f"the header repeats the key '{key}'")


@pytest.mark.parametrize("metadata", [[], "x", {"k": 1}, {"k": None}, {"k": {"nested": "x"}}])
def test_metadata_that_is_not_strings(check, metadata: object) -> None:
    check({"__metadata__": metadata}, b"", "__metadata__ must be an object of strings")


@pytest.mark.parametrize("info", [None, [], "x", {}, {"dtype": "F32", "shape": [2]}])
def test_entry_that_is_incomplete(check, info: object) -> None:
    check({"w": info}, b"", "tensor 'w' must have dtype, shape and data_offsets")


def test_dtypes(check) -> None:
    check(one(dtype="F4"), bytes(16), "tensor 'w' has the dtype F4, which is not read", UnsupportedError)
    check(one(dtype="C64"), bytes(16), "tensor 'w' has the dtype C64, which is not read", UnsupportedError)
    check(one(dtype="F31"), bytes(16), "tensor 'w' has the unknown dtype 'F31'")
    check(one(dtype="Q4_0"), bytes(16), "tensor 'w' has the unknown dtype 'Q4_0'")
    check(one(dtype=["F4"]), bytes(16), "tensor 'w' has the unknown dtype")


@pytest.mark.parametrize("shape", [None, 4, "4", [-1, 4], [2.0, 2], [True, 4], [None], [[2, 2]], [1e2], {"0": 2}])
def test_shapes_that_are_none(check, shape: object) -> None:
    check(one(shape=shape), bytes(16), "tensor 'w' has the shape .*, expected a list of whole numbers")


@pytest.mark.parametrize("offsets", [None, 16, [-16, 0], [0.0, 16], [0, "16"], [False, 16]])
def test_offsets_that_are_none(check, offsets: object) -> None:
    check(one(data_offsets=offsets), bytes(16), "tensor 'w' has the data_offsets .*, expected a list of whole numbers")


def test_more_axes_than_an_array_can_have(check) -> None:
    check(one(shape=[1] * 33), bytes(4), "tensor 'w' claims 33 axes, the limit is 32")
    check(one(shape=[1] * 5000), bytes(4), "tensor 'w' claims 5000 axes")


def test_numbers_without_end_are_not_shown_whole(check, write_file, raw_safetensors) -> None:
    """Python itself refuses to write numbers of more than 4300 digits."""
    offsets = ([1] * 5000, [0, 10**4200], [10**4299, 10**4299 + 16])
    shapes = ([10**4000, 10**4000], list(range(5000)))
    for changes in (*({"data_offsets": value} for value in offsets), *({"shape": value} for value in shapes)):
        path = write_file("model.safetensors", raw_safetensors(one(**changes), bytes(16)))
        with pytest.raises(FormatError) as caught:
            open_checkpoint(path)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("offsets", [[16, 0], [0], [0, 8, 16], []])
def test_offsets_that_are_no_range(check, offsets: object) -> None:
    check(one(data_offsets=offsets), bytes(16), r"tensor 'w' has data_offsets .*, expected \[begin, end\]")


def test_shape_and_range_that_differ(check) -> None:
    check(one(shape=[1000, 1000], data_offsets=[0, 4]), bytes(4), "needs 4000000 bytes, its data_offsets span 4")
    check(one(shape=[0, 4]), bytes(16), "needs 0 bytes, its data_offsets span 16")
    check(one(shape=[2**40, 2**40]), bytes(16), f"tensor 'w' of shape .* claims {4 * 2**80} bytes")
    check(one(shape=[2**62, 0, 2**62]), bytes(16), "needs 0 bytes, its data_offsets span 16")


def test_places(check) -> None:
    check(two([0, 8], [4, 12]), bytes(12), "tensors 'a' and 'b' overlap")
    check(two([0, 8], [0, 8]), bytes(8), "tensors 'a' and 'b' overlap")
    check(two([4, 8], [0, 4]) | two([0, 4], [2, 8]), bytes(8), "tensors 'a' and 'b' overlap")
    check(two([0, 8], [10, 12]), bytes(12), "2 bytes between 'a' and 'b' belong to no tensor")
    check(two([2, 8], [8, 12]), bytes(12), "2 bytes between the header and 'a' belong to no tensor")
    check(two([0, 8], [8, 12]), bytes(15), "3 bytes behind 'b' belong to no tensor")
    check({}, bytes(1), "1 bytes behind the header belong to no tensor")


def test_truncation(check) -> None:
    for missing in (1, 2, 16):
        check(one(), bytes(16 - missing), r"truncated: file is \d+ bytes, needs \d+ .the end of tensor 'w'")
    check(two([0, 2**50], [2**50, 2**51]), b"", rf"file is \d+ bytes, needs {2**51 + 203} .the end of tensor 'b'")


def test_names_cannot_break_the_line_or_the_text(check) -> None:
    entry = one()["w"]
    check({"\x1b[2J\nw": {**entry, "dtype": "?"}}, bytes(16), r"tensor '\\x1b\[2J\\nw' has the unknown dtype")
    check(b'{"\\ud800": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0", r"tensor '\\ud800' has half a surrogate pair")

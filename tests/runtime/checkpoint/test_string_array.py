"""The lazy string array: the fast search must give what the plain walk gives, for every input."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint import string_array
from llmctl.runtime.checkpoint.string_array import StringArray, likely_heads, scan_strings


def encoded(strings: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(item)) + item for item in strings)


def scanned(strings: list[bytes], *, before: bytes = b"", behind: bytes = b"") -> StringArray:
    data = np.frombuffer(before + encoded(strings) + behind, np.uint8)
    result = scan_strings(data, len(before), len(strings))
    assert result.buffer.tobytes() == encoded(strings)
    return result


# Zero bytes, empty strings and lengths above 255 are what the search cannot see by itself.
awkward = st.one_of(
    st.binary(max_size=12),
    st.just(b""),
    st.integers(0, 20).map(bytes),
    st.sampled_from([b"\x05" + bytes(7), bytes(8) + b"\x01" + bytes(7), b"x" * 255, b"x" * 256, b"y" * 300, b"z" * 65536]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(awkward, max_size=60), st.binary(max_size=9), st.binary(max_size=20))
def test_scan_finds_every_string(strings: list[bytes], before: bytes, behind: bytes) -> None:
    array = scanned(strings, before=before, behind=behind)
    assert array.tobytes_list() == strings
    assert len(array) == len(strings)


@pytest.mark.parametrize("length", [0, 1, 7, 255, 256, 70_000])
@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"abc"])
def test_scan_at_every_alignment(length: int, before: bytes) -> None:
    strings = [b"x" * length, b"tail"] * 5
    assert scanned(strings, before=before).tobytes_list() == strings


def test_scan_crosses_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_array, "_CHUNK", 64)
    strings = [bytes([i % 256]) * (i % 37) for i in range(500)]
    assert scanned(strings).tobytes_list() == strings


def test_scan_walks_when_runs_are_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(string_array, "_MAX_RUNS", 3)
    strings = [b"", b"abc"] * 200
    assert scanned(strings).tobytes_list() == strings


def test_large_vocabulary_is_found_by_the_search_not_by_walking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it fast: nearly every string of a real vocabulary lies in a run, few are walked."""
    walked = []
    original = string_array._Chain._walk

    def counting(self: string_array._Chain, position: int, stop: int) -> int:
        missing = self._missing
        end = original(self, position, stop)
        walked.append(missing - self._missing)
        return end

    monkeypatch.setattr(string_array._Chain, "_walk", counting)
    strings = [f"token {i}".encode() for i in range(20_000)]
    strings[77], strings[5000] = b"", b"l" * 1000
    assert scanned(strings, behind=bytes(100)).tobytes_list() == strings
    assert sum(walked) < 100


def test_likely_heads_reports_only_lengths_that_fit() -> None:
    data = np.frombuffer(encoded([b"abcdefg", b"hijk"]) + struct.pack("<Q", 200) + b"short", np.uint8)
    heads, lengths = likely_heads(data, 0, len(data))
    assert heads.tolist() == [0, 15]  # not 27: it claims more bytes than there are
    assert lengths.tolist() == [7, 4]


@pytest.mark.parametrize("claimed", [6, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
def test_string_longer_than_the_file(claimed: int) -> None:
    data = np.frombuffer(encoded([b"one"]) + struct.pack("<Q", claimed) + b"short", np.uint8)
    with pytest.raises(FormatError, match=rf"string 1 claims {claimed} bytes where 5 are left"):
        scan_strings(data, 0, 2)


def test_more_strings_claimed_than_there_are() -> None:
    data = np.frombuffer(encoded([b"one", b"two"]) + b"1234567", np.uint8)
    with pytest.raises(FormatError, match="string 2 claims 0 bytes where 0 are left"):
        scan_strings(data, 0, 3)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", [b"", b"a", b"token", b"x" * 300])
@pytest.mark.parametrize("there", [1, 2, 7, 40, 3000])
@pytest.mark.parametrize("more", [1, 5, 1000])
def test_strings_that_end_with_the_file_while_more_are_claimed(text: bytes, there: int, more: int) -> None:
    """However they were found, the search must not go on for ever where nothing is left to be searched."""
    data = np.frombuffer(encoded([text] * there), np.uint8)
    with pytest.raises(FormatError, match=f"string {there} claims 0 bytes where 0 are left"):
        scan_strings(data, 0, there + more)


def test_sequence_of_text() -> None:
    array = StringArray.encode(["a", "é€", b"\xff\xfe", ""])
    assert list(array) == ["a", "é€", "\ufffd\ufffd", ""]
    assert array == ["a", "é€", "\ufffd\ufffd", ""]
    assert array != ["a"]
    assert array[1] == "é€"
    assert array[-1] == ""
    assert array[1:3] == ["é€", "\ufffd\ufffd"]
    assert array.raw(2) == b"\xff\xfe"
    assert "é€" in array
    assert array.index("é€") == 1
    with pytest.raises(IndexError):
        array[4]


def test_public_buffers_address_the_bytes() -> None:
    array = StringArray.encode(["ab", "", "xyz"])
    assert array.offsets.tolist() == [8, 18, 26]
    assert array.lengths.tolist() == [2, 0, 3]
    assert bytes(array.buffer[26:29]) == b"xyz"
    assert array == scanned([b"ab", b"", b"xyz"])


def test_empty_array() -> None:
    assert list(scanned([], behind=b"more")) == []
    assert list(StringArray.encode([])) == []

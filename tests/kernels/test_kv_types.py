"""Names of cache types, and what they take."""

from __future__ import annotations

import pytest

from llmctl.errors import UsageError
from llmctl.kernels.kv_types import KV_TYPES, parse_kv_type, parse_kv_types, rotation, row_bytes, sides_of


@pytest.mark.parametrize(
    ("text", "name", "sides"),
    [
        ("Q8_0", "q8_0", ("q8_0", "q8_0")),
        ("k=q8_0,v=q4_0", "k=q8_0,v=q4_0", ("q8_0", "q4_0")),
        (" V=Q4_0 , K=f16 ", "k=f16,v=q4_0", ("f16", "q4_0")),
        ("k=bf16,v=bf16", "bf16", ("bf16", "bf16")),
    ],
)
def test_a_type_has_one_name(text: str, name: str, sides: tuple[str, str]) -> None:
    assert parse_kv_type(text) == name
    assert sides_of(name) == sides


NO_TYPES = ["", "q4_1", "k=q8_0", "k=q8_0,k=q4_0", "k=q8_0,v=q9", "q8_0,q4_0", "k=q8_0,v=q4_0,v=q4_0", "k:f16,v:f16"]


@pytest.mark.parametrize("text", NO_TYPES)
def test_what_is_no_type_is_refused_with_the_types_there_are(text: str) -> None:
    with pytest.raises(UsageError, match="expected f32, f16, bf16, fp8, q8_0, q5_1, q4_0, or one for each side"):
        parse_kv_type(text)


def test_a_list_may_hold_sides() -> None:
    assert parse_kv_types("f16,k=q8_0,v=q4_0,Q5_1") == ["f16", "k=q8_0,v=q4_0", "q5_1"]
    with pytest.raises(UsageError):
        parse_kv_types("f16,k=q8_0,q4_0")


def test_bytes_of_a_row() -> None:
    assert [row_bytes(64, side) for side in KV_TYPES] == [256, 128, 128, 64, 68, 48, 36]
    assert [row_bytes(80, side) for side in KV_TYPES] == [320, 160, 160, 80, None, None, None]


def test_four_bits_are_rotated_in_the_blocks_they_are_kept_in() -> None:
    assert [rotation("q4_0", size) for size in (32, 64, 96, 128, 256)] == [32] * 5
    assert rotation("q4_0", 576, 512) == 32
    assert rotation("q4_0", 96, 48) == 16
    assert rotation("q8_0", 64) == 0

"""Grouped integers as GGUF blocks with the same codes, judged by gguf-py."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.errors import FormatError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.integer_blocks import as_blocks, formats_that_keep
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint.packed_bits import pack_codes
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, canonical

ALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def integers(bits: int, symmetric: bool, group_size: int = 64, *, columns: int = 128, seed: int = 0) -> PackedIntTensor:
    rows = 6
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (rows, columns), dtype=np.uint8)
    codes[0, :2] = 0, (1 << bits) - 1
    groups = 1 if group_size == -1 else columns // group_size
    scales = (rng.standard_normal((rows, groups)) / 64).astype(np.float16)
    zeros = None if symmetric else rng.integers(0, 1 << bits, (rows, groups), dtype=np.uint8)
    if zeros is not None:
        zeros[0, 0] = (1 << bits) - 1
        zeros[1, 0], codes[1, :1] = 0, (1 << bits) - 1
    words = pack_codes(codes, bits)
    return canonical(StoredIntegers(bits, group_size, (rows, columns), lambda: words, scales, zeros))


def test_which_types_keep_which_codes() -> None:
    assert formats_that_keep(4, True) == ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    assert formats_that_keep(4, False) == ("Q4_1", "Q5_0", "Q5_1", "Q8_0")
    assert formats_that_keep(3, False) == ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
    assert formats_that_keep(5, True) == ("Q5_0", "Q5_1", "Q8_0")
    assert formats_that_keep(5, False) == ("Q5_1", "Q8_0")
    assert formats_that_keep(7, False) == ("Q8_0",)
    assert formats_that_keep(8, True) == ("Q8_0",)
    assert formats_that_keep(8, False) == ()


@given(
    st.integers(2, 8), st.booleans(), st.sampled_from((32, 64, -1)), st.sampled_from(ALL), st.integers(0, 99)
)
def test_the_same_values_for_every_type_that_keeps_them(bits: int, symmetric: bool, group: int, name: str, seed: int) -> None:
    tensor = integers(bits, symmetric, group, seed=seed)
    blocks = as_blocks(tensor, FORMATS[name])
    if name not in formats_that_keep(bits, symmetric):
        assert blocks is None
        return
    assert blocks is not None
    values, expected = dequantize(blocks), dequantize(tensor)
    theirs = gguf.quants.dequantize(blocks.blocks, gguf.GGMLQuantizationType[name])
    assert np.array_equal(theirs, values)
    if name.endswith("_0") or symmetric:  # an offset of −8 or −16 scales is a float16 where the scale is
        assert np.array_equal(values, expected)
    else:
        steps = np.abs(tensor.scales).max()
        assert np.abs(values - expected).max() <= steps * (1 << bits) * 2.0**-11


def test_an_order_of_columns_cannot_be_kept() -> None:
    tensor = integers(4, True)
    order = np.random.default_rng(1).permutation(128).astype(np.int32)
    ordered = PackedIntTensor(4, 64, tensor.shape, tensor.codes, tensor.scales, None, order)
    assert as_blocks(ordered, FORMATS["Q4_0"]) is None


def test_types_without_such_codes() -> None:
    assert as_blocks(integers(4, True, columns=256), FORMATS["Q4_K"]) is None
    assert as_blocks(integers(4, True), FORMATS["F16"]) is None


def test_a_scale_beyond_float16() -> None:
    tensor = integers(4, True)
    large = PackedIntTensor(4, 64, tensor.shape, tensor.codes, np.full_like(tensor.scales, 1e6), None)
    with pytest.raises(FormatError, match="largest float16"):
        as_blocks(large, FORMATS["Q4_0"])

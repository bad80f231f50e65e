"""The format table against gguf-py's constants, and its look-ups."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.formats.layouts import LAYOUTS
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, format_by_gguf_id, format_by_name

BLOCK_FORMATS = [f for f in FORMATS.values() if not f.is_plain]


@pytest.mark.parametrize("member", list(gguf.GGMLQuantizationType), ids=lambda m: m.name)
def test_every_gguf_type_is_known_or_refused_by_name(member: gguf.GGMLQuantizationType) -> None:
    if member.name not in FORMATS:
        with pytest.raises(UnsupportedError, match=rf"type {member.value} \({member.name}\b"):
            format_by_gguf_id(member.value)
        return
    found = format_by_gguf_id(member.value)
    assert found.name == member.name
    assert (found.elements_per_block, found.bytes_per_block) == gguf.GGML_QUANT_SIZES[member]


def test_unknown_ids_and_names_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"4000 \(unknown\)"):
        format_by_gguf_id(4000)
    with pytest.raises(UnsupportedError, match="Q2_0"):
        format_by_gguf_id(42)
    with pytest.raises(UnsupportedError, match=r"'Q9_Z'.*Q4_0"):
        format_by_name("Q9_Z")


def test_names_are_found_in_any_case() -> None:
    assert format_by_name("q4_k") is FORMATS["Q4_K"]


def test_row_bytes_and_bits_per_weight() -> None:
    q4_k = FORMATS["Q4_K"]
    assert q4_k.row_bytes(512) == 288
    assert q4_k.bits_per_weight == 4.5
    with pytest.raises(FormatError, match="multiple of 256 elements, got 576"):
        q4_k.row_bytes(576)


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=lambda f: f.name)
def test_layouts_have_the_size_of_their_block(fmt) -> None:
    assert LAYOUTS[fmt.name].itemsize == fmt.bytes_per_block


def test_quant_tensor_checks_its_blocks() -> None:
    q4_0 = FORMATS["Q4_0"]
    tensor = QuantTensor(q4_0, (2, 3, 64), np.zeros((2, 3, 36), np.uint8))
    assert (tensor.nbytes, tensor.num_elements) == (216, 384)
    with pytest.raises(FormatError, match=r"needs uint8 blocks \(3, 36\), got uint8 \(3, 18\)"):
        QuantTensor(q4_0, (3, 64), np.zeros((3, 18), np.uint8))
    with pytest.raises(FormatError, match="got int8"):
        QuantTensor(q4_0, (3, 64), np.zeros((3, 36), np.int8))
    with pytest.raises(FormatError, match="multiple of 32"):
        QuantTensor(q4_0, (3, 40), np.zeros((3, 18), np.uint8))


def test_quant_tensor_is_never_plain_nor_a_single_number() -> None:
    with pytest.raises(FormatError, match=r"F16 .* not a tensor of quantized rows"):
        QuantTensor(FORMATS["F16"], (4,), np.zeros(8, np.uint8))
    with pytest.raises(FormatError, match="not a tensor of quantized rows"):
        QuantTensor(FORMATS["Q4_0"], (), np.zeros(18, np.uint8))

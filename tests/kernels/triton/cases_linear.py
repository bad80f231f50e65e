"""linear, head_linear and embedding over every form of weight: against the reference at sizes that fill no block."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_weights import INTEGERS, NAMES, behind_guards, columns_of, relative_error, stored, values

from llmctl.errors import UsageError
from llmctl.kernels.embedding._reference import embedding as reference_embedding
from llmctl.kernels.embedding._triton import embedding
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.plain import PLAIN_DTYPES
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.head_linear._reference import head_linear as reference_head_linear
from llmctl.kernels.head_linear._triton import head_linear
from llmctl.kernels.linear._reference import linear as reference
from llmctl.kernels.linear._triton import as_plain, dequantized, linear, prepare_weight
from llmctl.kernels.triton_lib import tiles
from llmctl.kernels.triton_lib.activations import float_rows, quantize_rows
from llmctl.kernels.triton_lib.forms import FORMS

Guard = Callable[[torch.Tensor], torch.Tensor]
ROWS = 37


def prepared(weight, guarded: Guard, activations: str = "float", dtype: torch.dtype = torch.float32):
    return behind_guards(prepare_weight(weight, "cpu", dtype, activations), guarded)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """What the codes of x mean."""
    made = quantize_rows(x)
    return (made.codes.view(len(x), -1, 32) * made.scales[..., None]).flatten(1)


@pytest.mark.parametrize("name", NAMES)
def test_integer_products_are_those_of_the_rounded_rows(name: str, guarded: Guard) -> None:
    weight, bias = stored(name, ROWS, columns_of(name)), torch.randn(ROWS)
    x = torch.randn(2, columns_of(name))
    own = prepared(weight, guarded, "int8")
    y = linear(guarded(x), own, guarded(bias))
    meant = rounded(x if own.order is None else x[:, own.order])
    inverse = slice(None) if own.order is None else own.order.argsort()
    assert relative_error(y, reference(meant[:, inverse], values(weight), bias)) < 1e-6
    assert 1e-4 < relative_error(y, reference(x, values(weight), bias)) < 2e-2


@pytest.mark.parametrize("name", NAMES)
def test_products_of_floats_are_exact(name: str, guarded: Guard) -> None:
    weight = stored(name, ROWS, columns_of(name))
    own = prepared(weight, guarded)
    for rows in (1, 11):
        x = torch.randn(rows, columns_of(name))
        assert relative_error(linear(guarded(x), own), reference(x, values(weight))) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_out_for_a_prefill_is_what_the_codecs_say(name: str, guarded: Guard) -> None:
    weight = stored(name, ROWS, columns_of(name))
    own = prepared(weight, guarded)
    expected = values(weight)[:, slice(None) if own.order is None else own.order]
    if name in INTEGERS:  # scale · (code − zero) there, scale · code − scale · zero here
        torch.testing.assert_close(dequantized(own, torch.float32).T, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(dequantized(own, torch.float32).T, expected)
    x = torch.randn(66, columns_of(name))
    assert relative_error(linear(x, own), reference(x, values(weight))) < 1e-6
    assert relative_error(as_plain(own).planes.low, values(weight)) < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_a_table_gives_its_rows(name: str, guarded: Guard) -> None:
    weight, ids = stored(name, ROWS, columns_of(name)), torch.tensor([36, 0, 5, 36])
    own = prepared(weight, guarded)
    torch.testing.assert_close(
        embedding(guarded(ids), own, 3.3), reference_embedding(ids, values(weight), 3.3), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(21,), (2, 16)], ids=str)
def test_the_layout_is_the_stored_weight_rearranged(name: str, shape: tuple[int, ...]) -> None:
    weight = stored(name, *shape, columns_of(name))
    if isinstance(weight, QuantTensor):  # any bytes at all
        bytes_ = np.random.default_rng(1).integers(0, 256, weight.blocks.shape, np.uint8)
        weight = QuantTensor(weight.format, weight.shape, bytes_)
    own = prepare_weight(weight, "cpu", torch.float16)
    back = own.inverse()
    assert type(back) is type(weight)
    fields = ("codes", "scales", "zero_points", "column_order") if isinstance(weight, PackedIntTensor) else ("blocks",)
    for field in fields:
        np.testing.assert_array_equal(getattr(back, field), getattr(weight, field))
    assert weight.nbytes <= own.nbytes < 1.7 * weight.nbytes  # 21 rows are padded to 32


@pytest.mark.parametrize(("source", "target"), [("TQ2_0", "Q2_K"), ("IQ3_S", "Q4_K"), ("IQ4_NL", "F16"), ("MXFP4", "BF16")])
def test_formats_without_a_form_are_converted(source: str, target: str) -> None:
    raw = np.random.default_rng(2).integers(0, 60, (3, FORMATS[source].row_bytes(256)), np.uint8)
    weight = QuantTensor(FORMATS[source], (3, 256), raw)
    own = prepare_weight(weight, "cpu", torch.float32)
    assert own.format == target
    assert relative_error(dequantized(own, torch.float32).T, values(weight)) < 1e-3


@pytest.mark.parametrize("stored_as", ["F32", "F16", "BF16", "F64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_plain_numbers_of_any_length(stored_as: str, dtype: torch.dtype, guarded: Guard) -> None:
    numbers = np.random.default_rng(3).standard_normal((ROWS, 45)).astype(PLAIN_DTYPES[stored_as])
    weight, bias = prepared(numbers, guarded, dtype=dtype), torch.randn(ROWS).to(dtype)
    meant = torch.from_numpy(numbers.astype(np.float32)).to(dtype)
    for rows in (1, 9, 65):
        x = torch.randn(rows, 45).to(dtype)
        y = linear(guarded(x), weight, guarded(bias))
        assert y.dtype == dtype
        assert relative_error(y, reference(x.float(), meant.float(), bias.float())) < 4 * torch.finfo(dtype).eps
    assert torch.equal(embedding(torch.tensor([4, 0]), weight), meant[[4, 0]])


@pytest.mark.parametrize("name", ["I4 groups of 96", "Q8_0"])
def test_every_head_has_its_own_matrix(name: str, guarded: Guard) -> None:
    weight = stored(name, 3, 20, 96)
    own = prepared(weight, guarded)
    for tokens in (2, 9, 65):
        x = torch.randn(tokens, 3, 96)
        assert relative_error(head_linear(guarded(x), own), reference_head_linear(x, values(weight))) < 1e-6


def test_half_precision_rounds_once(guarded: Guard) -> None:
    weight = stored("Q6_K", ROWS, 512)
    for dtype in (torch.float16, torch.bfloat16):
        own = prepared(weight, guarded, "int8", dtype)
        for rows in (1, 9):
            x = torch.randn(rows, 512).to(dtype)
            meant = rounded(x) if rows == 1 else x.float()
            assert relative_error(linear(guarded(x), own), reference(meant, values(weight))) < 2 * torch.finfo(dtype).eps


def test_no_rows_are_no_launch(guarded: Guard) -> None:
    own = prepared(stored("Q8_0", ROWS, 64), guarded)
    assert linear(torch.empty(0, 64), own).shape == (0, ROWS)
    assert embedding(torch.empty(0, dtype=torch.int64), own).shape == (0, 64)


@pytest.fixture
def split_tiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A GPU with so many multiprocessors that every K is split."""
    table = tiles.named_table("h200") | {"multiprocessors": 1000}
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(table), "utf-8")
    monkeypatch.setenv(tiles.VARIABLE, str(path))
    tiles.gpu_table.cache_clear()
    yield path
    tiles.gpu_table.cache_clear()


@pytest.mark.parametrize("rows", [3, 10])
def test_parts_of_k_are_added_in_order(rows: int, split_tiles: Path, guarded: Guard) -> None:
    columns = 320 if rows <= tiles.MAX_MATVEC_ROWS else 704
    weight, bias, x = stored("Q4_1", ROWS, columns), torch.randn(ROWS), torch.randn(rows, columns)
    table = tiles.gpu_table(x.device)
    if rows <= tiles.MAX_MATVEC_ROWS:
        assert tiles.matvec_tile(FORMS["Q4_1"], rows, ROWS, columns, 1, table).splits == 4
    else:
        assert tiles.matmul_tile(rows, ROWS, columns, 1, table).splits == 2
    own = prepared(weight, guarded)
    y = linear(guarded(x), own, guarded(bias))
    assert relative_error(y, reference(x, values(weight), bias)) < 1e-6
    assert torch.equal(linear(x, own, bias), y)


def test_a_file_of_tiles_that_is_none_is_told(split_tiles: Path) -> None:
    for text, message in (("{", "cannot be read"), ('{"matvec": {}}', "needs multiprocessors")):
        split_tiles.write_text(text, "utf-8")
        tiles.gpu_table.cache_clear()
        with pytest.raises(UsageError, match=message):
            tiles.gpu_table(torch.device("cpu"))


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090"])
def test_tiles_divide_what_they_must(name: str) -> None:
    table = tiles.named_table(name)
    for form in FORMS.values():
        for m in range(1, tiles.MAX_MATVEC_ROWS + 1):
            for k in (256, 4096, 11008):
                tile = tiles.matvec_tile(form, m, 4096, k, 1, table)
                assert k // 32 % tile.step == 0
                assert tile.splits & (tile.splits - 1) == 0
                assert form.sub_blocks == 1 or 8 % tile.step == 0 == tile.step % 2
    for m in range(1, tiles.MAX_MATMUL_ROWS + 1):
        assert tiles.matmul_tile(m, 4096, 4096, 1, table).block_m >= max(m, 16)


def test_rows_are_rounded_as_described(guarded: Guard) -> None:
    x = torch.randn(3, 96)
    x[1] = 0
    x[2, 40:60] *= 1e4
    made = quantize_rows(guarded(x))
    blocks = x.view(3, 3, 32)
    scales = blocks.abs().amax(-1) / 127
    torch.testing.assert_close(made.scales, scales, rtol=1e-6, atol=0.0)
    codes = torch.floor(blocks / torch.where(scales > 0, scales, 1.0)[..., None] + 0.5)
    assert (made.codes.view(3, 3, 32) - codes).abs().max() <= 1  # at ties
    assert int((made.codes.view(3, 3, 32) != codes).sum()) <= 1
    sums = (made.codes.view(3, 3, 2, 16).sum(-1) * made.scales[..., None]).flatten(1)
    torch.testing.assert_close(made.sums, sums, rtol=1e-6, atol=1e-6)
    wide, of_floats = float_rows(guarded(x.half()))
    assert torch.equal(wide, x.half().float())
    torch.testing.assert_close(of_floats, wide.view(3, 6, 16).sum(-1), rtol=1e-5, atol=1e-5)

"""pack_weight: every stored format ends in a native layout that holds its values."""

from __future__ import annotations

import logging
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from llmctl.kernels.native._native import PackedWeight, ThreadPool

from llmctl.kernels.formats.codecs import dequantize, dequantize_blocks
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.linear import _native as linear
from llmctl.kernels.linear._native import NATIVE_FORMATS, pack_weight

BLOCK_FORMATS = [name for name, f in FORMATS.items() if not f.is_plain]


def quant_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> QuantTensor:
    """A tensor of random codes whose float16 scales are about 0.01."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], FORMATS[name].row_bytes(shape[-1])), dtype=np.uint8)
    blocks[..., :] &= 0x2F  # as the high byte of a float16 it is a small number, wherever the scale lies
    return QuantTensor(FORMATS[name], shape, blocks)


def values_of(packed: PackedWeight) -> np.ndarray:
    """float32 (matrices * rows, columns)."""
    if packed.group_size:
        codes, scales, zeros = packed.to_groups()
        shape = (len(codes), packed.columns)
        return dequantize(PackedIntTensor(int(packed.layout[1]), packed.group_size, shape, codes, scales, zeros))
    return dequantize_blocks(FORMATS[packed.layout], packed.to_blocks())


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_block_format_is_packed(name: str) -> None:
    weight = quant_tensor(name, (37, 512))
    packed = pack_weight(weight, ThreadPool(2))
    assert (packed.rows, packed.columns, packed.matrices) == (37, 512, 1)
    assert (packed.layout == name) == (name in NATIVE_FORMATS)
    expected, got = dequantize(weight), values_of(packed)
    if name in NATIVE_FORMATS:
        assert np.array_equal(packed.to_blocks(), weight.blocks)
    else:
        assert np.linalg.norm(got - expected) < 5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", ml_dtypes.bfloat16, "<f8", "i1", "<i4"])
def test_plain_numbers_are_packed(dtype: object) -> None:
    weight = (np.random.default_rng(0).standard_normal((20, 50)) * 100).astype(dtype)
    packed = pack_weight(weight)
    assert np.array_equal(values_of(packed), weight.astype(np.float32))
    assert packed.layout == {2: "F16" if weight.dtype == np.float16 else "BF16"}.get(weight.dtype.itemsize, "F32")


def test_arrays_may_be_views() -> None:
    whole = np.random.default_rng(0).standard_normal((40, 120)).astype(np.float32)
    for view in (whole.T, whole[:, ::2], whole[5:33, 7:39]):
        assert np.array_equal(values_of(pack_weight(view)), view)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(21, 192), (3, 10, 64)])
def test_packed_integers_are_packed(bits: int, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] * bits // 8), dtype=np.uint8)
    scales = rng.standard_normal((*shape[:-1], shape[-1] // 64)).astype(np.float32)
    for zeros in (None, rng.integers(0, 1 << bits, scales.shape, dtype=np.uint8)):
        weight = PackedIntTensor(bits, 64, shape, codes, scales, zeros)
        assert np.array_equal(values_of(pack_weight(weight)).reshape(shape), dequantize(weight))


@pytest.mark.parametrize("name", ["Q4_K", "IQ2_XXS"])
def test_experts_are_matrices_of_one_weight(name: str) -> None:
    weight = quant_tensor(name, (3, 20, 256))
    packed = pack_weight(weight, ThreadPool(2))
    assert (packed.matrices, packed.rows) == (3, 20)
    alone = [values_of(pack_weight(QuantTensor(weight.format, (20, 256), blocks))) for blocks in weight.blocks]
    assert np.array_equal(values_of(packed), np.concatenate(alone))


def test_conversion_is_reported_once_a_format(caplog: pytest.LogCaptureFixture) -> None:
    linear._report.cache_clear()
    with caplog.at_level(logging.WARNING):
        for name in ("IQ2_XXS", "IQ2_XXS", "Q4_0", "TQ2_0"):
            pack_weight(quant_tensor(name, (16, 256)))
    assert [record.message for record in caplog.records] == [
        "IQ2_XXS has no native kernel: converted to Q8_0 in memory, 4.1x the bytes",
        "TQ2_0 has no native kernel: converted to Q2_K in memory, 1.3x the bytes",
    ]


def test_conversion_never_unfolds_the_whole_matrix() -> None:
    weight = quant_tensor("IQ3_S", (4096, 2048))
    pack_weight(quant_tensor("IQ3_S", (16, 256)))  # the grid is read on first use
    tracemalloc.start()
    pack_weight(weight)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 4096 * 2048 / 4


_HUNGRY = """
import resource
import numpy as np
from llmctl.errors import OutOfMemoryError
from llmctl.kernels.linear._native import pack_weight
weight = np.zeros((1 << 17, 1 << 14), np.float16)  # never touched
try:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    pack_weight(weight)
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_AS")
def test_no_memory_is_told_with_what_was_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", _HUNGRY], capture_output=True, text=True, check=False)
    assert "no memory for a weight of 131072 x 16384 numbers in F16 (4.3 GB)" in done.stdout, done.stderr

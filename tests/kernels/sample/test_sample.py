"""argmax and top_k, native and numpy's, against a plain sort."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmctl.kernels import sample
from llmctl.kernels.sample import _numpy


def implementation(name: str) -> SimpleNamespace:
    module = _numpy if name == "numpy" else importlib.import_module("llmctl.kernels.native._native")
    return SimpleNamespace(argmax=module.argmax, top_k=module.top_k, keep_allowed=module.keep_allowed)


@pytest.fixture(params=["numpy", "native"])
def ops(request) -> SimpleNamespace:
    return implementation(request.param)


def sorted_ids(logits: np.ndarray, k: int) -> list[int]:
    """What top_k must return, in plain Python."""
    order = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))[:k]
    return [i for i in order if logits[i] > -math.inf] or [0]


def check(ops: SimpleNamespace, logits: np.ndarray, k: int) -> None:
    ids, values = ops.top_k(logits, k)
    assert ids.tolist() == sorted_ids(logits, k)
    assert (ids.dtype, values.dtype) == (np.int64, np.float32)
    assert values.tolist() == logits[ids].tolist()
    assert ops.argmax(logits) == ids[0]


def test_the_package_offers_the_native_pair_where_it_is_built():
    native = importlib.import_module("llmctl.kernels.native._native")
    assert sample.argmax is native.argmax
    assert sample.top_k is native.top_k


@pytest.mark.parametrize("size", [1, 3, 4, 5, 255, 256, 257, 600, 5000])
@pytest.mark.parametrize("k", [1, 2, 40, 700, 5000])
@pytest.mark.parametrize(
    "make",
    [
        lambda random, size: random.normal(size=size),
        lambda random, size: random.integers(-3, 3, size),  # many are equal
        lambda random, size: np.arange(size),
        lambda random, size: -np.arange(size),
        lambda random, size: np.zeros(size),
        lambda random, size: np.where(random.random(size) < 0.01, 1.5, -np.inf),
        lambda random, size: np.full(size, -np.inf),
        lambda random, size: np.where(random.random(size) < 0.5, 0.0, -0.0),
        lambda random, size: random.choice([np.inf, -np.inf, 1.0], size),
    ],
)
def test_against_a_plain_sort(ops, size: int, k: int, make: Callable[..., np.ndarray]):
    check(ops, make(np.random.default_rng(size), size).astype(np.float32), k)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=600), st.integers(1, 700))
@pytest.mark.parametrize("name", ["numpy", "native"])
def test_any_numbers(name: str, values: list[float], k: int):
    check(implementation(name), np.array(values, dtype=np.float32), k)


@pytest.mark.parametrize("place", [0, 1, 255, 256, 599, 600])
def test_one_nan_is_found_wherever_it_is(ops, place: int):
    logits = np.linspace(-1, 1, 601, dtype=np.float32)
    logits[place] = np.nan
    assert ops.argmax(logits) == -1
    for k in (1, 7, 601):
        assert [len(part) for part in ops.top_k(logits, k)] == [0, 0]


def test_the_logits_are_only_read(ops):
    logits = np.linspace(1, -1, 300, dtype=np.float32)
    logits.flags.writeable = False
    ids, values = ops.top_k(logits, 3)
    values[:] = 0
    assert ids.tolist() == [0, 1, 2]
    assert logits[0] == 1


def test_senseless_calls_of_the_native_pair_are_refused():
    ops = implementation("native")
    for call in (lambda: ops.argmax(np.zeros(0, np.float32)), lambda: ops.top_k(np.zeros(3, np.float32), 0)):
        with pytest.raises(ValueError, match="must"):
            call()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 1.0])
def test_only_logits_with_a_bit_are_kept(ops, size: int, share: float):
    random = np.random.default_rng(size)
    bits, logits = random.random(size) < share, random.normal(size=size).astype(np.float32)
    allowed = np.packbits(np.pad(bits, (0, -size % 32)), bitorder="little").view("<u4").astype(np.uint32)
    expected = np.where(bits, logits, np.float32(-np.inf))
    ops.keep_allowed(logits, allowed)
    assert logits.tolist() == expected.tolist()


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match="a bit for every logit"):
        implementation("native").keep_allowed(np.zeros(33, np.float32), np.zeros(1, np.uint32))

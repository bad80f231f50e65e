"""Native attention, every instruction set of the machine: against the reference over the rounded keys and values, and against
itself bit for bit however the tokens are divided into calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.kernels._reference import ReferenceOps, ReferencePages
from llmctl.kernels.attention import BatchDescription, PageMap
from llmctl.kernels.formats.codecs import dequantize, quantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.kernels.native import _native as native
from llmctl.kernels.store_kv._reference_pages import PlainPages

PAGE = 16
TYPES = ["f32", "f16", "bf16", "fp8", "q8_0", "q5_1", "q4_0"]
SIDES = ["q8_0,q4_0", "f16,q5_1", "bf16,q8_0"]
"""Keys of one type, values of another."""
ROUNDING = ("amx", "avx512bf16")
every_isa = pytest.mark.parametrize("isa", native.available_isas())


def own(isa: str, type: str) -> str:
    """The pages to try an instruction set with where one type is enough: bf16 for those that leave others to avx512."""
    return "bf16" if isa in ROUNDING else type


@dataclass
class Sequences:
    """Sequences over scattered pages that hold NaN wherever nothing was stored; queries [T, heads, head_dim] of all tokens."""

    isa: str
    type: str
    pages: Any
    tables: list[np.ndarray]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    queries: list[np.ndarray]
    window: int | None = None
    softcap: float | None = None
    latent: int = 0
    sinks: bool = False
    anchors: int = 0

    @property
    def sink_scores(self) -> np.ndarray | None:
        """One for each query head, from far below the scores of the keys to far above."""
        return np.linspace(-20, 20, self.queries[0].shape[1], dtype=np.float32) if self.sinks else None

    def store(self, sequence: int, first: int, last: int) -> None:
        """The keys and values of tokens first … last − 1."""
        tokens = np.arange(first, last)
        slots = self.tables[sequence][tokens // PAGE] * PAGE + tokens % PAGE
        values = None if self.latent else self.values[sequence][first:last]
        native.store_kv(self.isa, self.pages, self.keys[sequence][first:last], values, slots)

    def attend(self, ranges: list[tuple[int, int]], threads: int = 1) -> np.ndarray:
        """One call: tokens first … last − 1 of each sequence, after they have been stored."""
        for sequence, (first, last) in enumerate(ranges):
            self.store(sequence, first, last)
        queries = np.concatenate([self.queries[s][first:last] for s, (first, last) in enumerate(ranges)])
        cu_seqlens = np.cumsum([0, *(last - first for first, last in ranges)]).tolist()
        contexts = [last for _, last in ranges]
        scale = queries.shape[-1] ** -0.5
        sequences = cu_seqlens, contexts, self.tables
        choices = self.window or 0, self.softcap or 0.0, threads, self.sink_scores, self.anchors
        return native.attention(self.isa, self.pages, queries, *sequences, scale, *choices)

    def in_chunks(self, size: int, threads: int = 1) -> np.ndarray:
        """The only sequence from its first token to its last, `size` tokens a call."""
        length = len(self.queries[0])
        chunks = [(first, min(first + size, length)) for first in range(0, length, size)]
        return np.concatenate([self.attend([chunk], threads) for chunk in chunks])

    @property
    def rounds(self) -> bool:
        """Whether queries and weights are rounded to bf16, as products of pairs want them."""
        if self.latent and (self.isa == "avx512bf16" or self.latent % 32):
            return False
        return self.isa in ROUNDING and self.type == "bf16" and self.keys[0].shape[-1] % 32 == 0

    def reference(self, ranges: list[tuple[int, int]], magnitudes: bool = False) -> np.ndarray:
        """What the reference makes of the keys and values that were stored, as they read back; of the values' magnitudes."""
        count = 1 + max(int(table.max()) for table in self.tables)
        kv_heads, head_dim = self.keys[0].shape[1:]
        widths = head_dim, self.latent or head_dim
        key_pages, value_pages = (np.zeros((count, PAGE, kv_heads, width), np.float32) for width in widths)
        for table, (_, last) in zip(self.tables, ranges, strict=True):
            slots = table[np.arange(last) // PAGE] * PAGE + np.arange(last) % PAGE
            for pages, stored in zip((key_pages, value_pages), native.load_kv(self.isa, self.pages, slots), strict=True):
                pages.reshape(-1, *stored.shape[1:])[slots] = stored
        if magnitudes:
            value_pages = np.abs(value_pages)
        queries = np.concatenate([self.queries[s][first:last] for s, (first, last) in enumerate(ranges)])
        if self.rounds:
            queries = torch.from_numpy(queries).bfloat16().float().numpy()
        sides = (numbers.reshape(-1, *numbers.shape[2:]) for numbers in (key_pages, value_pages))
        pages = ReferencePages(PAGE, *(PlainPages((0, 0, 0), "f32", "cpu", torch.from_numpy(side)) for side in sides))
        batch = describe(ranges, [torch.from_numpy(table) for table in self.tables])
        scale = queries.shape[-1] ** -0.5
        sinks = None if self.sink_scores is None else torch.from_numpy(self.sink_scores)
        choices = self.window, self.softcap, sinks, self.anchors
        return ReferenceOps().attention(torch.from_numpy(queries), pages, batch, scale, *choices).numpy()


def describe(ranges: list[tuple[int, int]], tables: list[torch.Tensor]) -> BatchDescription:
    """As much of a batch as attention reads."""
    return BatchDescription(
        token_ids=None,
        positions=None,
        inv_freqs=[],
        cu_seqlens_q=np.cumsum([0, *(last - first for first, last in ranges)]).tolist(),
        page_maps=[PageMap(None, [last for _, last in ranges], tables)],
        block_size=PAGE,
    )


def make(
    isa: str, lengths: list[int], heads: int = 6, kv_heads: int = 2, head_dim: int = 64, type: str = "f32", **options: Any
) -> Sequences:
    """Random sequences of `lengths` tokens; nothing stored yet. Scores spread over several units, so that maxima move."""
    rng = np.random.default_rng(sum(lengths) + heads + head_dim)
    counts = [-(-length // PAGE) for length in lengths]
    numbers = rng.permutation(sum(counts) + 3).astype(np.int64)
    tables = np.split(numbers[: sum(counts)], np.cumsum(counts)[:-1])
    key_type, _, value_type = type.partition(",")
    pages = native.KvPages(len(numbers), kv_heads, head_dim, key_type, options.get("latent", 0), value_type or None)
    native.fill_pages(pages, 0xFF)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    keys, values = ([normal(n, kv_heads, head_dim) for n in lengths] for _ in range(2))
    queries = [3 * normal(n, heads, head_dim) for n in lengths]
    return Sequences(isa, type, pages, tables, keys, values, queries, **options)


def assert_right(sequences: Sequences, ours: np.ndarray, ranges: list[tuple[int, int]]) -> None:
    """Against the reference. Rounded weights are off by 2^-8 and what 2^x is off by, their mean by that much of its spread."""
    expected = sequences.reference(ranges)
    if not sequences.rounds:
        return np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)
    spread = sequences.reference(ranges, magnitudes=True) + np.abs(expected)
    np.testing.assert_array_less(np.abs(ours - expected), 4.0e-3 * spread + 1e-5)


@every_isa
@pytest.mark.parametrize("type", TYPES + SIDES)
@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 2), (80, 1), (24, 3), (256, 1)])
def test_a_prompt_in_one_call(isa: str, type: str, head_dim: int, kv_heads: int) -> None:
    sequences = make(isa, [150], 3 * kv_heads, kv_heads, head_dim, type)
    assert_right(sequences, sequences.attend([(0, 150)]), [(0, 150)])


@every_isa
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 72, 96, 112, 128, 160, 192, 512])
def test_every_head_dim(isa: str, head_dim: int) -> None:
    for type in (own(isa, "f16"), "q8_0", "q5_1,q4_0"):
        sequences = make(isa, [70], 2, 1, head_dim, type)
        assert_right(sequences, sequences.attend([(0, 70)]), [(0, 70)])


@every_isa
@pytest.mark.parametrize("group", range(1, 10))
def test_every_size_of_group(isa: str, group: int) -> None:
    sequences = make(isa, [100], 2 * group, 2, 32, own(isa, "f32"))
    assert_right(sequences, sequences.attend([(0, 100)]), [(0, 100)])


@every_isa
def test_more_heads_on_a_key_than_rows_in_a_block(isa: str) -> None:
    sequences = make(isa, [20], 200, 1, 32, own(isa, "f32"))
    assert_right(sequences, sequences.attend([(0, 20)]), [(0, 20)])


@every_isa
@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1030])
def test_lengths_around_pages_tiles_and_partitions(isa: str, length: int) -> None:
    sequences = make(isa, [length], 2, 1, 32, own(isa, "f16"))
    assert_right(sequences, sequences.attend([(0, length)], threads=2), [(0, length)])
    last = [(length - 1, length)]
    assert_right(sequences, sequences.attend(last, threads=2), last)


@every_isa
@pytest.mark.parametrize("window", [1, 2, 17, 64, 100, 512, 600, 2000])
def test_sliding_windows(isa: str, window: int) -> None:
    sequences = make(isa, [700], 3, 1, 32, own(isa, "f32"), window=window)
    assert_right(sequences, sequences.attend([(0, 700)]), [(0, 700)])
    assert_right(sequences, sequences.attend([(690, 700)]), [(690, 700)])


@every_isa
@pytest.mark.parametrize("window", [1, 17, 64, 100, 512, 600, 2000])
@pytest.mark.parametrize("anchors", [1, 4, 16])
def test_anchors(isa: str, anchors: int, window: int) -> None:
    """Tokens inside the anchors, those that see both, and those between whose window and the anchors lies something."""
    sequences = make(isa, [700], 3, 1, 32, own(isa, "f32"), window=window, anchors=anchors)
    whole = sequences.attend([(0, 700)])
    assert_right(sequences, whole, [(0, 700)])
    assert_right(sequences, sequences.attend([(690, 700)], threads=2), [(690, 700)])
    sequences.anchors = 0
    assert np.abs(sequences.attend([(0, 700)]) - whole).max() > 0.05 or window == 2000


@every_isa
@pytest.mark.parametrize("type", ["f16", "bf16", "q8_0", "q4_0"])
def test_anchors_of_several_sequences(isa: str, type: str) -> None:
    sequences = make(isa, [200, 65, 300, 2, 600], 6, 2, 64, type, window=40, anchors=4, sinks=True)
    for s, stored in enumerate([199, 60, 170, 0, 597]):
        sequences.store(s, 0, stored)
    ranges = [(199, 200), (60, 65), (170, 300), (0, 2), (597, 600)]
    assert_right(sequences, sequences.attend(ranges, threads=2), ranges)


@every_isa
def test_keys_between_anchors_and_window_leave_no_trace(isa: str) -> None:
    options = {"window": 50, "anchors": 4}
    clean, spoilt = (make(isa, [700], 2, 1, 32, own(isa, "f32"), **options) for _ in range(2))
    spoilt.keys[0][4:600] = np.nan
    spoilt.values[0][4:600] = np.inf
    np.testing.assert_array_equal(spoilt.attend([(0, 700)])[649:], clean.attend([(0, 700)])[649:])
    np.testing.assert_array_equal(spoilt.attend([(699, 700)]), clean.attend([(0, 700)])[699:])


@every_isa
@pytest.mark.parametrize("softcap", [0.7, 5.0, 50.0])
def test_softcap(isa: str, softcap: float) -> None:
    sequences = make(isa, [90], 4, 2, 32, own(isa, "f32"), softcap=softcap, window=70)
    assert_right(sequences, sequences.attend([(0, 90)]), [(0, 90)])


@every_isa
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"softcap": 5.0}], ids=str)
def test_sinks(isa: str, type: str, options: dict[str, Any]) -> None:
    """A prompt in one call, then its last token by itself, whose keys are divided by partitions and merged."""
    sequences = make(isa, [600], 5, 1, 64, type, sinks=True, **options)
    assert_right(sequences, sequences.attend([(0, 600)]), [(0, 600)])
    last = [(599, 600)]
    with_sinks = sequences.attend(last, threads=2)
    assert_right(sequences, with_sinks, last)
    sequences.sinks = False
    without = sequences.attend(last)
    np.testing.assert_allclose(with_sinks[:, 0], without[:, 0], rtol=1e-5)
    assert np.abs(with_sinks[:, 4]).max() < 1e-3 < np.abs(without[:, 4]).max()


@every_isa
@pytest.mark.parametrize("type", TYPES)
def test_several_sequences_of_different_lengths(isa: str, type: str) -> None:
    """One decodes, one is verified, one is in the middle of its prompt, one has just begun, one is past a partition."""
    sequences = make(isa, [200, 65, 300, 1, 600], 6, 2, 64, type)
    for s, stored in enumerate([199, 60, 170, 0, 597]):
        sequences.store(s, 0, stored)
    ranges = [(199, 200), (60, 65), (170, 300), (0, 1), (597, 600)]
    assert_right(sequences, sequences.attend(ranges, threads=2), ranges)


@every_isa
@pytest.mark.parametrize(
    ("type", "options"),
    [("f32", {}), ("f16", {}), ("q8_0", {}), ("f16", {"window": 70}), ("q8_0", {"window": 530})]
    + [(type, {}) for type in ("fp8", "q5_1", "q4_0", "q8_0,q4_0")]
    + [("bf16", options) for options in ({}, {"window": 70}, {"window": 530}, {"softcap": 5.0})]
    + [(type, {"window": window, "anchors": 4}) for type in ("f16", "bf16", "q8_0") for window in (70, 530)]
    + [(type, {"sinks": True}) for type in TYPES],
)
def test_bits_do_not_depend_on_chunks(isa: str, type: str, options: dict[str, Any]) -> None:
    whole = make(isa, [540], 3, 1, 32, type, **options).in_chunks(540)
    assert np.isfinite(whole).all()
    for size in (1, 7, 64, 512):
        again = make(isa, [540], 3, 1, 32, type, **options).in_chunks(size, threads=1 + size % 2)
        np.testing.assert_array_equal(again, whole, err_msg=f"chunks of {size}")


@every_isa
def test_bits_of_the_smallest_numbers(isa: str) -> None:
    """Values around the least normal number, where the tile unit takes subnormal ones for 0: for each row in the same way."""

    def small() -> Sequences:
        sequences = make(isa, [130], 6, 2, 32, own(isa, "f32"))
        sequences.values[0] *= np.float32(2.0**-126)
        sequences.keys[0][::3] *= np.float32(2.0**-127)
        return sequences

    whole = small().in_chunks(130)
    assert np.isfinite(whole).all()
    assert np.abs(whole).max() > 0
    for size in (1, 5, 48):
        np.testing.assert_array_equal(small().in_chunks(size), whole)


@every_isa
@pytest.mark.parametrize("sinks", [False, True])
def test_bits_of_decoding_beyond_two_partitions(isa: str, sinks: bool) -> None:
    """Long contexts, where decode is divided by partitions and merged, prefill is not."""
    whole = make(isa, [1100], 4, 2, 32, own(isa, "f16"), sinks=sinks).in_chunks(1100)
    again = make(isa, [1100], 4, 2, 32, own(isa, "f16"), sinks=sinks)
    again.attend([(0, 1020)])
    for token in range(1020, 1100):
        np.testing.assert_array_equal(again.attend([(token, token + 1)], threads=2)[0], whole[token])


@every_isa
def test_bits_do_not_depend_on_company(isa: str) -> None:
    lengths = [530, 40, 77]
    together = make(isa, lengths, 6, 2, 32, own(isa, "f16")).attend([(0, n) for n in lengths])
    apart = make(isa, lengths, 6, 2, 32, own(isa, "f16"))
    apart.attend([(0, 530), (0, 1), (0, 1)])
    begin = 0
    for s, length in enumerate(lengths):
        ranges = [(i, i) for i in lengths]
        for token in (0, length // 2, length - 1):
            apart.store(s, 0, token)
            ranges[s] = (token, token + 1)
            np.testing.assert_array_equal(apart.attend(ranges)[0], together[begin + token])
        begin += length


@every_isa
@pytest.mark.parametrize("lengths", [[700], [1, 1030, 40, 300]])
def test_bits_do_not_depend_on_threads(isa: str, lengths: list[int]) -> None:
    ranges = [(0, n) for n in lengths]
    one = make(isa, lengths, 4, 2, 32, own(isa, "q8_0")).attend(ranges)
    for threads in (2, 3, 16):
        again = make(isa, lengths, 4, 2, 32, own(isa, "q8_0"))
        np.testing.assert_array_equal(again.attend(ranges, threads), one)
        last = [(n - 1, n) for n in lengths]
        np.testing.assert_array_equal(again.attend(last, threads), one[np.cumsum(lengths) - 1])


@every_isa
@pytest.mark.parametrize("type", TYPES)
def test_what_a_query_does_not_see_leaves_no_trace(isa: str, type: str) -> None:
    """Later keys and values of the same call are NaN: tokens before them keep their bits, later ones show it."""
    clean, spoilt = make(isa, [130], 6, 2, 64, type), make(isa, [130], 6, 2, 64, type)
    spoilt.keys[0][100:] = np.nan
    spoilt.values[0][100:] = np.nan
    before, after = clean.attend([(0, 130)]), spoilt.attend([(0, 130)])
    np.testing.assert_array_equal(after[:100], before[:100])
    assert np.isnan(after[100:]).all()


@every_isa
def test_keys_outside_the_window_leave_no_trace(isa: str) -> None:
    clean, spoilt = make(isa, [200], 2, 1, 32, own(isa, "f32"), window=50), make(isa, [200], 2, 1, 32, own(isa, "f32"), window=50)
    spoilt.keys[0][:100] = np.nan
    spoilt.values[0][:100] = np.nan
    np.testing.assert_array_equal(spoilt.attend([(0, 200)])[149:], clean.attend([(0, 200)])[149:])


@every_isa
def test_scores_far_apart(isa: str) -> None:
    """One key takes all; the others' weights underflow to nothing. Scores near 1000 carry errors of 1e-4 themselves."""
    sequences = make(isa, [80], 2, 1, 32, own(isa, "f32"))
    sequences.queries[0] *= 100
    atol = 2e-2 if sequences.rounds else 1e-3
    np.testing.assert_allclose(sequences.attend([(0, 80)]), sequences.reference([(0, 80)]), atol=atol)


@every_isa
@pytest.mark.parametrize(("type", "dtype"), [("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_what_is_stored_is_rounded_to_nearest_even(isa: str, type: str, dtype: torch.dtype, head_dim: int) -> None:
    pages = native.KvPages(2, 1, head_dim, type)
    keys = np.random.default_rng(1).standard_normal((4, 1, head_dim), dtype=np.float32)
    keys[0, 0, :8] = [0, 1e-8, -6e-8, 70000, np.inf, np.nan, 1 + 2**-11, 1 + 3 * 2**-9]
    values = keys[:, :, ::-1].copy()
    slots = np.array([31, 0, 17, 15])
    native.store_kv(isa, pages, keys, values, slots)
    for stored, given in zip(native.load_kv(isa, pages, slots), (keys, values), strict=True):
        np.testing.assert_array_equal(stored, torch.from_numpy(given).to(dtype).float().numpy())


@every_isa
def test_q8_0_keeps_the_scale_as_f16_and_rounds_codes(isa: str) -> None:
    pages = native.KvPages(1, 1, 72, "q8_0")
    keys = np.random.default_rng(2).standard_normal((3, 1, 72), dtype=np.float32)
    keys[1, 0, 32:64] = 0
    native.store_kv(isa, pages, keys, 2 * keys, np.array([3, 4, 5]))
    padded = np.zeros((3, 96), np.float32)
    padded[:, :72] = keys[:, 0]
    scale = np.abs(padded.reshape(3, 3, 32)).max(-1, keepdims=True) / np.float32(127)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(padded.reshape(3, 3, 32) * inverse)
    expected = (codes * scale.astype(np.float16).astype(np.float32)).reshape(3, 1, 96)[:, :, :72]
    stored_keys, stored_values = native.load_kv(isa, pages, np.array([3, 4, 5]))
    np.testing.assert_array_equal(stored_keys, expected)
    np.testing.assert_allclose(stored_values, 2 * keys, atol=2 * np.abs(keys).max() / 127 * 0.51)


@every_isa
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("head_dim", [24, 32])
def test_slot_minus_one_writes_nothing_and_neighbours_stay(isa: str, type: str, head_dim: int) -> None:
    pages = native.KvPages(2, 2, head_dim, type)
    rows = np.random.default_rng(3).standard_normal((32, 2, head_dim), dtype=np.float32)
    slots = np.arange(32)
    native.store_kv(isa, pages, rows, -rows, slots)
    before = native.load_kv(isa, pages, slots)
    native.store_kv(isa, pages, 9 * rows[:3], 9 * rows[:3], np.array([-1, 20, -1]))
    after = native.load_kv(isa, pages, slots)
    for old, new in zip(before, after, strict=True):
        changed = np.flatnonzero((old != new).any(axis=(1, 2)))
        assert changed.tolist() == [20]


@every_isa
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_bits_beside_values_that_are_not_finite(isa: str, poison: float) -> None:
    """Prefill in one call, where a row of scores lies beside others that see the poisoned values, against one token a call."""

    def poisoned() -> Sequences:
        sequences = make(isa, [300], 3, 1, 64, own(isa, "f16"), window=90)
        sequences.values[0][[77, 170]] = poison
        return sequences

    whole = poisoned().in_chunks(300)
    np.testing.assert_array_equal(poisoned().in_chunks(1), whole)
    seen = {token for first in (77, 170) for token in range(first, first + 90)}
    assert {int(token) for token in np.flatnonzero(~np.isfinite(whole).all(axis=(1, 2)))} == seen


@every_isa
@pytest.mark.parametrize("type", ["f32", "bf16"])
def test_scales_of_any_sign(isa: str, type: str) -> None:
    """Of 0 the mean of the values; a negative one is a positive one over turned queries."""
    sequences = make(isa, [70], 3, 1, 32, type)
    sequences.store(0, 0, 70)

    def attend(queries: np.ndarray, scale: float) -> np.ndarray:
        return native.attention(isa, sequences.pages, queries, [0, 70], [70], sequences.tables, scale)

    queries = sequences.queries[0]
    np.testing.assert_array_equal(attend(queries, -0.1), attend(-queries, 0.1))
    slots = sequences.tables[0][np.arange(70) // PAGE] * PAGE + np.arange(70) % PAGE
    values = native.load_kv(isa, sequences.pages, slots)[1]
    means = np.cumsum(values, axis=0) / np.arange(1, 71)[:, None, None]
    np.testing.assert_allclose(attend(queries, 0.0), np.broadcast_to(means, queries.shape), rtol=1e-5, atol=1e-5)


LATENT = pytest.mark.parametrize(
    ("heads", "head_dim", "latent"),
    [(3, 24, 16), (5, 24, 17), (16, 72, 64), (9, 64, 32), (40, 96, 96), (16, 576, 512)],
)


@every_isa
@pytest.mark.parametrize("type", TYPES)
@LATENT
def test_values_that_are_a_part_of_the_keys(isa: str, type: str, heads: int, head_dim: int, latent: int) -> None:
    sequences = make(isa, [75], heads, 1, head_dim, type, latent=latent)
    sequences.queries[0] /= 2  # sums of 576 products
    found = sequences.attend([(0, 75)], threads=2)
    assert found.shape == (75, heads, latent)
    assert_right(sequences, found, [(0, 75)])
    last = [(70, 75)]
    assert_right(sequences, sequences.attend(last), last)


@every_isa
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_bits_of_latent_pages(isa: str, type: str, head_dim: int) -> None:
    """However heads, tokens and keys are divided: one thread or many, any chunks, before and beyond a partition."""

    def made() -> Sequences:
        return make(isa, [540], 20, 1, head_dim, type, latent=32, window=530)

    whole = made().in_chunks(540)
    assert np.isfinite(whole).all()
    for size, threads in ((7, 1), (64, 3)):
        np.testing.assert_array_equal(made().in_chunks(size, threads), whole, err_msg=f"chunks of {size}")
    again = made()
    again.attend([(0, 505)])
    for token in range(505, 540):
        np.testing.assert_array_equal(again.attend([(token, token + 1)], 1 + token % 2)[0], whole[token])


@every_isa
@pytest.mark.parametrize("type", TYPES)
def test_latent_keys_that_a_query_does_not_see_leave_no_trace(isa: str, type: str) -> None:
    for latent in (48, 32):
        clean, spoilt = (make(isa, [130], 6, 1, 64, type, latent=latent) for _ in range(2))
        spoilt.keys[0][99:] = np.nan
        before, after = clean.attend([(0, 130)]), spoilt.attend([(0, 130)])
        np.testing.assert_array_equal(after[:99], before[:99])
        assert np.isnan(after[99:]).all()


@pytest.mark.parametrize("type", TYPES)
def test_latent_pages_keep_the_keys_alone(type: str) -> None:
    isa = native.available_isas()[0]
    pages = native.KvPages(10, 1, 64, type, latent=32)
    assert 2 * pages.nbytes == native.KvPages(10, 1, 64, type).nbytes
    rows = np.zeros((1, 1, 64), np.float32)
    with pytest.raises(ValueError, match="latent pages take no values"):
        native.store_kv(isa, pages, rows, rows, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="latent values must be 0 to 64 columns of the keys, found 65"):
        native.KvPages(10, 1, 64, type, latent=65)


def test_pages_take_the_bytes_of_their_types() -> None:
    """For 64 numbers: two blocks of 34, 24 or 18 bytes."""
    sizes = {type: native.KvPages(10, 2, 64, type).nbytes / (10 * 2 * 2 * PAGE) for type in TYPES}
    assert sizes == {"f32": 256, "f16": 128, "bf16": 128, "fp8": 64, "q8_0": 68, "q5_1": 48, "q4_0": 36}
    assert native.KvPages(10, 2, 64, "q8_0", value_type="q4_0").nbytes == 10 * 2 * PAGE * (68 + 36)


@every_isa
@pytest.mark.parametrize("type", ["q8_0", "q5_1", "q4_0"])
def test_blocks_hold_what_files_of_the_format_would(isa: str, type: str) -> None:
    """But for rounding at the middle of two codes: files round away from zero."""
    rows = np.random.default_rng(4).standard_normal((40, 2, 96), dtype=np.float32)
    rows[3] = 0
    rows[4, 0] = 2.5
    rows[5] *= np.float32(1e-30)
    pages = native.KvPages(3, 2, 96, type, rotates=False)
    slots = np.arange(40) + 8
    native.store_kv(isa, pages, rows, rows[::-1].copy(), slots)
    expected = dequantize(quantize(rows.reshape(80, 96), FORMATS[type.upper()])).reshape(rows.shape)
    step = np.abs(rows).max(-1, keepdims=True) / {"q8_0": 127, "q5_1": 15, "q4_0": 8}[type]
    for stored, wanted in zip(native.load_kv(isa, pages, slots), (expected, expected[::-1]), strict=True):
        assert (stored != wanted).mean() < 0.01
        assert (np.abs(stored - wanted) < 1.01 * np.maximum(step, step[::-1]) + 1e-12).all()


@every_isa
def test_fp8_is_rounded_to_nearest_even_and_keeps_to_its_range(isa: str) -> None:
    rows = (np.random.default_rng(5).standard_normal((16, 1, 64)) * 10.0 ** np.linspace(-4, 2, 64)).astype(np.float32)
    rows[0, 0, :8] = [448, 463, 465, -1e6, 2.0**-9, 2.0**-10, 3 * 2.0**-10, -0.0]
    pages = native.KvPages(1, 1, 64, "fp8")
    native.store_kv(isa, pages, rows, -rows, np.arange(16))
    expected = torch.from_numpy(rows).clamp(-448, 448).to(torch.float8_e4m3fn).float().numpy()
    keys, values = native.load_kv(isa, pages, np.arange(16))
    np.testing.assert_array_equal(keys, expected)
    np.testing.assert_array_equal(values, -expected)


@every_isa
@pytest.mark.parametrize("head_dim", [32, 64, 96, 256])
def test_a_rotation_brings_an_outlier_into_reach_of_four_bits(isa: str, head_dim: int) -> None:
    """One dimension is 30 times the others, as keys have it: without a rotation its block keeps little else."""
    rows = np.random.default_rng(6).standard_normal((16, 1, head_dim), dtype=np.float32)
    rows[:, :, 5] *= 30
    errors = {}
    for rotates in (False, True):
        pages = native.KvPages(1, 1, head_dim, "q4_0", rotates=rotates)
        native.store_kv(isa, pages, rows, rows, np.arange(16))
        keys, values = native.load_kv(isa, pages, np.arange(16))
        np.testing.assert_array_equal(keys, values)
        errors[rotates] = np.abs(np.delete(keys - rows, 5, axis=2)).mean()
    assert errors[True] < 0.8 * errors[False]


@every_isa
def test_latent_pages_of_four_bits_are_rotated_by_what_divides_both_parts(isa: str) -> None:
    sequences = make(isa, [100], 4, 1, 96, "q4_0", latent=64)
    assert_right(sequences, sequences.attend([(0, 100)]), [(0, 100)])

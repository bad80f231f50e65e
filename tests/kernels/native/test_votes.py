"""What the last queries of a sequence look at, and stored rows that move, on every instruction set of the machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_attention import PAGE, TYPES, every_isa, make

from llmctl.kernels.attention_votes._reference import attention_votes
from llmctl.kernels.native import _native as native

SIDES = ["f16,q5_1", "q8_0,q4_0"]
POOL = native.ThreadPool(2)


def slots_of(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return table[tokens // PAGE] * PAGE + tokens % PAGE


@every_isa
@pytest.mark.parametrize(
    ("type", "options"),
    [(type, {}) for type in (*TYPES, *SIDES)]
    + [(type, {"latent": 32, "kv_heads": 1}) for type in TYPES]
    + [(type, {"head_dim": 72}) for type in ("f32", "f16", "bf16", "fp8")]
    + [("bf16", options) for options in ({"softcap": 2.0}, {"sinks": True}, {"heads": 12, "kv_heads": 1, "head_dim": 32})]
    + [("f16", options) for options in ({"softcap": 2.0}, {"sinks": True}, {"heads": 12, "kv_heads": 1, "head_dim": 32})],
    ids=str,
)
def test_votes_are_those_of_the_reference(isa: str, type: str, options: dict[str, Any]) -> None:
    length, observed = 333, 21
    choices = {"heads": 6, "kv_heads": 2, **options}
    sequences = make(isa, [length], type=type, **choices)
    sequences.store(0, 0, length)
    slots = slots_of(sequences.tables[0], np.arange(length))
    keys, _ = native.load_kv(isa, sequences.pages, slots)
    queries, softcap, sinks = sequences.queries[0][-observed:], options.get("softcap"), sequences.sink_scores
    call = sequences.pages, queries, sequences.tables[0], length, 0.125, softcap or 0.0, sinks
    found = native.attention_votes(isa, POOL, *call)
    sinks = None if sinks is None else torch.from_numpy(sinks)
    expected = attention_votes(torch.from_numpy(queries), torch.from_numpy(keys), 0.125, softcap, sinks).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-6)
    if sinks is None:
        np.testing.assert_allclose(found.sum(1), observed * choices["heads"] / choices["kv_heads"], rtol=1e-4)
    np.testing.assert_array_equal(native.attention_votes(isa, native.ThreadPool(1), *call), found, err_msg="with one thread")


@every_isa
@pytest.mark.parametrize("type", [*TYPES, *SIDES, "latent"])
def test_moved_rows_are_the_same_bits_and_nothing_else_moves(isa: str, type: str) -> None:
    """Each head takes other tokens, in place: from its own pages to their beginning."""
    latent = {"latent": 32, "kv_heads": 1} if type == "latent" else {"kv_heads": 2}
    sequences = make(isa, [200], head_dim=64, type="bf16" if type == "latent" else type, **latent)
    sequences.store(0, 0, 200)
    table, heads = sequences.tables[0], latent["kv_heads"]
    rng = np.random.default_rng(0)
    kept = np.stack([np.sort(rng.permutation(200)[:70]) for _ in range(heads)])
    before = native.load_kv(isa, sequences.pages, slots_of(table, np.arange(200)))
    native.move_tokens(isa, POOL, sequences.pages, slots_of(table, kept), slots_of(table, np.arange(70)))
    after = native.load_kv(isa, sequences.pages, slots_of(table, np.arange(200)))
    for old, new in zip(before, after, strict=True):
        for head in range(heads):
            np.testing.assert_array_equal(new[:70, head], old[kept[head], head])
            np.testing.assert_array_equal(new[70:, head], old[70:, head])


def test_slots_outside_the_pages_are_refused() -> None:
    sequences = make(native.active_isa(), [20])
    for sources, targets in (([[999], [0]], [0]), ([[0], [0]], [-1]), ([[0]], [0])):
        with pytest.raises(ValueError, match=r"a slot is outside|sources must be"):
            native.move_tokens(native.active_isa(), POOL, sequences.pages, np.array(sources), np.array(targets))

"""Cache sizes by the formulas everybody can check, and the pages an engine asks for."""

from __future__ import annotations

import pytest

from llmctl.runtime.cache.memory import (
    Demand,
    LayerShape,
    bytes_per_token,
    fitting_context,
    group_layers,
    layer_bytes_per_token,
    least_bytes,
    plan_cache,
)


def test_gpt3_175b_at_2048_tokens_in_f16() -> None:
    """96 layers, 96 heads of 128: 100.7 MB a layer, 9.66 GB a request, 309.2 GB for 32."""
    layers = [LayerShape(96, 128)] * 96
    assert layer_bytes_per_token(layers[0], "f16") * 2048 == 100_663_296
    assert plan_cache(layers, "f16", Demand(2048)).nbytes == 9_663_676_416
    assert plan_cache(layers, "f16", Demand(2048, 32)).nbytes == 309_237_645_312


def test_sharing_kv_heads_costs_a_quarter() -> None:
    shared, full = [LayerShape(8, 128)] * 32, [LayerShape(32, 128)] * 32
    assert bytes_per_token(shared, "f16") * 4 == bytes_per_token(full, "f16")


def test_block_types_store_whole_blocks_along_the_head() -> None:
    assert layer_bytes_per_token(LayerShape(2, 64), "q8_0") == 2 * 2 * 68
    assert layer_bytes_per_token(LayerShape(2, 64), "k=q8_0,v=q4_0") == 2 * (68 + 36)
    assert layer_bytes_per_token(LayerShape(1, 576, latent=512), "q8_0") == 18 * 34
    assert bytes_per_token([LayerShape(8, 80)], "q8_0") is None
    assert plan_cache([LayerShape(8, 80)], "q8_0", Demand(10)).nbytes is None
    assert least_bytes([LayerShape(8, 80)], "q8_0", 10) is None


@pytest.mark.parametrize(("context", "expected"), [(100, 100 + 100), (512, 512 + 512), (4096, 4096 + 512)])
def test_what_is_seen_of_a_window_is_the_least(context: int, expected: int) -> None:
    layers = [LayerShape(1, 256), LayerShape(1, 256, sliding_window=512)]
    assert least_bytes(layers, "f16", context) == expected * 2 * 256 * 2


def test_layers_with_the_same_window_are_a_group() -> None:
    """Five with a window to one without, as gemma 3 has them, and one by one, as gpt-oss has them."""
    five = [LayerShape(1, 8, None if i % 6 == 5 else 512) for i in range(13)]
    assert [(g.window, g.layers) for g in group_layers(five)] == [
        (512, (0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12)),
        (None, (5, 11)),
    ]
    assert [g.layers for g in group_layers([LayerShape(1, 8, w) for w in (128, None, 128, None)])] == [(0, 2), (1, 3)]
    assert len(group_layers([LayerShape(1, 8), LayerShape(2, 16)])) == 1, "other heads, the same tokens"


@pytest.mark.parametrize(
    ("window", "draft", "pages"), [(512, 0, 33), (512, 8, 34), (1, 0, 2), (16, 0, 2), (17, 0, 3), (8, 4, 2), (1024, 15, 66)]
)
def test_a_sequence_holds_its_window_the_longest_draft_and_one_token_in_whole_pages(window, draft, pages) -> None:
    assert Demand(8192, longest_draft=draft).sequence_pages(window) == pages
    tokens = window + draft + 1
    assert pages * 16 >= tokens
    assert pages == max(len({token // 16 for token in range(first, first + tokens)}) for first in range(16))
    assert Demand(20, longest_draft=draft).sequence_pages(window) <= 2, "never more than the context"


def test_a_window_costs_less_than_a_context_and_never_more() -> None:
    windowed = [LayerShape(1, 256, 512)]
    plan = plan_cache(windowed, "f16", Demand(32_768))
    assert plan.num_pages == (33 + 1 + 512 // 16,)  # the window, one more, a step of the prompt
    assert plan.nbytes == 66 * 16 * 2 * 256 * 2
    assert plan_cache(windowed, "f16", Demand(300)).num_pages == plan_cache([LayerShape(1, 256)], "f16", Demand(300)).num_pages


def test_little_memory_gives_fewer_sequences_a_full_context_and_at_least_one() -> None:
    layers = [LayerShape(1, 8), LayerShape(1, 8, 16)]
    wanted = plan_cache(layers, "f32", Demand(1024, 8, 64))
    least = plan_cache(layers, "f32", Demand(1024, 1, 64))
    for most in (0, least.nbytes, least.nbytes + 1000, (wanted.nbytes + least.nbytes) // 2, wanted.nbytes, 1 << 40):
        plan = plan_cache(layers, "f32", Demand(1024, 8, 64), most_bytes=most)
        assert least.nbytes <= plan.nbytes <= max(least.nbytes, min(most, wanted.nbytes))
        counts = zip(least.num_pages, plan.num_pages, wanted.num_pages, strict=True)
        assert all(low <= found <= high for low, found, high in counts)
    assert plan.num_pages == wanted.num_pages


@pytest.mark.parametrize("layers", [[LayerShape(2, 8)], [LayerShape(2, 8, 64)] * 5 + [LayerShape(2, 8)], [LayerShape(2, 8, 64)]])
def test_the_longest_context_that_fits(layers: list[LayerShape]) -> None:
    for most_bytes in (0, 5_000, 1_000_000):
        found = fitting_context(layers, "f16", most_bytes, 10_000)
        assert plan_cache(layers, "f16", Demand(found)).nbytes <= most_bytes
        assert found == 10_000 or plan_cache(layers, "f16", Demand(found + 1)).nbytes > most_bytes
    if layers[-1].sliding_window:
        assert found == 10_000, "a window makes any context fit"

"""Cache sizes by the formulas everybody can check."""

from __future__ import annotations

import pytest

from llmctl.runtime.cache.memory import LayerShape, bytes_per_token, cache_bytes, layer_bytes_per_token, row_bytes


def test_gpt3_175b_at_2048_tokens_in_f16() -> None:
    """96 layers, 96 heads of 128: 100.7 MB a layer, 9.66 GB a request, 309.2 GB for 32."""
    layers = [LayerShape(96, 128)] * 96
    assert layer_bytes_per_token(layers[0], "f16") * 2048 == 100_663_296
    assert cache_bytes(layers, "f16", 2048) == 9_663_676_416
    assert cache_bytes(layers, "f16", 2048, batch=32) == 309_237_645_312


def test_sharing_kv_heads_costs_a_quarter() -> None:
    shared, full = [LayerShape(8, 128)] * 32, [LayerShape(32, 128)] * 32
    assert bytes_per_token(shared, "f16") * 4 == bytes_per_token(full, "f16")


def test_block_types_store_whole_blocks_along_the_head() -> None:
    assert row_bytes(64, "q8_0") == 68
    assert row_bytes(64, "q4_0") == 36
    assert row_bytes(80, "q8_0") is None
    assert bytes_per_token([LayerShape(8, 80)], "q8_0") is None
    assert cache_bytes([LayerShape(8, 80)], "q8_0", 10) is None


@pytest.mark.parametrize(("context", "expected"), [(100, 100 + 100), (512, 512 + 512), (4096, 4096 + 512)])
def test_windowed_layers_need_their_window_only(context: int, expected: int) -> None:
    layers = [LayerShape(1, 256), LayerShape(1, 256, sliding_window=512)]
    assert cache_bytes(layers, "f16", context, windowed=True) == expected * 2 * 256 * 2
    assert cache_bytes(layers, "f16", context) == 2 * context * 2 * 256 * 2

"""The figures that need no model of size: waste of pages, and a shared beginning found."""

from __future__ import annotations

from kv_figures import page_waste, reuse
from make_tiny_model import make_tiny_model

from llmctl.runtime.loading import load_model


def test_pages_waste_at_most_one_and_a_half_percent():
    paged, contiguous = page_waste()
    assert 0 < paged <= 0.015
    assert contiguous > 0.6


def test_a_shared_beginning_is_found(tmp_path):
    model = load_model(make_tiny_model(tmp_path, "gemma3"), backend="native", threads=1)
    assert reuse(model, 100)[2] == 100

"""Whole models through the Triton backend give the reference's logits: a prompt, then tokens one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_triton import EXACT, FAMILIES, IDS, tiny_folder, tiny_model

from llmctl.errors import OutOfMemoryError
from llmctl.kernels import _triton, _triton_graphs
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.engine.model_runner import LogitsReader, compute_logits
from llmctl.runtime.gpu_placement import GpuChoice
from llmctl.runtime.loading import load_model, open_model

PROMPT = 6


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_reference(family: str) -> None:
    expected = compute_logits(load_model(tiny_folder(family), backend="reference"), IDS)
    model = tiny_model(family)
    assert model.ops.name == "triton"
    np.testing.assert_allclose(compute_logits(model, IDS[:PROMPT]), expected[:PROMPT], atol=2e-4, rtol=0)
    decoded = np.concatenate([np.array(rows) for rows in LogitsReader(model, len(IDS), PROMPT).rows(IDS, PROMPT, 1)])
    np.testing.assert_allclose(decoded, expected[PROMPT:], atol=2e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # what is recorded reads a page that nobody wrote
def test_steps_by_graphs_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that runs again what was recorded, over the memory that a graph would read."""
    plain = compute_logits(tiny_model("llama"), IDS[:2], 1)
    monkeypatch.setattr(_triton_graphs, "recorder_for", lambda device: RunsAgain())
    assert np.array_equal(compute_logits(tiny_model("llama"), IDS[:2], 1), plain)


class RunsAgain:
    """Records the forward pass as a function."""

    @staticmethod
    def record(run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        logits = run().clone()
        return lambda: logits.copy_(run()), logits

    @staticmethod
    def to_host(values: torch.Tensor) -> np.ndarray:
        return values.numpy()


def test_layers_on_two_backends_give_the_logits_of_one() -> None:
    """With the interpreter for a GPU: the first layer on the native backend, the second and the head here."""
    expected = compute_logits(load_model(tiny_folder("llama"), backend="reference"), IDS)
    model = tiny_model("llama", gpu=GpuChoice(1))
    assert (model.ops.name, model.ops.device) == ("native+triton", "cpu+cpu")
    decoded = np.concatenate([np.array(rows) for rows in LogitsReader(model, len(IDS), PROMPT).rows(IDS, PROMPT, 1)])
    np.testing.assert_allclose(decoded, expected[PROMPT:], atol=2e-4, rtol=0)


@pytest.mark.parametrize(("activations", "tolerance"), [("float", 2e-4), ("int8", 0.15)])
def test_quantized_weights_give_what_they_stand_for(activations: str, tolerance: float) -> None:
    """All matrices of Q8_0 and Q4_0, one and several tokens; rounding activations to int8 costs that much of logits up to 4."""
    formats = {
        f"model.layers.{i}.{part}.weight": FORMATS["Q4_0" if part.startswith("mlp") else "Q8_0"]
        for i in range(2)
        for part in (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
    }
    expected = compute_logits(open_model(tiny_folder("llama"), backend="reference").load(formats=formats), IDS[:4])
    model = open_model(tiny_folder("llama"), **{**EXACT, "activations": activations}).load(formats=formats)
    np.testing.assert_allclose(compute_logits(model, IDS[:4], 3), expected, atol=tolerance, rtol=0)


def test_no_memory_for_a_weight_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_triton, "prepare_weight", full)
    with pytest.raises(OutOfMemoryError, match=r"weight of 384 x 96: fewer --gpu-layers"):
        tiny_model("llama")

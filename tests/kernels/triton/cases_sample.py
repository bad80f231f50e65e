"""Draws on the device: the kernels' tokens are the reference's, and the reference's are distributed as they should be."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from llmctl.kernels.sample import _reference as reference
from llmctl.kernels.sample import _triton as sample_triton

Guard = Callable[[torch.Tensor], torch.Tensor]
LONG = 2**40 + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 7, 4096, 4099])
def test_tokens_are_the_reference(size: int, dtype: torch.dtype, guarded: Guard) -> None:
    logits = (torch.randn(4, size) * 3).to(dtype)
    logits[1, 0] = -torch.inf if size > 1 else 0.0
    inputs = torch.tensor([0.0, 0.7, 1.0, 5.0]), torch.tensor([1, LONG, -3, 0]), torch.tensor([0, 9, 2**31, 7])
    found = sample_triton.sample(guarded(logits), *map(guarded, inputs))
    assert torch.equal(found, reference.sample(logits, *inputs))


def test_equal_logits_nan_and_limits(guarded: Guard) -> None:
    logits = torch.zeros(3, 4100)
    logits[1, 4098], logits[2, 4097] = torch.nan, 2.0
    inputs = torch.tensor([0.0, 0.0, 9.0]), torch.zeros(3, dtype=torch.int64), torch.arange(3)
    limits = torch.tensor([-torch.inf, 0.0, 1.0])
    assert sample_triton.sample(guarded(logits), *inputs, limits).tolist() == [0, -1, 4097]


def draws(count: int, temperature: float, logits: torch.Tensor) -> np.ndarray:
    """How often each token was drawn."""
    inputs = torch.full((count,), temperature), torch.arange(count) * 7 + 1, torch.arange(count) % 5
    return np.bincount(reference.sample(logits.expand(count, -1), *inputs).numpy(), minlength=len(logits)) / count


def test_draws_follow_the_odds() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, -torch.inf, 2.0])
    np.testing.assert_allclose(draws(4000, 0.8, logits), (logits / 0.8).softmax(0).numpy(), atol=0.03)


def drafts(sequences: int, count: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of the target, drafted tokens, what they were drawn from."""
    odds = torch.randn(sequences, count, size).softmax(-1)
    drafted = odds.flatten(0, 1).multinomial(1).view(sequences, count)
    return torch.randn(sequences, count + 1, size), drafted, odds


@pytest.mark.parametrize("with_odds", [True, False])
@pytest.mark.parametrize(("count", "size"), [(3, 5), (1, 4100), (0, 8)])
def test_what_comes_of_drafts_is_the_reference(count: int, size: int, with_odds: bool, guarded: Guard) -> None:
    sequences = 6 if size < 100 else 3
    logits, drafted, odds = drafts(sequences, count, size)
    if count > 1:
        drafted[1, 1:] = -1
        drafted[5] = logits[5, :count].argmax(-1)
        odds[4] = logits[4, :count].softmax(-1)  # a draft that is the target
    temperatures = torch.tensor([1.0, 0.7, 0.0, 2.0, 1.0, 0.0])[:sequences]
    inputs = temperatures, torch.arange(sequences) * LONG, torch.arange(sequences)
    choices = guarded(odds) if with_odds else None
    found = sample_triton.verify(guarded(logits), guarded(drafted), choices, *map(guarded, inputs))
    expected = reference.verify(logits, drafted, odds if with_odds else None, *inputs)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("with_odds", [True, False])
def test_verified_tokens_follow_the_targets_odds(with_odds: bool) -> None:
    count, target, draft = 2000, torch.tensor([0.5, -1.0, 1.0, 0.0]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    drafted = draft.expand(count, -1).multinomial(1, generator=torch.Generator().manual_seed(3))
    odds = draft.expand(count, 1, -1) if with_odds else None
    inputs = torch.ones(count), torch.arange(count) * 11, torch.zeros(count, dtype=torch.int64)
    tokens, lengths = reference.verify(target.expand(count, 2, -1), drafted, odds, *inputs)
    first = np.bincount(tokens[:, 0].numpy(), minlength=4) / count
    second = np.bincount(tokens[lengths == 2, 1].numpy(), minlength=4) / int((lengths == 2).sum())
    np.testing.assert_allclose(first, target.softmax(0).numpy(), atol=0.03)
    np.testing.assert_allclose(second, target.softmax(0).numpy(), atol=0.05)

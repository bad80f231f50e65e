"""Perplexity and divergence on models whose logits the test writes, against sums written out here."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmctl.errors import LlmctlError, UsageError
from llmctl.runtime import evaluate as module
from llmctl.runtime.evaluate import Estimate, cut, evaluate

VOCAB = 32


class Letters:
    """A tokenizer with an id a letter."""

    bos_token_id = 1

    def __init__(self, add_bos: bool) -> None:
        self.add_bos = add_bos

    def encode(self, text: str) -> list[int]:
        return [1] * self.add_bos + [ord(letter) - 87 for letter in text]  # a: 10


def logits_of(seed: int):
    """Logits in which every token of the context counts, with its position."""

    def next_logits(ids: list[int]) -> np.ndarray:
        state = seed
        for token_id in ids:
            state = (state * 31 + token_id + 1) % 1_000_003
        return np.random.default_rng(state).normal(0, 2, VOCAB).astype(np.float32)

    return next_logits


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - math.log(np.exp(wide).sum())


def places(chunks: list[list[int]]) -> list[tuple[list[int], int]]:
    """(context, the token that follows) of everything that counts."""
    return [(c[: i + 1], c[i + 1]) for c in chunks for i in range(len(c) // 2, len(c) - 1)]


CHUNKS = np.random.default_rng(5).integers(0, VOCAB, (7, 21)).tolist()


# --- chunks -----------------------------------------------------------------------------------------------------------


def test_the_text_is_cut_into_whole_chunks():
    assert cut(Letters(add_bos=False), "abcdefghij", 4) == [[10, 11, 12, 13], [14, 15, 16, 17]]


def test_every_chunk_begins_with_bos_in_the_place_of_its_first_token():
    assert cut(Letters(add_bos=True), "abcdefghij", 4) == [[1, 10, 11, 12], [1, 14, 15, 16]]


def test_no_more_chunks_than_asked_for():
    assert cut(Letters(add_bos=False), "abcdefghij", 4, 1) == [[10, 11, 12, 13]]


def test_a_text_too_short_names_both_numbers():
    with pytest.raises(UsageError, match=r"3 tokens, a chunk 4"):
        cut(Letters(add_bos=False), "abc", 4)
    with pytest.raises(UsageError, match="at least 4"):
        cut(Letters(add_bos=False), "abcdef", 3)


# --- one model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4, 5, 20, 21])
def test_perplexity_is_that_of_the_second_halves(stub_model, length):
    chunks = [chunk[:length] for chunk in CHUNKS]
    losses = [-log_softmax(logits_of(7)(context))[token] for context, token in places(chunks)]
    result = evaluate(stub_model(logits_of(7)), chunks)
    assert result.num_scored == len(losses) == 7 * (length - length // 2 - 1)
    assert (result.num_chunks, result.context_length, result.comparison) == (7, length, None)
    assert result.perplexity.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    error = np.std(losses, ddof=1) / math.sqrt(len(losses)) * math.exp(np.mean(losses))
    assert result.perplexity.error == pytest.approx(error, rel=1e-5)


def test_a_sure_model_has_perplexity_one_and_an_ignorant_one_the_size_of_the_vocabulary(stub_model):
    chunks = [[*range(12)]]
    sure = evaluate(stub_model(lambda ids: 100 * np.eye(VOCAB)[ids[-1] + 1]), chunks)
    ignorant = evaluate(stub_model(lambda ids: np.full(VOCAB, 3.0)), chunks)
    assert sure.perplexity.value == pytest.approx(1)
    assert ignorant.perplexity.value == pytest.approx(VOCAB)


def test_a_perplexity_beyond_any_float_is_infinite(stub_model):
    wrong = evaluate(stub_model(lambda ids: 1e4 * np.eye(VOCAB)[ids[-1]]), [[*range(12)]])
    assert wrong.perplexity == Estimate(math.inf, math.inf)


def test_tokens_the_sampler_may_not_draw_have_no_share(stub_model):
    result = evaluate(stub_model(lambda ids: np.full(VOCAB, 3.0), num_tokens=20), [[*range(12)]])
    assert result.perplexity.value == pytest.approx(20)


def test_the_prompt_runs_in_steps_without_logits_and_pages_are_used_again(stub_model, monkeypatch):
    monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(module, "_LOGITS_BYTES", 4 * VOCAB * 3)
    model = stub_model(logits_of(7))
    in_steps = evaluate(model, CHUNKS)
    assert model.decoder.steps[:7] == [[4], [4], [2], [3], [3], [3], [1]]
    monkeypatch.undo()
    assert evaluate(stub_model(logits_of(7)), CHUNKS) == in_steps


def test_progress_counts_chunks(stub_model):
    seen: list[int] = []
    evaluate(stub_model(logits_of(7)), CHUNKS[:3], progress=seen.append)
    assert seen == [1, 2, 3]


def test_what_is_not_a_number_is_an_error(stub_model):
    with pytest.raises(LlmctlError, match="not numbers"):
        evaluate(stub_model(lambda ids: np.full(VOCAB, np.nan)), CHUNKS[:1])


# --- two models -------------------------------------------------------------------------------------------------------


def test_divergence_is_from_the_other_model_to_this_one(stub_model):
    divergences, agreements, ratios = [], [], []
    for context, token in places(CHUNKS):
        ours, theirs = log_softmax(logits_of(7)(context)), log_softmax(logits_of(8)(context))
        divergences.append((np.exp(theirs) * (theirs - ours)).sum())
        agreements.append(ours.argmax() == theirs.argmax())
        ratios.append(theirs[token] - ours[token])
    found = evaluate(stub_model(logits_of(7)), CHUNKS, stub_model(logits_of(8))).comparison
    assert found.kl.value == pytest.approx(np.mean(divergences), rel=1e-5)
    assert found.kl.error == pytest.approx(np.std(divergences, ddof=1) / math.sqrt(len(divergences)), rel=1e-5)
    assert found.kl_median == pytest.approx(np.median(divergences), rel=1e-5)
    assert found.kl_99 == pytest.approx(np.quantile(divergences, 0.99), rel=1e-5)
    assert found.kl_max == pytest.approx(max(divergences), rel=1e-5)
    assert found.same_top.value == pytest.approx(np.mean(agreements))
    assert found.perplexity_ratio.value == pytest.approx(math.exp(np.mean(ratios)), rel=1e-5)
    assert found.perplexity == evaluate(stub_model(logits_of(8)), CHUNKS).perplexity


def test_a_model_is_nothing_away_from_itself(stub_model):
    found = evaluate(stub_model(logits_of(7)), CHUNKS, stub_model(logits_of(7))).comparison
    assert (found.kl, found.kl_max, found.same_top, found.perplexity_ratio) == (
        Estimate(0, 0), 0, Estimate(1, 0), Estimate(1, 0)
    )  # fmt: skip


def test_a_small_divergence_is_not_drowned_by_rounding(stub_model):
    """Logits shifted as a whole by a large number are the same distribution; one of them moved a little is nearly so."""
    base = np.linspace(0, 8, VOCAB, dtype=np.float32)
    moved = base + np.float32(16)
    moved[-1] += np.float32(1 / 32)
    p, q = np.exp(log_softmax(base)), log_softmax(moved)
    expected = (p * (np.log(p) - q)).sum()
    found = evaluate(stub_model(lambda ids: moved), CHUNKS, stub_model(lambda ids: base)).comparison
    assert found.kl.value == pytest.approx(expected, rel=0.02)


def test_models_with_different_numbers_of_tokens_cannot_be_compared(stub_model):
    with pytest.raises(UsageError, match="32 and 20 tokens"):
        evaluate(stub_model(logits_of(7)), CHUNKS, stub_model(logits_of(7), num_tokens=20))


def test_the_error_of_a_single_value_is_zero():
    assert Estimate.mean(np.array([2.5])) == Estimate(2.5, 0.0)

"""Agreement, gaps and free texts of check_activations.py, with models whose logits the test writes."""

from __future__ import annotations

import json

import numpy as np
import pytest
from check_activations import Disagreement, PromptResult, compare, greedy, main, report, verdicts

PROMPT = [3, 1, 2]


def counting(ids: list[int]) -> np.ndarray:
    """The next number is most likely, the one after it nearly."""
    logits = np.zeros(32)
    logits[(ids[-1] + 1) % 32], logits[(ids[-1] + 2) % 32] = 5.0, 4.5
    return logits


def wrong_after(*tokens: int, by: float):
    """Counting, but for the number after some, which loses so much that another one is likelier."""

    def next_logits(ids: list[int]) -> np.ndarray:
        logits = counting(ids)
        if ids[-1] in tokens:
            logits[(ids[-1] + 1) % 32] -= by
        return logits

    return next_logits


def test_disagreements_have_their_gap_and_their_error(stub_model):
    models = {"reference": stub_model(counting), "int8": stub_model(wrong_after(4, 6, by=0.75)), "float": stub_model(counting)}
    text = greedy(models["reference"], PROMPT, 40)
    assert text[:5] == [3, 4, 5, 6, 7]
    result = compare("count", PROMPT, text, models)
    assert result.places == 40
    assert result.disagreements == [Disagreement(place, 0.5, 0.75) for place in (2, 4, 34, 36)]
    assert all(each.explained for each in result.disagreements)
    assert result.rms_error == pytest.approx((0.75**2 * 4 / 40 / 32) ** 0.5)
    assert (result.first_difference, result.gap_there) == (None, None)


def test_a_free_text_that_leaves_the_references_is_told_with_the_gap(stub_model):
    models = {"reference": stub_model(counting), "int8": stub_model(counting), "float": stub_model(wrong_after(4, by=0.75))}
    result = compare("count", PROMPT, greedy(models["reference"], PROMPT, 6), models)
    assert (result.disagreements, result.first_difference, result.gap_there) == ([], 2, 0.5)


def test_a_text_that_ends_early_differs_where_it_ends(stub_model):
    models = {"reference": stub_model(counting), "int8": stub_model(counting)}
    models["float"] = stub_model(counting, eos_token_ids=(5,))
    assert compare("count", PROMPT, greedy(models["reference"], PROMPT, 6), models).first_difference == 3


def test_verdicts():
    good = PromptResult("good", 100, 0.1, [Disagreement(1, 0.1, 0.2)] * 3)
    assert [ok for _, ok in verdicts([good])] == [True, True, True]
    assert [ok for _, ok in verdicts([PromptResult("few", 100, 0.1, [Disagreement(1, 0.1, 0.2)] * 4)])] == [False, True, True]
    assert [ok for _, ok in verdicts([PromptResult("far", 100, 0.1, [Disagreement(1, 0.2, 0.2)])])] == [True, False, True]
    parted = PromptResult("parted", 100, 0.1, [], 7, 0.01)
    assert [ok for _, ok in verdicts([good] * 9 + [parted])] == [True, True, True]
    assert [ok for _, ok in verdicts([good] * 8 + [parted])] == [True, True, False]


def test_the_report_names_places_and_reasons():
    result = PromptResult("far", 100, 0.125, [Disagreement(7, 0.3, 0.2)], 9, 0.01)
    header, row, line = report([result])
    assert header.split()[0] == "PROMPT"
    assert row.split() == ["far", "99/100", "0.1250", "differs", "at", "9", "(gap", "1.00e-02)"]
    assert line == "  far, token 7: gap 0.3000, error 0.2000, NOT EXPLAINED"


def test_the_command_line_names_a_model_that_is_not_there(tmp_path, capsys):
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"prompts": {"a": {"ids": [1]}}}))
    assert main([str(tmp_path / "none.gguf"), "--prompts", str(prompts)]) == 1
    assert "none.gguf" in capsys.readouterr().err

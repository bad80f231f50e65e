"""How check_llama_cpp.py judges logits, and what it says of a library that ends badly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from check_llama_cpp import CLOSE, NUM_STEPS, compare, llama_cpp_logits

EXPECTED = np.tile(np.array([0.0, 3.0, 1.0, 2.0]), (NUM_STEPS, 1))


def changed(step: int, token: int, value: float) -> np.ndarray:
    rows = EXPECTED.copy()
    rows[step, token] = value
    return rows


def test_every_step_agrees_within_what_differs() -> None:
    result = compare(changed(7, 2, 1.5), EXPECTED, "llama")
    assert (result.steps, result.ended, result.largest) == (NUM_STEPS, "all", 0.5)


def test_another_token_ends_the_agreement() -> None:
    result = compare(changed(5, 3, 3.5), EXPECTED, "llama")
    assert (result.steps, result.ended) == (5, "differs")


def test_a_step_at_which_two_logits_are_close_ends_it_without_a_verdict() -> None:
    expected = changed(4, 3, 3.0 - CLOSE / 2)
    result = compare(changed(4, 3, 4.0), expected, "llama")
    assert (result.steps, result.ended) == (4, "close")


def test_an_interpreter_without_the_library_is_named_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no such library here')")
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"code 1: .*no such library here"):
        llama_cpp_logits(str(program), tmp_path / "no.gguf", [1, 2, 3])

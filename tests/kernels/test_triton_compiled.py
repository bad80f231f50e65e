"""Every Triton kernel compiles for the GPUs it is for, without spills, within their shared memory, and takes no more than the
table in the repository says. Results are kept by what was compiled: a change compiles its own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.kernels.triton_lib import compilation
from llmctl.kernels.triton_lib.compilation import Case, Resources, compile_case, complaints, hot_loop, read_table, row_name

CACHE = Path(__file__).parents[2] / ".cache" / "kernels"
PAIRS = [(case, arch) for case in compilation.kernel_cases() for arch in case.archs]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a kernel and GPU."""
    if "pair" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all-kernels")
        pairs = [pair for pair in PAIRS if everything or pair[0].every_commit]
        metafunc.parametrize("pair", pairs, ids=[row_name(*pair).replace(" ", "-") for pair in pairs])


def test_compiles_to_no_worse_than_the_table_says(pair: tuple[Case, int]) -> None:
    assert complaints(*pair, compile_case(*pair, CACHE), read_table()) == []


def test_the_table_has_a_row_for_every_kernel_and_no_other() -> None:
    assert sorted(read_table()["kernels"]) == sorted(row_name(*pair) for pair in PAIRS)


CASE = replace(PAIRS[0][0], name="k", weights_per_loop=8, most_per_weight=1.5)
FOUND = Resources(registers=40, spills=0, shared=1024, per_weight=1.25)
TABLE = {**read_table(), "kernels": {"k sm_80": {"registers": 40, "spills": 0, "shared": 1024, "per_weight": 1.25}}}


def test_what_equals_the_table_or_is_better_is_right() -> None:
    assert complaints(CASE, 80, FOUND, TABLE) == []
    assert complaints(CASE, 80, replace(FOUND, registers=30, shared=0, per_weight=1.0), TABLE) == []


@pytest.mark.parametrize("change", [{"registers": 41}, {"shared": 1025}, {"per_weight": 1.3}, {"spills": 8}], ids=str)
def test_a_kernel_that_became_worse_is_told(change: dict[str, float]) -> None:
    (told,) = complaints(CASE, 80, replace(FOUND, **change), TABLE)
    (field,) = change
    assert f"k sm_80: {field} " in told


@pytest.mark.parametrize("change", [{"shared": 166_913}, {"per_weight": 1.6}, {"per_weight": None}, {"spills": 8}], ids=str)
def test_limits_hold_with_a_compiler_the_table_does_not_know(change: dict[str, float]) -> None:
    other = {**TABLE, "triton": "0.0", "kernels": {}}
    assert complaints(CASE, 80, FOUND, other) == []
    assert len(complaints(CASE, 80, replace(FOUND, **change), other)) == 1


def test_a_kernel_without_a_row_is_told() -> None:
    (told,) = complaints(CASE, 90, FOUND, TABLE)
    assert "--record" in told


def test_the_hot_loop_is_the_longest_without_a_loop_inside() -> None:
    lines = ["LDC R1;", "LBB0:", "IADD R0;", "LBB1:", "FADD R2;", "FADD R3;", "@P0 BRA LBB1;", "ISETP R0;", "@P1 BRA LBB0;"]
    lines += ["LBB2:", "MOV R0;", "@P0 BRA LBB2;", "EXIT;", "LBB3:", "BRA LBB3;"]
    assert hot_loop("\n".join(line if line.endswith(":") else f"--:-:-:-:1\t{line}" for line in lines)) == lines[4:7]
    assert hot_loop("--:-:-:-:1\tEXIT;") == []


def test_an_argument_without_a_type_is_named() -> None:
    with pytest.raises(ValueError, match="'x'"):
        compile_case(replace(CASE, types={n: t for n, t in CASE.types.items() if n != "x"}), 80)

"""bench_kernels.py on matrices of a few kilobytes: what is measured, not how fast it is."""

from __future__ import annotations

import json

import bench_kernels
import numpy as np
import pytest
from bench_kernels import FORMATS, Row, line, main, random_bytes

from llmctl.kernels.native import _native as native


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(bench_kernels, "_ROWS", 32)
    monkeypatch.setattr(bench_kernels, "_COLUMNS", 512)
    reader = native.MemoryReader
    monkeypatch.setattr(native, "MemoryReader", lambda size: reader(size >> 10))


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_every_format_with_few_tokens_and_with_many(activations, capsys):
    assert main(["--tokens", "1,9", "--megabytes", "0", "--activations", activations, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["isa"] == native.active_isa()
    rows = [Row(**{key: value for key, value in row.items() if key != "share"}) for row in report["rows"]]
    names = [name for name in FORMATS if activations == "float" or name not in ("F32", "F16", "BF16")]
    assert [(row.format, row.tokens) for row in rows] == [(name, count) for name in names for count in (1, 9)]
    for row in rows:
        size = native.PackedWeight(row.format, 16 if row.tokens == 1 else 32, 512, 128 if row.format in ("I4", "I8") else 0)
        assert row.gigabytes_per_s * row.microseconds * 1e3 == pytest.approx(size.nbytes)
        assert row.gigaoperations_per_s * row.microseconds * 1e3 == pytest.approx(2 * size.rows * 512 * row.tokens)
        assert min(row.memory_ceiling, row.operations_ceiling) > 0


def test_the_table_shows_the_nearer_ceiling(capsys):
    row = Row("Q4_0", "int8", 1, 12.4, 30.0, 120.0, 40.0, 1000.0)
    assert row.share == 0.75
    assert line(row) == ("Q4_0", "int8", 1, "12", "30.0 / 40.0", "120 / 1000", "75%")
    assert main(["--formats", "q8_0", "--tokens", "2", "--megabytes", "0"]) == 0
    header, measured = capsys.readouterr().out.splitlines()
    assert header.split()[0] == native.active_isa().upper()
    assert measured.split()[:3] == ["Q8_0", "int8", "2"]


def test_random_weights_are_numbers():
    data = random_bytes(np.random.default_rng(1), 1 << 12)
    assert np.isfinite(data.view(np.float16)).all()
    assert np.isfinite(data.view(np.float32)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--isa", "mmx"], "this machine and build have"),
        (["--formats", "Q4_0,Q9"], "Q9: known are F32"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_what_cannot_be_measured(arguments, message, capsys):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err

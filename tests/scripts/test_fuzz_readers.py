"""A short run of the fuzzer over both readers, and that it would notice what it is there for."""

from __future__ import annotations

import mmap
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import fuzz_readers
import pytest
from fuzz_mutations import damaged, damaged_json, damaged_safetensors

from llmctl.errors import FormatError


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("samples")
    fuzz_readers.make_samples(folder)
    return folder


def test_damaged_files_are_read_or_refused(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No crash, no hang, no memory, no exception but ours; and the damage is neither always fatal nor never."""
    code = fuzz_readers.main(["--samples", str(samples), "--count", "400", "--seed", "9"])
    output = capsys.readouterr()
    assert (code, output.err) == (0, "")
    assert output.out.startswith("400 damaged files: 0 faults\n")
    counts = {line.split()[1]: int(line.split()[0]) for line in output.out.splitlines()[1:-1]}
    assert counts["FormatError"] > 40
    assert counts["sound"] + counts["faults"] > 40


def test_sound_samples_have_no_errors(samples: Path) -> None:
    outcomes = {}
    for sample in samples.iterdir():
        outcomes[sample.name] = fuzz_readers.read_all(sample / "m.gguf" if "gguf" in sample.name else sample)
    assert outcomes.pop("formats-gguf") == "UnsupportedError"  # it has no tokenizer
    assert set(outcomes.values()) == {"sound"}


def test_the_same_number_is_the_same_file(samples: Path, tmp_path: Path) -> None:
    def contents(folder: Path) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in folder.iterdir()}

    for number in range(5):
        fuzz_readers.damage_one(samples, number, 0, tmp_path / "a")
        fuzz_readers.damage_one(samples, number, 0, tmp_path / "b")
        assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("damage", [
    lambda rng: damaged(bytes(range(256)), 100, rng),
    lambda rng: damaged_json(b'{"a": [1, {"b": "c"}], "d": null}', rng),
    lambda rng: damaged_safetensors(b'\x02\0\0\0\0\0\0\0{}', rng),
])  # fmt: skip
def test_damage_of_anything_is_bytes(damage: Callable[[Random], bytes]) -> None:
    made = {damage(Random(seed)) for seed in range(300)}
    assert len(made) > 100


def raising() -> str:
    raise IndexError("a fault")


def hoarding() -> str:
    with mmap.mmap(-1, 300 << 20) as memory:  # not of what the process has been given already
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1
    return "kept"


def working() -> str:
    return str(sum(range(5_000_000)))


@pytest.mark.parametrize(
    ("function", "limits", "message"),
    [
        (raising, (2.0, 200), "IndexError: a fault"),
        (hoarding, (5.0, 200), "MB"),
        (working, (0.001, 200), "s of computing"),
        (lambda: "sound", (2.0, 200), None),
    ],
)
def test_what_counts_as_a_fault(function: Callable[[], str], limits: tuple[float, int], message: str | None) -> None:
    totals = fuzz_readers.Totals()
    fuzz_readers._count({"end": 7, **fuzz_readers._measured(function)}, limits, totals)
    assert len(totals.faults) == (message is not None)
    assert not message or (totals.faults[0].startswith("file 7: ") and message in totals.faults[0])


@pytest.mark.parametrize("script", ["import os; os.abort()", "import time; time.sleep(60)"])
def test_a_worker_that_dies_or_hangs_is_a_fault_of_its_file(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(fuzz_readers, "_PATIENCE", 1)
    original = subprocess.Popen

    def popen(command: list[str], **options: object) -> subprocess.Popen[str]:
        return original([command[0], "-c", "print('{\"begin\": 3}', flush=True); " + script], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    totals = fuzz_readers.Totals()
    assert fuzz_readers._run_worker(Path("unused"), 3, 10, 0, (2.0, 200), totals) == 4
    assert totals.faults[0].startswith("file 3: the process ended with")


def test_errors_must_be_one_line() -> None:
    with pytest.raises(AssertionError):
        fuzz_readers._named(FormatError("two\nlines"))

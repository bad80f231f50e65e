"""`llmctl convert`: streams, names, exit codes, JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.runtime.checkpoint import open_checkpoint

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, where files go that are not told otherwise."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def folder(scripted: Path, tmp_path: Path) -> Path:
    """A copy of the scripted model whose weights may be changed."""
    copy = tmp_path / "scripted-20K"
    copy.mkdir()
    for file in scripted.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def change(folder: Path, **tensors: np.ndarray) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **tensors}, folder / "model.safetensors")


def test_the_result_is_the_path(call: Callable[..., Any], scripted: Path, here: Path) -> None:
    done = call("convert", scripted, "--type", "f16")
    assert done.code == 0, done.err
    assert done.out == f"{next(here.iterdir()).name}\n"
    name = done.out.strip()
    assert name.startswith("scripted-")
    assert name.endswith("K-F16.gguf")
    assert "Writing " in done.err
    assert "16.0" in done.err
    assert not [line for line in done.err.splitlines() if "\x1b" in line]
    assert open_checkpoint(here / name).metadata["general.file_type"] == 1
    assert call("convert", scripted, "-o", "x.gguf", "--quiet") == (0, "x.gguf\n", "")


def test_what_it_wrote_runs(call: Callable[..., Any], scripted: Path) -> None:
    call("convert", scripted, "-o", "x.gguf")
    expected = call("run", scripted, "A", "--no-chat", "--temp", "0", "--quiet")
    assert (expected.code, call("run", "x.gguf", "A", "--no-chat", "--temp", "0", "--quiet").out) == (0, expected.out)
    chat = [call("run", path, "hello", "--temp", "0", "--quiet").out for path in (scripted, "x.gguf")]
    assert chat[0] == chat[1] != ""


def test_json(call: Callable[..., Any], folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    change(folder, **{"vision_tower.a.weight": np.zeros((2, 2), np.float32)})
    done = call("convert", folder, "-o", "x.gguf", "--type", "Q8_0", "--json")
    report = json.loads(done.out)
    assert {key: report[key] for key in ("version", "command", "input", "output", "dry_run", "type", "file_type")} == {
        "version": 1,
        "command": "convert",
        "input": str(folder),
        "output": "x.gguf",
        "dry_run": False,
        "type": "Q8_0",
        "file_type": 7,
    }
    with open_checkpoint("x.gguf") as checkpoint:
        assert [(t["name"], t["type"], t["shape"], t["bytes"]) for t in report["tensors"]] == [
            (entry.name, entry.format.name, list(entry.shape), entry.nbytes) for entry in checkpoint.entries()
        ]
        assert report["totals"]["bytes"] == checkpoint.total_bytes
    assert report["totals"]["bytes_before"] == sum(weight.nbytes for weight in weights.values())
    assert report["totals"]["file_bytes"] == Path("x.gguf").stat().st_size
    assert report["left_out"] == ["vision_tower.a.weight"]
    assert "Not part of the text model, left out: vision_tower (1 tensor)" in done.err
    assert report["warnings"] == [
        line.partition("warning: ")[2] for line in done.err.splitlines() if line.startswith("llmctl: warning: ")
    ]


def test_rows_that_do_not_fit_are_reported(call: Callable[..., Any], scripted: Path) -> None:
    """The scripted model's rows have 272 and 4 elements."""
    done = call("convert", scripted, "--type", "Q4_0", "-o", "x.gguf", "--json")
    report = json.loads(done.out)
    wanted = {"blk.0.attn_q.weight": "Q4_0", "output.weight": "Q6_K"}
    found = {one["name"]: one for one in report["substitutions"]}
    for name, type_name in wanted.items():
        assert found[name] == {"name": name, "wanted": type_name, "used": "F16", "row_length": 272}
    assert "8 tensors are in F16 instead of Q4_0, which needs rows that are a multiple of 32: " in done.err
    assert "1 tensor is in F16 instead of Q6_K" in done.err


def test_a_dry_run_says_it_all_and_writes_nothing(call: Callable[..., Any], scripted: Path, here: Path) -> None:
    (here / "x.gguf").write_text("precious")
    text = call("convert", scripted, "--type", "Q4_0", "-o", "x.gguf", "--dry-run")
    assert text.code == 0
    assert "blk.*.ffn_up.weight" in text.out
    assert "would write x.gguf: 12 tensors" in text.out
    assert "instead of Q4_0" in text.err
    assert "x.gguf exists already: without --force it will not be replaced" in text.err
    report = json.loads(call("convert", scripted, "--type", "Q4_0", "-o", "x.gguf", "--dry-run", "--json").out)
    assert (report["dry_run"], report["output"], report["totals"]["file_bytes"]) == (True, "x.gguf", None)
    assert [path.name for path in here.iterdir()] == ["x.gguf"]
    call("convert", scripted, "--type", "Q4_0", "-o", "x.gguf", "--force")
    done = json.loads(call("convert", scripted, "--type", "Q4_0", "-o", "x.gguf", "--force", "--json").out)
    assert report["tensors"] == done["tensors"]
    assert report["totals"] | {"file_bytes": done["totals"]["file_bytes"]} == done["totals"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "taken.gguf"], 1, "taken.gguf: exists already; --force replaces it, -o names another file"),
        (["-o", "missing/x.gguf"], 1, "missing/x.gguf: the folder missing does not exist"),
        (["-o", "missing/"], 2, "-o missing/: there is no such folder"),
        (["-o", ""], 2, "-o: the name of the output is empty"),
        (["--type", "IQ2_XS"], 1, "type 'IQ2_XS' can be read, but not written; types are auto, F32"),
        (["--type", "Q4_KM"], 2, "there is no type 'q4_km'; did you mean q4_k_m?"),
        (["--to", "onnx"], 2, "--to onnx: there is no such target; targets are gguf, safetensors, gptq"),
        (["--to", "safetensors", "--type", "Q8_0"], 2, "--type q8_0: a safetensors folder has auto, f16, bf16, f32"),
        (["--to", "safetensors", "-o", "taken.gguf"], 1, "taken.gguf: is a file"),
        (["--pre", "nonsense"], 1, "unknown pre-tokenizer rule 'nonsense'"),
        (["--type"], 2, "'--type' requires an argument"),
        (["--nonsense"], 2, "no such option: --nonsense"),
    ],
)
def test_errors_are_one_line(
    call: Callable[..., Any], scripted: Path, here: Path, arguments: list[str], code: int, message: str
) -> None:
    (here / "taken.gguf").write_text("precious")
    done = call("convert", scripted, *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err.lower() if code == 2 else message in done.err
    assert len(done.err.splitlines()) == 1
    assert [(path.name, path.read_text()) for path in here.iterdir()] == [("taken.gguf", "precious")]


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"{}"])
def test_sources_that_are_no_model(call: Callable[..., Any], here: Path, content: bytes | None) -> None:
    if content is not None:
        (here / "bad.gguf").write_bytes(content)
    done = call("convert", "bad.gguf", "-o", "out.gguf")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("llmctl: error: bad.gguf")
    assert len(done.err.splitlines()) == 1
    assert not (here / "out.gguf").exists()


def test_a_folder_without_tokenizer(call: Callable[..., Any], folder: Path, here: Path) -> None:
    (folder / "tokenizer.json").unlink()
    done = call("convert", folder, "-o", "out.gguf")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert "no tokenizer" in done.err
    assert list(here.iterdir()) == []


def test_overflow_names_the_tensor_and_leaves_no_file(call: Callable[..., Any], folder: Path, here: Path) -> None:
    """float16 ends at 65504, bfloat16 does not."""
    weight = load_file(folder / "model.safetensors")[UP].copy()
    weight[2, 7] = 1e5
    change(folder, **{UP: weight})
    done = call("convert", folder, "--type", "F16", "-o", "x.gguf")
    assert done.code == 1
    assert f"tensor '{UP}' (blk.0.ffn_up.weight): 100000 in row 2, column 7 does not fit F16" in done.err
    assert list(here.iterdir()) == []
    assert call("convert", folder, "--type", "BF16", "-o", "x.gguf").code == 0


def test_surplus_tokens(call: Callable[..., Any], folder: Path) -> None:
    """Tokens without a row of the embedding, and the way out that the message names."""
    document = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    flags = {"normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    document["added_tokens"].append({"id": 272, "content": "<surplus>", "special": True, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    done = call("convert", folder, "-o", "x.gguf")
    assert done.code == 1
    assert "has 272 rows, but there are 1 tokens beyond them, the first is '<surplus>' (id 272); --drop-surplus" in done.err
    assert call("convert", folder, "-o", "x.gguf", "--drop-surplus").code == 0
    assert len(open_checkpoint("x.gguf").metadata["tokenizer.ggml.tokens"]) == 272


def test_names_beyond_ascii(call: Callable[..., Any], folder: Path, llmctl: Callable[..., Any]) -> None:
    """The path opens, output that the terminal cannot show is replaced, JSON stays valid."""
    odd = folder.rename(folder.with_name("modèle ü 🙂"))
    assert call("convert", odd, "-o", "né 🙂.gguf").out == "né 🙂.gguf\n"
    assert open_checkpoint("né 🙂.gguf").metadata["general.name"] == "modèle ü 🙂"
    environment = {"PYTHONIOENCODING": "cp1252"}
    done = llmctl("convert", odd, "-o", "x🙂.gguf", "--json", env=environment, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == "x🙂.gguf"
    assert Path("x🙂.gguf").exists()


def test_a_read_only_folder(
    call: Callable[..., Any], scripted: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests may run as root, who may write anywhere, so the system's answer is the test's."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    done = call("convert", scripted, "-o", "x.gguf")
    assert (done.code, done.err) == (1, "llmctl: error: x.gguf: the folder . cannot be written to\n")
    assert list(here.iterdir()) == []


def test_a_file_too_large_for_its_disk(scripted: Path, here: Path, llmctl: Callable[..., Any]) -> None:
    """With a limit of the system in place of a full disk."""
    import resource

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = llmctl("convert", scripted, "-o", "x.gguf", preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert "x.gguf: cannot be written: File too large" in done.stderr
    assert list(here.iterdir()) == []


def test_to_a_folder_and_back(call: Callable[..., Any], scripted: Path, here: Path) -> None:
    made = call("convert", scripted, "--to", "safetensors", "-o", "folder", "--json")
    report = json.loads(made.out)
    assert {key: report[key] for key in ("command", "output", "dry_run", "type", "left_out", "rounded")} == {
        "command": "convert",
        "output": "folder",
        "dry_run": False,
        "type": report["type"],
        "left_out": [],
        "rounded": [],
    }
    assert sorted(path.name for path in Path("folder").iterdir()) == sorted([*report["files"], "model.safetensors"])
    assert call("convert", scripted, "--to", "safetensors", "-o", "folder").code == 1
    assert call("convert", scripted, "--to", "safetensors", "-o", "folder", "--force", "--quiet").out == "folder\n"
    dry = call("convert", scripted, "--to", "safetensors", "-o", "other", "--dry-run")
    assert dry.out.startswith("would write other: ")
    assert not Path("other").exists()
    assert call("convert", "folder", "-o", "back.gguf", "--quiet").out == "back.gguf\n"
    answers = [call("run", path, "A", "--no-chat", "--temp", "0", "--quiet").out for path in (scripted, "folder", "back.gguf")]
    assert answers[0] == answers[1] == answers[2]


def test_split_and_merged(call: Callable[..., Any], scripted: Path, here: Path) -> None:
    call("convert", scripted, "-o", "whole.gguf")
    size = Path("whole.gguf").stat().st_size
    dry = call("convert", scripted, "-o", "part.gguf", "--split-max-size", str(size // 4), "--dry-run")
    assert "would write part.gguf in " in dry.out
    done = call("convert", scripted, "-o", "part.gguf", "--split-max-size", str(size // 4), "--quiet")
    parts = sorted(Path().glob("part-*.gguf"))
    assert len(parts) > 2
    assert done.out == f"part-00001-of-{len(parts):05d}.gguf\n"
    assert call("convert", scripted, "-o", "part.gguf", "--split-max-size", str(size // 4)).code == 1
    assert call("convert", parts[1], "-o", "merged.gguf", "--quiet").code == 0
    assert Path("merged.gguf").read_bytes() == Path("whole.gguf").read_bytes()
    parts[0].unlink()
    missing = call("convert", parts[1], "-o", "again.gguf")
    assert (missing.code, f"{parts[0].name}: no such file" in missing.err) == (1, True)


def test_the_vocabulary_alone(call: Callable[..., Any], folder: Path, here: Path) -> None:
    """Of a folder without weights too."""
    (folder / "model.safetensors").unlink()
    done = call("convert", folder, "--vocab-only", "--quiet")
    assert done.code == 0
    assert done.out.endswith("-vocab.gguf\n")
    with open_checkpoint(done.out.strip()) as checkpoint:
        assert checkpoint.names() == []
        assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == checkpoint.metadata["llama.vocab_size"]
    again = call("convert", done.out.strip(), "--vocab-only", "-o", "again.gguf", "--quiet")
    assert Path(again.out.strip()).read_bytes() == Path(done.out.strip()).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-only", "--type", "F16"], "--vocab-only writes no weights: --type has nothing to do"),
        (["--to", "safetensors", "--pre", "qwen2"], "--pre is for writing gguf files, not --to safetensors"),
        (["--split-max-size", "many"], "--split-max-size many: expected a size like 500m or 2g"),
        (["--lora", "folder=much"], "--lora folder=much: expected adapter or adapter=scale"),
    ],
)
def test_options_that_make_no_sense(call: Callable[..., Any], scripted: Path, arguments: list[str], message: str) -> None:
    done = call("convert", scripted, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err.lower()

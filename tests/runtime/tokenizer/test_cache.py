"""The disk cache serves what was prepared from the same input by the same code, or nothing."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.errors import FormatError
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer import Tokenizer, cache, folder_source, load, load_tokenizer
from llmctl.runtime.tokenizer.facts import AddedToken, Facts

TEXT = "Hello, world! I'll 123\n\n😀 end"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def checkpoint(vocabulary: Callable[[str], GgufCheckpoint]) -> GgufCheckpoint:
    return vocabulary("llama-spm")


def entries(home: Path) -> list[Path]:
    return sorted((home / "cache" / "tokenizers").glob("*"))


def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one each time a tokenizer is prepared from its source."""
    calls: list[str] = []
    original = load.prepare
    monkeypatch.setattr(load, "prepare", lambda description: calls.append("prepared") or original(description))
    return calls


def test_facts_survive() -> None:
    added = (AddedToken(1, "<s>", True, False, True, False, True), AddedToken(2, "\ud800"))
    facts = Facts("bpe", 3, 1, (1, 2), None, 0, (1,), (2,), added, {"bos_token": "<s>"}, {"default": "x"}, {"unk": None})
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


def test_second_load_comes_from_the_cache(home: Path, checkpoint: GgufCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = prepared(monkeypatch)
    first, second = load_tokenizer(checkpoint), load_tokenizer(checkpoint)
    assert calls == ["prepared"]
    assert len(entries(home)) == 1
    assert second.encode(TEXT) == first.encode(TEXT)
    assert vars(second._facts) == vars(first._facts)


def test_damaged_entries_are_made_again(home: Path, checkpoint: GgufCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_tokenizer(checkpoint).encode(TEXT)
    (path,) = entries(home)
    good = path.read_bytes()
    calls = prepared(monkeypatch)
    flipped = good[:5000] + bytes([good[5000] ^ 1]) + good[5001:]
    unlike = struct.pack("<16sIIQ", b"llmctl-tokenizer", 1, zlib.crc32(b"{}"), 2) + b"{}"
    for bad in (b"", b"x", good[:40], good[:-1], good + b"\0", flipped, b"y" + good[1:], unlike):
        path.write_bytes(bad)
        assert load_tokenizer(checkpoint).encode(TEXT) == expected
        assert calls.pop() == "prepared"
        assert path.read_bytes() == good
    path.unlink()
    path.mkdir()
    assert load_tokenizer(checkpoint).encode(TEXT) == expected
    assert calls.pop() == "prepared"


@pytest.mark.parametrize("obstacle", ["file", "read-only"])
def test_a_folder_that_cannot_be_written_does_no_harm(
    home: Path, checkpoint: GgufCheckpoint, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    if obstacle == "file":
        home.write_text("in the way")
    else:
        monkeypatch.setattr(cache.tempfile, "mkstemp", lambda **_: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert load_tokenizer(checkpoint).encode("a") == [1, 263]
    assert obstacle == "file" or entries(home) == []


def test_a_failed_write_leaves_nothing(home: Path, checkpoint: GgufCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    assert load_tokenizer(checkpoint).encode("a") == [1, 263]
    assert entries(home) == []


def test_old_entries_are_forgotten(home: Path, checkpoint: GgufCheckpoint) -> None:
    folder = home / "cache" / "tokenizers"
    folder.mkdir(parents=True)
    for age in range(40):
        (folder / f"{age:02}.bin").write_bytes(b"")
        os.utime(folder / f"{age:02}.bin", (1000 - age, 1000 - age))
    load_tokenizer(checkpoint)
    kept = {path.name for path in entries(home)}
    assert len(kept) == 32
    assert {"00.bin", "30.bin"} <= kept
    assert "31.bin" not in kept


def test_other_code_does_not_get_the_entry(home: Path, checkpoint: GgufCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer(checkpoint)
    monkeypatch.setattr(cache, "_code", lambda: b"after an update")
    load_tokenizer(checkpoint)
    assert len(entries(home)) == 2


def test_key_tells_where_parts_end() -> None:
    assert cache.key([b"ab", b"c"]) != cache.key([b"a", b"bc"]) != cache.key([b"abc"])
    assert cache.key([memoryview(b"ab")]) == cache.key([b"ab"])


def test_a_copied_file_shares_the_entry_and_a_changed_one_does_not(
    home: Path, checkpoint: GgufCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same place, size and times, other content: what is keyed is the content."""
    copy = tmp_path / "copy.gguf"
    shutil.copy(checkpoint.path, copy)
    load_tokenizer(checkpoint)
    calls = prepared(monkeypatch)
    load_tokenizer(GgufCheckpoint(copy))
    assert calls == []
    data, times = copy.read_bytes(), (copy.stat().st_atime_ns, copy.stat().st_mtime_ns)
    at = data.index("▁Hello".encode())
    copy.write_bytes(data[:at] + "▁Jello".encode() + data[at + 8 :])
    os.utime(copy, ns=times)
    tokenizer = load_tokenizer(GgufCheckpoint(copy))
    assert calls == ["prepared"]
    assert "▁Jello" in [tokenizer.token_text(i) for i in tokenizer.encode("Jello")]


class Folder:
    """A Hugging Face folder with a small tokenizer, as far as load_tokenizer looks."""

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        self.folder = self.path = folder
        folder.mkdir()
        self.write("a", "b")

    def write(self, *letters: str) -> None:
        document = {
            "added_tokens": [],
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {letter: i for i, letter in enumerate(letters)}, "merges": []},
        }
        (self.folder / "tokenizer.json").write_text(json.dumps(document))


def age(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the files' times look settled."""
    monkeypatch.setattr(folder_source, "_SETTLED_SECONDS", -1000.0)


def test_folders_are_told_by_the_state_of_their_files(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age(tmp_path, monkeypatch)
    folder = Folder(tmp_path / "model")
    calls = prepared(monkeypatch)
    assert load_tokenizer(folder).encode("b") == [1]
    assert load_tokenizer(folder).encode("b") == [1]
    assert calls == ["prepared"]
    path = folder.folder / "tokenizer.json"
    size, times = path.stat().st_size, path.stat().st_mtime_ns
    time.sleep(0.02)  # another tick of the file system's clock
    folder.write("b", "a")
    os.utime(path, ns=(times, times))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (size, times)
    assert load_tokenizer(folder).encode("b") == [0]
    assert len(calls) == 2
    (folder.folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert load_tokenizer(folder).eos_token_ids == (1,)
    (folder.folder / "additional_chat_templates").mkdir()
    (folder.folder / "additional_chat_templates" / "x.jinja").write_text("X")
    assert load_tokenizer(folder).chat_templates == {"x": "X"}
    assert len(calls) == 4


def test_files_changed_just_now_are_not_kept(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path / "model")
    calls = prepared(monkeypatch)
    load_tokenizer(folder)
    load_tokenizer(folder)
    assert calls == ["prepared"] * 2
    assert entries(home) == []


def test_a_folder_that_changes_while_it_is_read_is_not_kept(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age(tmp_path, monkeypatch)
    folder = Folder(tmp_path / "model")
    original = folder_source.describe_folder

    def describe_and_change(path: Path) -> object:
        description = original(path)
        folder.write("a", "b", "c")
        return description

    monkeypatch.setattr(folder_source, "describe_folder", describe_and_change)
    assert load_tokenizer(folder).vocab_size == 2
    assert entries(home) == []


def test_errors_are_not_cached(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    age(tmp_path, monkeypatch)
    folder = Folder(tmp_path / "model")
    (folder.folder / "tokenizer.json").write_text("{")
    for _ in range(2):
        with pytest.raises(FormatError, match=r"model.tokenizer\.json: not a tokenizer\.json"):
            load_tokenizer(folder)
    folder.write("a")
    assert isinstance(load_tokenizer(folder), Tokenizer)

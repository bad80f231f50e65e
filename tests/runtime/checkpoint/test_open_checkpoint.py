"""What is not a checkpoint is called by its name."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from llmctl.errors import FormatError, LlmctlError, ModelNotFoundError, UnsupportedError
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614\nsize 12345\n"

FOREIGN = [
    (b"", FormatError, r"the file is empty \(0 bytes\)"),
    (b"GG", FormatError, "this is a text file, not a model; expected a GGUF file"),
    (b"GGU\x01\x02\x03", FormatError, r"not a model file that is known here \(it begins with b'GGU"),
    (b"\xff\xfe\x00\x01" * 10, FormatError, "not a model file that is known here"),
    (b"Once upon a time\n", FormatError, "this is a text file, not a model"),
    ("Größe €\n".encode() * 100, FormatError, "this is a text file, not a model"),
    (LFS_POINTER, FormatError, "this is a git-lfs pointer, not the model itself; fetch it with `git lfs pull`"),
    (b"\n<!DOCTYPE html><html>404</html>", FormatError, "this is a web page, not a model"),
    (b'{"model_type": "llama"}', FormatError, "a JSON file without a weight_map is no shard index"),
    (b"{ not json", FormatError, "not valid JSON"),
    (b"\x1f\x8b\x08" + bytes(20), FormatError, r"the file is compressed \(gzip\); unpack it first"),
    (b"\x28\xb5\x2f\xfd" + bytes(20), FormatError, r"the file is compressed \(zstd\)"),
    (b"tjgg" + struct.pack("<I", 3), UnsupportedError, "GGJT is a format older than GGUF"),
    (b"lmgg" + bytes(8), UnsupportedError, "GGML is a format older than GGUF"),
    (b"FUGG" + bytes(8), UnsupportedError, "big-endian GGUF is not read"),
    (pickle.dumps({"w": [1.0]}), UnsupportedError, "PyTorch pickle files can run code and are never opened"),
    (b"PK\x03\x04" + bytes(30), UnsupportedError, "PyTorch pickle files can run code and are never opened"),
]


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ""])
@pytest.mark.parametrize(("content", "error", "reason"), FOREIGN)
def test_foreign_files(write_file, content: bytes, error: type[Exception], reason: str, suffix: str) -> None:
    path = write_file("model" + suffix, content)
    if suffix == ".safetensors" and ("text file" in reason or "known here" in reason or "JSON" in reason):
        reason = "not a safetensors file|truncated|not valid JSON"  # its own reader explains
    with pytest.raises(error, match=reason) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(str(path))
    assert type(caught.value) is error


class Payload:
    """Creates the marker file if anyone unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.safetensors", "model.gguf"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("packed", [False, True])
def test_pickles_are_never_loaded(tmp_path: Path, name: str, protocol: int, packed: bool) -> None:
    marker, path = tmp_path / "marker", tmp_path / name
    content = pickle.dumps(Payload(marker), protocol)
    if packed:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", content)
    else:
        path.write_bytes(content)
    with pytest.raises(
        LlmctlError, match=r"convert the weights to safetensors|not a model file|text file|not a safetensors file"
    ):
        open_checkpoint(path)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # the payload was a working one


def test_layout_is_told_by_content(tmp_path: Path, raw_gguf, raw_safetensors) -> None:
    header = {"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    (tmp_path / "a.bin").write_bytes(raw_gguf.build())
    (tmp_path / "b.gguf").write_bytes(raw_safetensors(header, b"\0"))
    assert open_checkpoint(tmp_path / "a.bin").kind == "gguf"
    assert open_checkpoint(tmp_path / "b.gguf").kind == "safetensors"


def test_safetensors_header_lengths_that_begin_like_a_pickle(write_file, raw_safetensors) -> None:
    """0x0280 … 0x0580 as a header length are the first bytes of pickle protocols 2 to 5."""
    header = b'{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    for length in (0x280, 0x380, 0x480, 0x580):
        path = write_file("m.bin", raw_safetensors(header.ljust(length), b"\0"))
        assert open_checkpoint(path).names() == ["w"]


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing\.gguf: no such file or folder"):
        open_checkpoint(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFoundError, match=r"cannot be opened: .*null"):
        open_checkpoint(tmp_path / "a\0b")
    with pytest.raises(ModelNotFoundError, match="cannot be opened: File name too long"):
        open_checkpoint(tmp_path / ("n" * 300))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelNotFoundError, match="cannot be opened: Too many levels of symbolic links"):
        open_checkpoint(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FormatError, match="expected a model file, found a device or pipe"):
            open_checkpoint(path)


def test_folder_named_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    with pytest.raises(FormatError, match=r"model\.gguf: not a GGUF file"):
        GgufCheckpoint(folder)
    with pytest.raises(ModelNotFoundError, match=r"model\.gguf: no safetensors weights in this folder; it is empty"):
        open_checkpoint(folder)
    nested = tmp_path / "hf" / "model.safetensors"
    nested.mkdir(parents=True)
    with pytest.raises(FormatError, match=r"model\.safetensors: not a safetensors file"):
        open_checkpoint(tmp_path / "hf")


def test_kinds_are_not_mixed_up(write_file, raw_gguf, raw_safetensors) -> None:
    with pytest.raises(FormatError, match="not a safetensors file"):
        SafetensorsCheckpoint(write_file("a", raw_gguf.build()))
    with pytest.raises(FormatError, match="not a GGUF file"):
        GgufCheckpoint(write_file("b", raw_safetensors({})))


def test_names_beyond_ascii(tmp_path: Path, raw_gguf) -> None:
    folder = tmp_path / "modèle ü"
    folder.mkdir()
    (folder / "€.gguf").write_bytes(raw_gguf.build())
    assert open_checkpoint(folder / "€.gguf").names() == []

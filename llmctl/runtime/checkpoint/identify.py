"""What a path is, by its first bytes: a checkpoint that can be read, or something else, said in words."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.runtime.checkpoint.files import is_folder, read_start

Kind = Literal["gguf", "safetensors", "index", "folder"]

MAX_SAFETENSORS_HEADER = 100_000_000  # the cap of the format's own reader
_START_BYTES = 512
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_PICKLE_STARTS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_OLD_GGML = {b"lmgg": "GGML", b"fmgg": "GGMF", b"tjgg": "GGJT", b"algg": "GGLA"}
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"7z\xbc\xaf\x27\x1c": "7z",
}


def identify(path: Path) -> Kind:
    """How the checkpoint at `path` is laid out.

    Errors: ModelNotFoundError, FormatError or UnsupportedError saying what the file is instead. A file named
    .safetensors that is nothing known counts as one: its own reader says what is wrong with it.
    """
    if is_folder(path):
        return "folder"
    start = read_start(path, _START_BYTES)
    if not start:
        raise FormatError(f"{path}: the file is empty (0 bytes)")
    if start.startswith(b"GGUF"):
        return "gguf"
    if _is_safetensors(start):
        return "safetensors"
    if error := _foreign(path, start):
        raise error
    if path.suffix.lower() == ".safetensors":
        return "safetensors"
    if start.lstrip().startswith(b"{"):
        return "index"
    raise FormatError(f"{path}: {_describe(start)}; expected a GGUF file (magic 'GGUF') or safetensors")


def _is_safetensors(start: bytes) -> bool:
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_SAFETENSORS_HEADER


def _foreign(path: Path, start: bytes) -> LlmctlError | None:
    """The error for a file that is recognisably something else."""
    if start.startswith(b"version https://git-lfs"):
        return FormatError(f"{path}: this is a git-lfs pointer, not the model itself; fetch it with `git lfs pull`")
    if start.startswith((*_PICKLE_STARTS, b"PK\x03\x04")) or path.suffix.lower() in _PICKLE_SUFFIXES:
        return UnsupportedError(
            f"{path}: PyTorch pickle files can run code and are never opened; convert the weights to safetensors"
        )
    if name := _OLD_GGML.get(start[:4]):
        return UnsupportedError(f"{path}: {name} is a format older than GGUF; get or convert the model as GGUF")
    if start.startswith(b"FUGG"):
        return UnsupportedError(f"{path}: big-endian GGUF is not read; convert it to little-endian")
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            return FormatError(f"{path}: the file is compressed ({name}); unpack it first")
    if start.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        return FormatError(f"{path}: this is a web page, not a model; the download went wrong")
    return None


def _describe(start: bytes) -> str:
    if b"\0" not in start and not any(byte < 9 for byte in start):
        try:
            start[:-4].decode("utf-8")  # the last character may be cut
            return "this is a text file, not a model"
        except UnicodeDecodeError:
            pass
    return f"not a model file that is known here (it begins with {start[:8]!r})"

"""Files that lie, are cut, or would run code: every command refuses them with one line that names them, and leaves no output.

What the readers themselves say of each lie is in tests/runtime/checkpoint; here it is that no command does without them.
"""

from __future__ import annotations

import json
import pickle
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, LlmctlError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter
from llmctl.runtime.checkpoint.safetensors_writer import SafetensorsWriter

COMMANDS = {
    "convert": ("convert", "{model}", "-o", "out.gguf"),
    "quantize": ("quantize", "{model}", "--type", "Q8_0", "-o", "out.gguf"),
    "verify": ("verify", "{model}"),
    "inspect": ("inspect", "{model}"),
    "run": ("run", "{model}", "hello"),
}


@pytest.fixture(params=COMMANDS)
def refuses(
    request: pytest.FixtureRequest, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """That a command fails on a model in a second, in one line that names it; returns what it said."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def run(model: Path, named: Path | None = None) -> str:
        arguments = [part.format(model=model) for part in COMMANDS[request.param]]
        started = time.process_time()
        done = call(*arguments, "-q")
        assert time.process_time() - started < 2
        assert done.code == 1, done.out
        assert len(done.err.splitlines()) == 1, done.err
        assert done.err.startswith(f"llmctl: error: {named or model}"), done.err
        assert list(here.iterdir()) == []
        if request.param == "verify":
            assert "structure  1 error" in done.out
            return done.out
        assert done.out == ""
        return done.err

    return run


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(keys: bytes = b"", num_keys: int = 0, tensors: bytes = b"", num_tensors: int = 0, data: bytes = b"") -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors
    return header + bytes(-len(header) % 32) + data


def tensor(name: bytes, dims: list[int], offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, offset)


ONE = tensor(b"w", [4])
NESTED = string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 10_000
CLAIMS = {
    "a string of 2^63 bytes": (gguf(string(b"k") + struct.pack("<IQ", 8, 2**63), 1), "claims 9223372036854775808 bytes"),
    "an array of 2^40 numbers": (gguf(string(b"k") + struct.pack("<IIQ", 9, 4, 2**40), 1), "claims 1099511627776 items"),
    "an array of 2^40 strings": (gguf(string(b"k") + struct.pack("<IIQ", 9, 8, 2**40), 1), "claims 1099511627776 strings"),
    "2^40 keys": (gguf(b"", 2**40), "claims 1099511627776 metadata keys"),
    "2^40 tensors": (gguf(num_tensors=2**40), "claims 1099511627776 tensors"),
    "arrays in arrays, 10000 deep": (gguf(NESTED, 1), "nests arrays deeper than 8"),
    "a key without a name": (gguf(string(b"") + struct.pack("<II", 4, 1), 1), "metadata key 0 is empty"),
    **{
        f"alignment {value}": (
            gguf(string(b"general.alignment") + struct.pack("<II", 4, value), 1, ONE, 1, bytes(64)),
            f"general.alignment is {value}, expected a power of two",
        )
        for value in (0, 3, 2**30)
    },
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_claims_beyond_the_file(refuses: Callable[..., str], tmp_path: Path, claim: str) -> None:
    """Lengths and counts are compared with the bytes there are before anything is made for them: a file of a hundred bytes that
    speaks of 2^63 must cost neither memory nor time, and arrays in arrays must not use up the stack."""
    content, message = CLAIMS[claim]
    (tmp_path / "m.gguf").write_bytes(content)
    assert message in refuses(tmp_path / "m.gguf")


def whole_gguf(folder: Path) -> Path:
    with GgufWriter(folder / "m.gguf", {"general.architecture": "llama"}) as writer:
        for name in ("a", "b"):
            writer.declare(name, FORMATS["F32"], (3, 8))
        for name in ("a", "b"):
            writer.write(name, np.ones((3, 8), np.float32))
    return folder / "m.gguf"


def whole_safetensors(folder: Path) -> Path:
    save_file({name: np.ones((3, 8), np.float32) for name in ("a", "b")}, folder / "m.safetensors")
    return folder / "m.safetensors"


@pytest.mark.parametrize("make", [whole_gguf, whole_safetensors])
@pytest.mark.parametrize("left", ["all but one byte", "half", "nothing", "the header", "half the header"])
def test_files_that_were_cut(
    refuses: Callable[..., str], tmp_path: Path, make: Callable[[Path], Path], left: str
) -> None:
    """A download that ended early: every tensor's end is compared with the file's size at once, not when it is its turn, and
    the error says both sizes."""
    path = make(tmp_path)
    content = path.read_bytes()
    header = min(entry.offset for entry in open_checkpoint(path).entries())
    sizes = {"all but one byte": len(content) - 1, "half": len(content) // 2 + 40, "nothing": 0, "the header": header}
    size = sizes.get(left, header // 2)
    path.write_bytes(content[:size])
    said = refuses(path)
    if not size:
        assert "the file is empty (0 bytes)" in said
    elif size < header:
        assert f"file is {size} bytes, needs at least " in said or f"{size} bytes" in said or "are left" in said
    else:
        assert f"file is {size} bytes, needs " in said


def test_a_shard_that_was_cut(refuses: Callable[..., str], scripted: Path, tmp_path: Path) -> None:
    """Found whichever part is looked at, and named."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in scripted.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {f"model-0000{i + 1}-of-00002.safetensors": list(weights)[i::2] for i in range(2)}
    for name, keys in parts.items():
        save_file({key: weights[key] for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(second.read_bytes()[:-1])
    said = refuses(folder, named=folder)
    assert "model-00002-of-00002.safetensors: truncated: file is" in said


TWICE = {
    "a tensor": (gguf(tensors=ONE + tensor(b"w", [4], 32), num_tensors=2, data=bytes(64)), "tensor 'w' appears twice"),
    "a key": (gguf((string(b"k") + struct.pack("<II", 4, 1)) * 2, 2), "metadata key 'k' appears twice"),
}


@pytest.mark.parametrize("what", TWICE)
def test_names_that_appear_twice_in_gguf(refuses: Callable[..., str], tmp_path: Path, what: str) -> None:
    """Readers that take the first and readers that take the last see two different models in one file."""
    content, message = TWICE[what]
    (tmp_path / "m.gguf").write_bytes(content)
    assert message in refuses(tmp_path / "m.gguf")


def safetensors(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(begin: int, end: int, shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def two(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    return json.dumps({"a": first, "b": second}).encode()


W = b'"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
HEADERS = {
    "a name twice": (safetensors(b"{" + W + b"," + W + b"}", b"\0"), "the header repeats the key 'w'"),
    "a shape beyond its bytes": (safetensors(two(entry(0, 4, [1000, 1000]), entry(4, 4)), bytes(4)), "needs 1000000 bytes"),
    "an end before its begin": (safetensors(json.dumps({"w": entry(4, 0, [4])}).encode(), bytes(4)), "begin ≤ end"),
    "a negative offset": (safetensors(json.dumps({"w": entry(-4, 0, [4])}).encode(), bytes(4)), "whole numbers ≥ 0"),
    "a negative shape": (safetensors(json.dumps({"w": entry(0, 4, [-1, -4])}).encode(), bytes(4)), "whole numbers ≥ 0"),
    "tensors that overlap": (safetensors(two(entry(0, 4), entry(2, 6)), bytes(6)), "'a' and 'b' overlap"),
    "a gap": (safetensors(two(entry(0, 4), entry(6, 8)), bytes(8)), "2 bytes between 'a' and 'b' belong to no tensor"),
    "bytes behind the last": (safetensors(two(entry(0, 4), entry(4, 8)), bytes(9)), "1 bytes behind 'b' belong to no tensor"),
    "a header above the file": (safetensors(b"{}", length=1000), "truncated in the header"),
    "a header above the cap": (safetensors(b"{" + W + b"}", length=100_000_001), "the limit is 100000000"),
    "a header of 2^63": (safetensors(b"{" + W + b"}", length=2**63), "the limit is 100000000"),
    "a header that is a list": (safetensors(b"[]"), "must be a JSON object, found list"),
    "a header that is a number": (safetensors(b"7"), "must be a JSON object, found int"),
    "a header 10000 deep": (safetensors(b'{"a":' * 10_000), "the header is not valid JSON"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_safetensors_headers_that_lie(refuses: Callable[..., str], tmp_path: Path, what: str) -> None:
    """Each lie of a header has its own error: an offset that is believed reads memory that is not the file's."""
    content, message = HEADERS[what]
    (tmp_path / "m.safetensors").write_bytes(content)
    assert message in refuses(tmp_path / "m.safetensors")


def test_writers_refuse_a_name_twice(tmp_path: Path) -> None:
    """What is never written need not be refused."""
    for writer in (GgufWriter(tmp_path / "m.gguf", {}), SafetensorsWriter(tmp_path)):
        writer.declare("w", FORMATS["F32"], (4,))
        with pytest.raises(FormatError, match="tensor 'w' is declared twice"):
            writer.declare("w", FORMATS["F32"], (4,))
        writer.abort()
    assert list(tmp_path.iterdir()) == []


class Payload:
    """Creates the marker if anyone unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that must not come into being."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.gguf"])
@pytest.mark.parametrize("archive", [False, True], ids=["plain", "zip"])
def test_pickles_are_never_opened(
    refuses: Callable[..., str], tmp_path: Path, marker: Path, name: str, archive: bool
) -> None:
    """Unpickling runs what the file says. Whatever it is named, and in the archive that torch makes of it too."""
    content = pickle.dumps({"w": Payload(marker)})
    path = tmp_path / name
    if archive:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", content)
    else:
        path.write_bytes(content)
    assert "PyTorch pickle files can run code and are never opened; convert the weights to safetensors" in refuses(path)


@pytest.mark.parametrize("harmless", [False, True])
def test_folders_of_pickles(
    call: Callable[..., Any], scripted: Path, tmp_path: Path, marker: Path, harmless: bool
) -> None:
    """A folder whose weights are in pytorch_model.bin, as old ones are: named, with what to do."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in scripted.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = {"w": [1.0, 2.0]} if harmless else {"w": Payload(marker)}
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(weights))
    for command in COMMANDS.values():
        done = call(*[part.format(model=folder) for part in command], "-q")
        assert (done.code, done.out) == (1, ""), command
        assert "only PyTorch pickles (pytorch_model.bin), which can run code and are never opened" in done.err


def test_a_pickle_beside_sound_weights_is_left_alone(
    call: Callable[..., Any], scripted: Path, tmp_path: Path, marker: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in scripted.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker)))
    assert call("verify", folder, "-q").code == 0
    assert call("convert", folder, "-o", tmp_path / "out.gguf", "-q").code == 0


def test_the_payload_would_work(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()
    assert issubclass(FormatError, LlmctlError)

"""Whatever happens to `llmctl convert`: at the output's name there is what was there before, or the whole result.

Killed at every system call that writes and at random moments, a disk that is full before or meanwhile, signals, closed pipes,
folders that are missing or read-only, and outputs that are an input by another name.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType

PARTIAL = ".out.gguf.partial"


def make_gguf(path: Path, *, tensors: int, size: int, first: int = 0, **metadata: Any) -> Path:
    """A GGUF file of random matrices of `size` × 1024 in float32."""
    keys = {"general.architecture": "none", "general.name": "big", **metadata}
    with GgufWriter(path, keys) as writer:
        names = [f"blk.{i}.ffn_up.weight" for i in range(first, first + tensors)]
        for name in names:
            writer.declare(name, FORMATS["F32"], (size, 1024))
        for name in names:
            writer.write(name, np.random.default_rng(len(name)).standard_normal((size, 1024), np.float32))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1 MB."""
    return make_gguf(tmp_path_factory.mktemp("small") / "small.gguf", tensors=4, size=64)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB: long enough to be interrupted."""
    return make_gguf(tmp_path_factory.mktemp("large") / "large.gguf", tensors=25, size=2048)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the result goes: a folder of its own."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "out.gguf"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


KILLED_AT_EACH_CALL = """
import fcntl, json, os, shutil, signal, sys
from pathlib import Path
from llmctl.cli import main
from llmctl.quant import convert, huggingface, recipe, rtn, source, to_folder  # before the fork

arguments, place, whole, stride = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
CALLS = [(os, name) for name in ("write", "fsync", "ftruncate", "rename", "replace", "mkdir", "unlink", "rmdir")]

def killing(function, left):
    def count():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def call(*arguments, **options):
        count()
        result = function(*arguments, **options)
        count()
        return result
    return call

def run(number, force):
    left = [number]
    for module, name in [*CALLS, (fcntl, "flock")]:
        setattr(module, name, killing(getattr(module, name), left))
    os._exit(main([*arguments, "--quiet", *["--force"] * force]))

def visible(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    names = {str(path.relative_to(folder)): path for path in files}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith(".")}

def old_of(content):
    return {name: b"old" for name in content}

def fill(content):
    for path in list(place.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, data in content.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data)

expected = visible(whole)
first = min(expected)  # of a split model the file that stands for the set
for force in (False, True):
    before, number, moments = old_of(expected) if force else {}, 0, set()
    while True:
        number += stride
        fill(before)
        child = os.fork()
        if child == 0:
            run(number, force)
        status, found = os.waitpid(child, 0)[1], visible(place)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and found == expected, (number, status, list(found))
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        mixed = found not in (before, expected, {}) and (len(expected) == 1 or "/" in first or first in found)
        assert not mixed, (number, {name: len(data) for name, data in found.items()})
        assert found or not before or len(expected) > 1, number  # a folder's old self is aside
        moments.add("after" if found == expected else "before" if found == before else "between")
        if number % 4 == 0:  # the next run needs nobody to clean up
            child = os.fork()
            if child == 0:
                run(-1, force)
            os.waitpid(child, 0)
            assert visible(place) == expected or not force and found
    assert {"before", *(["after"] if stride == 1 else [])} <= moments and number > 20, (moments, number)
    assert not [name for name in os.listdir(place) if name.startswith(".")]
print("done")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, scripted: Path, llmctl: Callable[..., Any]) -> Path:
    """The scripted model as a GGUF file: one that can be turned into a folder again."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    assert llmctl("convert", scripted, "-o", path, "--type", "F16").returncode == 0
    return path


@pytest.mark.parametrize(
    ("name", "stride", "options"),
    [
        ("out.gguf", 1, ("--type", "Q8_0")),
        ("out", 5, ("--to", "safetensors")),  # dozens of files and calls
        ("out.gguf", 2, ("--split-max-size", "100K")),
    ],
    ids=["file", "folder", "split"],
)
def test_killed_before_and_after_every_call_that_writes(
    llmctl: Callable[..., Any], model: Path, tmp_path: Path, name: str, stride: int, options: tuple[str, ...]
) -> None:
    """A file is there whole or not at all; a folder too, or it is aside and put back; of a split model the first file comes
    last, so that old and new parts are never taken for one set. The next run takes over what the killed one left."""
    for folder in ("whole", "place"):
        (tmp_path / folder).mkdir()
    assert llmctl("convert", model, "-o", tmp_path / "whole" / name, *options).returncode == 0
    arguments = ["convert", str(model), "-o", str(tmp_path / "place" / name), *options]
    places = [tmp_path / "place", tmp_path / "whole", str(stride)]
    command = [sys.executable, "-c", KILLED_AT_EACH_CALL, json.dumps(arguments), *places]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["done"], 0), done.stderr


def test_killed_at_random_moments(llmctl: Callable[..., Any], llmctl_script: Path, large: Path, out: Path) -> None:
    started = time.perf_counter()
    assert llmctl("convert", large, "-o", out, "--type", "Q8_0").returncode == 0
    seconds, whole = time.perf_counter() - started, out.read_bytes()
    out.unlink()
    rng, half = random.Random(3), 0
    for _ in range(8):
        process = subprocess.Popen([llmctl_script, "convert", large, "-o", out, "--type", "Q8_0", "--force", "-q"], stdout=-3)
        time.sleep(rng.uniform(0.3, 1) * seconds)
        process.kill()
        process.wait()
        half += names(out.parent) == [PARTIAL] and 0 < (out.parent / PARTIAL).stat().st_size < len(whole)
        assert not out.exists() or out.read_bytes() == whole
        assert set(names(out.parent)) <= {PARTIAL, out.name}
        out.unlink(missing_ok=True)
    assert half, "not one was killed while it wrote"
    assert llmctl("convert", large, "-o", out, "--type", "Q8_0").returncode == 0
    assert names(out.parent) == [out.name]
    assert out.read_bytes() == whole


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_leave_nothing(llmctl_script: Path, large: Path, out: Path, number: int, code: int) -> None:
    command = [llmctl_script, "convert", large, "-o", out, "--type", "Q4_0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not ((out.parent / PARTIAL).exists() and (out.parent / PARTIAL).stat().st_size > 1 << 20):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (code, "")
    assert "Traceback" not in stderr
    assert names(out.parent) == []


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_without_room(llmctl: Callable[..., Any], small: Path, tiny_disk: Path) -> None:
    """Said before the work, with both numbers; a smaller type finds room."""
    done = llmctl("convert", small, "-o", tiny_disk / "out.gguf", "--type", "F32")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{tiny_disk / 'out.gguf'}: needs 1048" in done.stderr
    assert "614400 are free on this disk" in done.stderr
    assert names(tiny_disk) == []
    assert llmctl("convert", small, "-o", tiny_disk / "out.gguf", "--type", "Q8_0").returncode == 0


FILLED_MEANWHILE = """
import sys
from llmctl.cli import main
from llmctl.runtime.checkpoint.output_file import OutputFile
OutputFile.require = lambda self, count: None  # there was room when we looked
sys.exit(main(sys.argv[1:]))
"""


def test_a_disk_that_fills_up_meanwhile(small: Path, tiny_disk: Path) -> None:
    (tiny_disk / "out.gguf").write_bytes(b"old")
    arguments = ["convert", small, "-o", tiny_disk / "out.gguf", "--type", "F32", "--force", "--quiet"]
    done = subprocess.run([sys.executable, "-c", FILLED_MEANWHILE, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"llmctl: error: {tiny_disk / 'out.gguf'}: no space left on this disk\n"
    assert names(tiny_disk) == ["out.gguf"]
    assert (tiny_disk / "out.gguf").read_bytes() == b"old"


def test_a_limit_on_the_size_of_files(llmctl: Callable[..., Any], small: Path, out: Path) -> None:
    """As a quota of the system has it: SIGXFSZ does not kill us, nothing is left."""
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    done = llmctl("convert", small, "-o", out, "--type", "F32", preexec_fn=limit)
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert names(out.parent) == []


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that may not be written to, by root neither."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("root may write anywhere, and may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_folder_that_may_not_be_written_to(llmctl: Callable[..., Any], small: Path, read_only: Path) -> None:
    done = llmctl("convert", small, "-o", read_only / "out.gguf", "--type", "Q8_0")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{read_only / 'out.gguf'}: the folder {read_only} cannot be written to" in done.stderr
    assert names(read_only) == []


def test_a_folder_that_is_missing(llmctl: Callable[..., Any], small: Path, tmp_path: Path) -> None:
    done = llmctl("convert", small, "-o", tmp_path / "no" / "out.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"llmctl: error: {tmp_path / 'no' / 'out.gguf'}: the folder {tmp_path / 'no'} does not exist\n"
    assert names(tmp_path) == []


def test_two_at_once(llmctl: Callable[..., Any], llmctl_script: Path, large: Path, small: Path, out: Path) -> None:
    """The second is refused, the first is not disturbed."""
    process = subprocess.Popen([llmctl_script, "convert", large, "-o", out, "--type", "Q4_0", "-q"], stdout=subprocess.DEVNULL)
    while not (out.parent / PARTIAL).exists():
        assert process.poll() is None
        time.sleep(0.0002)
    process.send_signal(signal.SIGSTOP)
    done = llmctl("convert", small, "-o", out)
    process.send_signal(signal.SIGCONT)
    assert process.wait() == 0
    assert done.returncode == 1
    assert "another process is writing this file" in done.stderr
    assert len(open_checkpoint(out).names()) == 25


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_pipe_that_nobody_reads(llmctl_script: Path, small: Path, out: Path, stream: str) -> None:
    """The file is written whatever becomes of what is said about it; only a lost result is a failure."""
    read, write = os.pipe()
    os.close(read)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: write}
    done = subprocess.run([llmctl_script, "convert", small, "-o", out, "--type", "Q8_0"], check=False, **streams)
    os.close(write)
    assert done.returncode == (141 if stream == "stdout" else 0)
    assert (done.stderr if stream == "stdout" else done.stdout) is not None
    assert names(out.parent) == ["out.gguf"]
    assert open_checkpoint(out).metadata["general.file_type"] == 7


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """A model in two files."""

    def keys(number: int) -> dict[str, Any]:
        counts = {"split.no": Typed(number, ValueType.U16), "split.count": Typed(2, ValueType.U16)}
        return {**counts, "split.tensors.count": Typed(4, ValueType.I32)}

    parts = [tmp_path / f"m-0000{i + 1}-of-00002.gguf" for i in range(2)]
    return [make_gguf(part, tensors=2, size=64, first=2 * i, **keys(i)) for i, part in enumerate(parts)]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("by", ["path", "symlink", "hard link", "another spelling"])
def test_the_output_is_no_input_under_whatever_name(
    llmctl: Callable[..., Any], split: list[Path], tmp_path: Path, part: int, by: str
) -> None:
    """Also the shard that was not named; --force changes nothing."""
    before = [file.read_bytes() for file in split]
    target = tmp_path / "other.gguf"
    if by == "symlink":
        target.symlink_to(split[part])
    elif by == "hard link":
        target.hardlink_to(split[part])
    else:
        target = split[part] if by == "path" else tmp_path / ".." / tmp_path.name / split[part].name
    done = llmctl("convert", split[0], "-o", target, "--type", "Q8_0", "--force")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{target}: the output is the same file as the input {split[part]}" in done.stderr
    assert [file.read_bytes() for file in split] == before


def test_force_replaces_and_nothing_else_does(llmctl: Callable[..., Any], small: Path, out: Path) -> None:
    out.write_bytes(b"precious")
    done = llmctl("convert", small, "-o", out, "--type", "Q8_0")
    assert (done.returncode, out.read_bytes()) == (1, b"precious")
    assert f"{out}: exists already; --force replaces it" in done.stderr
    assert llmctl("convert", small, "-o", out, "--type", "Q8_0", "--force").returncode == 0
    assert len(open_checkpoint(out).names()) == 4


def test_an_importance_matrix_and_an_adapter_are_inputs_too(
    llmctl: Callable[..., Any], scripted: Path, tmp_path: Path
) -> None:
    """What is read beside the model is not written over either, by --force neither."""
    imatrix, adapter = tmp_path / "imatrix.gguf", tmp_path / "adapter"
    with GgufWriter(imatrix, {"general.type": "imatrix"}) as writer:
        for name, shape in (("blk.0.ffn_up.weight.in_sum2", (1, 272)), ("blk.0.ffn_up.weight.counts", (1, 1))):
            writer.declare(name, FORMATS["F32"], shape)
        writer.write("blk.0.ffn_up.weight.in_sum2", np.ones((1, 272), np.float32))
        writer.write("blk.0.ffn_up.weight.counts", np.ones((1, 1), np.float32))
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["up_proj"]}')
    module = "base_model.model.model.layers.0.mlp.up_proj"
    lora = {f"{module}.lora_A.weight": np.ones((2, 272), np.float32), f"{module}.lora_B.weight": np.ones((4, 2), np.float32)}
    save_file(lora, adapter / "adapter_model.safetensors")
    weights = adapter / "adapter_model.safetensors"
    before = imatrix.read_bytes(), weights.read_bytes()
    for options, target in ((("--imatrix", imatrix), imatrix), (("--lora", adapter), weights)):
        done = llmctl("convert", scripted, "--type", "Q8_0", *options, "-o", target, "--force")
        assert (done.returncode, done.stdout) == (1, "")
        assert f"{target}: the output is the same file as the input" in done.stderr
    done = llmctl("convert", scripted, "--to", "safetensors", "--lora", adapter, "-o", adapter, "--force")
    assert done.returncode == 1
    assert "lies in the folder to be written" in done.stderr
    assert (imatrix.read_bytes(), weights.read_bytes()) == before

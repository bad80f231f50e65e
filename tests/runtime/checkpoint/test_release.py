"""Pages of a tensor that has been prepared leave the process's memory, and come back when they are read again."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmctl.errors import FormatError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint

ROWS, COLUMNS = 4096, 512  # 2.2 MB of Q8_0

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def resident_bytes(path: Path) -> int:
    """Bytes of the mapped file that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.fixture
def two_tensors(write_file, raw_gguf) -> tuple[Path, bytes]:
    """A GGUF of two Q8_0 tensors, "a" and "b", and the bytes of each."""
    raw = np.random.default_rng(0).integers(0, 256, (ROWS, FORMATS["Q8_0"].row_bytes(COLUMNS)), dtype=np.uint8).tobytes()
    tensors = [
        raw_gguf.tensor("a", (COLUMNS, ROWS), FORMATS["Q8_0"].gguf_id, 0),
        raw_gguf.tensor("b", (COLUMNS, ROWS), FORMATS["Q8_0"].gguf_id, len(raw)),
    ]
    return write_file("two.gguf", raw_gguf.build(tensors=tensors, data=raw + raw)), raw


@pytest.fixture
def one_shard(write_file, raw_safetensors) -> tuple[Path, bytes]:
    """A safetensors file of one F16 tensor "a", and its bytes."""
    raw = np.random.default_rng(1).integers(0, 256, ROWS * COLUMNS * 2, dtype=np.uint8).tobytes()
    header = {"a": {"dtype": "F16", "shape": [ROWS, COLUMNS], "data_offsets": [0, len(raw)]}}
    return write_file("model.safetensors", raw_safetensors(header, raw)), raw


def stored_bytes(tensor: np.ndarray | QuantTensor) -> bytes:
    return (tensor.blocks if isinstance(tensor, QuantTensor) else tensor).tobytes()


@linux_only
def test_a_released_tensor_leaves_and_comes_back(two_tensors: tuple[Path, bytes]) -> None:
    path, raw = two_tensors
    checkpoint = open_checkpoint(path)
    before = {name: checkpoint.read(name) for name in "ab"}
    assert all(stored_bytes(tensor) == raw for tensor in before.values())
    everything = resident_bytes(path)
    assert everything >= 2 * len(raw)
    checkpoint.release("a")
    assert everything - resident_bytes(path) > len(raw) - 3 * 4096
    assert all(stored_bytes(before[name]) == stored_bytes(checkpoint.read(name)) == raw for name in "ab")


@linux_only
def test_everything_leaves_at_once(two_tensors: tuple[Path, bytes]) -> None:
    path, raw = two_tensors
    checkpoint = open_checkpoint(path)
    assert stored_bytes(checkpoint.read("b")) == raw
    checkpoint.release_all()
    assert resident_bytes(path) < 2 * 4096
    assert stored_bytes(checkpoint.read("b")) == raw


@linux_only
def test_safetensors_are_released_too(one_shard: tuple[Path, bytes]) -> None:
    path, raw = one_shard
    checkpoint = open_checkpoint(path)
    assert stored_bytes(checkpoint.read("a")) == raw
    assert resident_bytes(path) >= len(raw)
    checkpoint.release("a")
    assert resident_bytes(path) < 4 * 4096
    assert stored_bytes(checkpoint.read("a")) == raw


def test_a_tensor_smaller_than_a_page_may_be_released(write_file, raw_gguf) -> None:
    tensor = raw_gguf.tensor("small", (8,))
    path = write_file("small.gguf", raw_gguf.build(tensors=[tensor], data=bytes(range(32))))
    checkpoint = open_checkpoint(path)
    checkpoint.release("small")
    assert checkpoint.read("small").tobytes() == bytes(range(32))


def test_what_is_not_there_cannot_be_released(two_tensors: tuple[Path, bytes]) -> None:
    checkpoint = open_checkpoint(two_tensors[0])
    with pytest.raises(FormatError, match="there is no tensor 'c'"):
        checkpoint.release("c")
    checkpoint.close()
    with pytest.raises(ValueError, match="closed"):
        checkpoint.release("a")

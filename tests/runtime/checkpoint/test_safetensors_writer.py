"""Writing safetensors: what the format's own library reads back, shards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from llmctl.errors import FormatError, OutputError, UnsupportedError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.safetensors_writer import SafetensorsWriter
from llmctl.runtime.checkpoint.shards import deal_out

RNG = np.random.default_rng(3)
TENSORS = {
    "a.weight": RNG.standard_normal((6, 5)).astype(np.float16),
    "b.bias": RNG.standard_normal(3).astype(np.float32),
    "c.weight": RNG.standard_normal((4, 7)).astype(ml_dtypes.bfloat16),
    "d.scale": np.float32(2.5).reshape(()),
}
TYPES = {"a.weight": "F16", "b.bias": "F32", "c.weight": "BF16", "d.scale": "F32"}


def write(folder: Path, limit: int | None = None, rows: int = 2) -> None:
    with SafetensorsWriter(folder, max_shard_bytes=limit) as writer:
        for name, tensor in TENSORS.items():
            writer.declare(name, FORMATS[TYPES[name]], tensor.shape)
        for name, tensor in TENSORS.items():
            parts = [tensor[i : i + rows] for i in range(0, len(tensor), rows)] if tensor.ndim else [tensor]
            writer.write(name, parts)


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(TENSORS)
        for name, tensor in TENSORS.items():
            assert file.get_tensor(name).float().numpy().tobytes() == tensor.astype(np.float32).tobytes()


@pytest.mark.parametrize("limit", [1, 60, 70, 10**9])
def test_shards_hold_every_tensor_once(tmp_path: Path, limit: int) -> None:
    write(tmp_path, limit)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    expected = {1: 4, 60: 3, 70: 3, 10**9: 1}[limit]
    assert len(shards) == expected
    if expected > 1:
        assert shards[0] == f"model-00001-of-{expected:05d}.safetensors"
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
        assert set(index["weight_map"]) == set(TENSORS)
    with open_checkpoint(tmp_path) as checkpoint:
        for name, tensor in TENSORS.items():
            assert checkpoint.read(name).tobytes() == tensor.tobytes()


def test_tensors_are_dealt_out_in_order() -> None:
    assert deal_out([5, 5, 5], 10) == [[0, 1], [2]]
    assert deal_out([50, 5, 5], 10) == [[0], [1, 2]]
    assert deal_out([5, 5], None) == [[0, 1]]
    assert deal_out([], 10) == [[]]


def test_a_file_of_nothing(tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path):
        pass
    assert open_checkpoint(tmp_path).names() == []


def test_what_was_not_declared_so_leaves_no_file(tmp_path: Path) -> None:
    def attempt(name: str, parts: list[np.ndarray]) -> None:
        with SafetensorsWriter(tmp_path) as writer:
            writer.declare("x", FORMATS["F32"], (2, 2))
            writer.declare("y", FORMATS["F32"], (2, 2))
            writer.write(name, parts)

    good = np.zeros((2, 2), np.float32)
    for name, parts, message in (
        ("x", [good.astype(np.float16)], "declared F32, got float16"),
        ("x", [good[:1]], "has 2 elements"),
        ("y", [good], "out of order: it is the turn of 'x'"),
        ("z", [good], "never declared"),
    ):
        with pytest.raises(FormatError, match=message):
            attempt(name, parts)
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(FormatError, match="never written, the first is 'x'"), SafetensorsWriter(tmp_path) as writer:
        writer.declare("x", FORMATS["F32"], (2, 2))
    with pytest.raises(UnsupportedError, match="no type Q4_0"):
        SafetensorsWriter(tmp_path).declare("x", FORMATS["Q4_0"], (2, 32))


def test_a_full_disk_is_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.runtime.checkpoint.output_file.free_bytes", lambda folder: 10)
    with pytest.raises(OutputError, match="10 are free"):
        write(tmp_path)
    assert list(tmp_path.iterdir()) == []

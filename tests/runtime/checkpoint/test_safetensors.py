"""Reading safetensors files and Hugging Face folders that the safetensors library made."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from llmctl.errors import FormatError, ModelNotFoundError, UnsupportedError
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.dtypes import PLAIN_DTYPES
from llmctl.runtime.checkpoint.safetensors import SafetensorsCheckpoint


def tensors(*names: str) -> dict[str, np.ndarray]:
    return {name: np.full((2, 3), index + 1, np.float32) for index, name in enumerate(names)}


def write_index(folder: Path, weight_map: object) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """a, b in the first of two shards, c in the second; config beside them."""
    save_file(tensors("a", "b"), tmp_path / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file(tensors("c"), tmp_path / "model-00002-of-00002.safetensors", {"format": "np", "note": "x"})
    shard = "model-0000{}-of-00002.safetensors"
    write_index(tmp_path, {"a": shard.format(1), "b": shard.format(1), "c": shard.format(2)})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "limit": Infinity}')
    return tmp_path


def test_every_dtype(tmp_path: Path, raw_safetensors, write_file) -> None:
    header, data = {}, b""
    for name, dtype in PLAIN_DTYPES.items():
        raw = bytes([1]) * (4 * dtype.itemsize)
        header[name] = {"dtype": name, "shape": [2, 2], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    checkpoint = SafetensorsCheckpoint(write_file("m.safetensors", raw_safetensors(header, data)))
    assert set(checkpoint.names()) == set(PLAIN_DTYPES)
    for name, dtype in PLAIN_DTYPES.items():
        tensor = checkpoint.read(name)
        assert (tensor.dtype, tensor.shape) == (dtype, (2, 2))
        assert tensor.tobytes() == bytes([1]) * (4 * dtype.itemsize)
        assert checkpoint.entry(name).format.name == name
        assert tensor.flags.aligned
        assert not tensor.flags.writeable


def test_values_by_the_library(tmp_path: Path) -> None:
    stored = {
        "f32": np.array([[1.5, -0.0], [np.inf, 1e-40]], np.float32),
        "f16": np.arange(6, dtype=np.float16).reshape(1, 6),
        "bf16": np.array([1e5, -0.0], ml_dtypes.bfloat16),
        "i64": np.array([-1, 2**62]),
        "bool": np.array([True, False]),
        "scalar": np.array(0.25, np.float32),
        "empty": np.zeros((0, 4), np.int32),
    }
    save_file(stored, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        assert checkpoint.kind == "safetensors"
        for name, array in stored.items():
            found = checkpoint.read(name)
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert found.tobytes() == array.tobytes()
        assert checkpoint.total_bytes == sum(array.nbytes for array in stored.values())


def test_aligned_tensors_are_mapped_unaligned_ones_copied(write_file, raw_safetensors) -> None:
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "odd": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    data = b"\x07" + np.float32([1, 2]).tobytes()
    checkpoint = SafetensorsCheckpoint(write_file("m.safetensors", raw_safetensors(header, data)))
    assert np.shares_memory(checkpoint.read("byte"), checkpoint.read("byte"))
    odd = checkpoint.read("odd")
    assert odd.tolist() == [1, 2]
    assert odd.flags.aligned
    assert not odd.flags.writeable


def test_folder_with_one_file(tmp_path: Path) -> None:
    save_file(tensors("w"), tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.metadata == {"format": "pt"}
    assert checkpoint.folder == tmp_path
    assert checkpoint.files == [tmp_path / "model.safetensors"]


def test_bare_file_has_no_config(tmp_path: Path) -> None:
    save_file(tensors("w"), tmp_path / "weights.safetensors")
    checkpoint = open_checkpoint(str(tmp_path / "weights.safetensors"))
    assert checkpoint.config == checkpoint.generation_config == {}


@pytest.mark.parametrize("opened", [".", "model.safetensors.index.json", "model-00002-of-00002.safetensors"])
def test_sharded_folder_index_or_shard(sharded: Path, opened: str) -> None:
    checkpoint = open_checkpoint(sharded / opened)
    assert {name: checkpoint.read(name)[0, 0] for name in checkpoint.names()} == {"a": 1, "b": 2, "c": 1}
    assert [file.name for file in checkpoint.files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert checkpoint.entry("c").file.name == "model-00002-of-00002.safetensors"
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.metadata == {"format": "pt", "note": "x"}


def test_the_index_goes_before_model_before_any_other(sharded: Path) -> None:
    save_file(tensors("single"), sharded / "model.safetensors")
    save_file(tensors("consolidated"), sharded / "consolidated.safetensors")
    assert open_checkpoint(sharded).names() == ["a", "b", "c"]
    assert open_checkpoint(sharded / "consolidated.safetensors").names() == ["consolidated"]
    (sharded / "model.safetensors.index.json").unlink()
    assert open_checkpoint(sharded).names() == ["single"]
    (sharded / "model.safetensors").unlink()
    with pytest.raises(FormatError, match=r"several safetensors files, and neither .*: consolidated\.safetensors, model-0"):
        open_checkpoint(sharded)
    for shard in sharded.glob("model-*"):
        shard.unlink()
    assert open_checkpoint(sharded).names() == ["consolidated"]


def test_shard_name_that_no_file_can_have(sharded: Path) -> None:
    with pytest.raises(FormatError, match=r"places tensor 'a' in 'n+…n+', expected the name of a file") as caught:
        open_checkpoint(write_index(sharded, {"a": "n" * 3000}))
    assert len(str(caught.value)) < 500


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model-00002-of-00002\.safetensors: no such file, but .*index\.json lists"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "C:x", "a\0b", 3, None]
)
def test_shards_outside_the_folder(sharded: Path, name: object) -> None:
    index = write_index(sharded, {"a": name})
    with pytest.raises(FormatError, match=r"weight_map places tensor 'a' in .*, expected the name of a file in the same folder"):
        open_checkpoint(index)


def test_index_and_shards_that_disagree(sharded: Path) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    write_index(sharded, {"a": first, "c": second, "ghost": second})
    with pytest.raises(FormatError, match=r"00002-of-00002\.safetensors: tensor 'ghost' is not in it"):
        open_checkpoint(sharded)
    write_index(sharded, {"a": second, "c": second, "b": first})
    with pytest.raises(FormatError, match=r"00002-of-00002\.safetensors: tensor 'a' is not in it"):
        open_checkpoint(sharded)
    save_file(tensors("c", "a"), sharded / second)
    write_index(sharded, {"a": first, "b": first, "c": second})
    with pytest.raises(FormatError, match=r"00002.*: tensor 'a' is also in model-00001-of-00002\.safetensors"):
        open_checkpoint(sharded)


def test_tensors_the_index_forgot_are_there(sharded: Path) -> None:
    first, second = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    write_index(sharded, {"a": first, "c": second})
    assert open_checkpoint(sharded).names() == ["a", "b", "c"]


@pytest.mark.parametrize(("weight_map", "reason"), [
    (None, "a JSON file without a weight_map is no shard index"),
    ([], "weight_map must be an object"),
    ({}, "with at least one entry"),
])  # fmt: skip
def test_index_of_the_wrong_shape(sharded: Path, weight_map: object, reason: str) -> None:
    with pytest.raises(FormatError, match=rf"index\.json: .*{reason}"):
        open_checkpoint(write_index(sharded, weight_map))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("content", "reason"), [
    (b"{", "not valid JSON"),
    (b"", "not valid JSON"),
    (b"\xff\xfe{", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b"[]", "expected a JSON object, found list"),
])  # fmt: skip
def test_broken_json_is_named(sharded: Path, name: str, content: bytes, reason: str) -> None:
    (sharded / name).write_bytes(content)
    with pytest.raises(FormatError, match=rf"/{name}: .*{reason}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(("files", "reason"), [
    ([], "no safetensors weights in this folder; it is empty"),
    (["config.json", "notes.txt"], r"; it holds config\.json, notes\.txt"),
    (["pytorch_model.bin", "config.json"], r"only PyTorch pickles \(pytorch_model\.bin\), which can run code"),
    (["m.Q8_0.gguf", "config.json"], r"it holds GGUF files, name one of them: m\.Q8_0\.gguf"),
    ([f"{n}.txt" for n in range(8)], r"it holds 0\.txt, .*4\.txt and 3 more"),
])  # fmt: skip
def test_folder_without_weights(tmp_path: Path, files: list[str], reason: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ModelNotFoundError, match=reason):
        open_checkpoint(tmp_path)


def test_shard_that_is_something_else(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(UnsupportedError, match=r"00002-of-00002\.safetensors: PyTorch pickle files can run code"):
        open_checkpoint(sharded)
    (sharded / "model-00002-of-00002.safetensors").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(FormatError, match=r"00002-of-00002\.safetensors: not a safetensors file"):
        open_checkpoint(sharded)


def test_names_beyond_ascii(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(save({"gewicht.ü.€": np.ones(1, np.float32)}))
    assert open_checkpoint(tmp_path).names() == ["gewicht.ü.€"]

"""Reading GGUF files that an independent writer (gguf-py) made."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from llmctl.errors import FormatError, ModelNotFoundError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.gguf_types import ValueType


def random_blocks(form_name: str, rows: int = 3, blocks: int = 2) -> np.ndarray:
    form = FORMATS[form_name]
    return np.random.default_rng(form.gguf_id).integers(0, 256, (rows, blocks * form.bytes_per_block), np.uint8)


def write_every_type(path: Path, alignment: int = 32) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    stored = {}
    for name, form in FORMATS.items():
        stored[f"t.{name}"] = raw = random_blocks(name)
        writer.add_tensor(f"t.{name}", raw, raw_dtype=gguf.GGMLQuantizationType(form.gguf_id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_every_type_is_read_as_stored(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "all.gguf"
    stored = write_every_type(path, alignment)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.alignment == alignment
        assert checkpoint.names() == list(stored)
        assert checkpoint.total_bytes == sum(raw.nbytes for raw in stored.values())
        for name, raw in stored.items():
            tensor = checkpoint.read(name)
            entry = checkpoint.entry(name)
            form = FORMATS[name.removeprefix("t.")]
            assert entry.format is form
            assert entry.offset % alignment == 0
            assert tensor.shape == entry.shape == (3, 2 * form.elements_per_block)
            if form.is_plain:
                assert isinstance(tensor, np.ndarray)
                assert tensor.tobytes() == raw.tobytes()
            else:
                assert isinstance(tensor, QuantTensor)
                np.testing.assert_array_equal(tensor.blocks, raw)


def test_tensors_are_mapped_and_read_only(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    write_every_type(path)
    checkpoint = open_checkpoint(path)
    plain, quantized = checkpoint.read("t.F32"), checkpoint.read("t.Q4_K")
    assert np.shares_memory(plain, checkpoint.read("t.F32"))
    assert np.shares_memory(quantized.blocks, checkpoint.read("t.Q4_K").blocks)
    with pytest.raises(ValueError, match="read-only"):
        plain[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        quantized.blocks[0] = 0
    before = plain.copy()
    checkpoint.close()
    np.testing.assert_array_equal(plain, before)
    with pytest.raises(ValueError, match="closed"):
        checkpoint.read("t.F32")


def test_plain_values_and_torch_order(tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    bfloat = np.array([1.5, -0.0, np.nan, 1e-40], ml_dtypes.bfloat16)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("experts", values)
    writer.add_tensor("half", values[0].astype(np.float16))
    writer.add_tensor("bf", bfloat.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    np.testing.assert_array_equal(checkpoint.read("experts"), values)
    assert checkpoint.read("half").dtype == np.float16
    assert checkpoint.read("half").shape == (3, 4)
    assert checkpoint.read("bf").dtype == ml_dtypes.bfloat16
    assert checkpoint.read("bf").tobytes() == bfloat.tobytes()
    assert checkpoint.total_elements == 24 + 12 + 4


def test_metadata_of_every_type(tmp_path: Path) -> None:
    path = tmp_path / "keys.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    types = gguf.GGUFValueType
    scalars = {
        "U8": (200, types.UINT8),
        "I8": (-5, types.INT8),
        "U16": (60000, types.UINT16),
        "I16": (-30000, types.INT16),
        "U32": (4_000_000_000, types.UINT32),
        "I32": (-2_000_000_000, types.INT32),
        "U64": (2**63 + 1, types.UINT64),
        "I64": (-(2**62), types.INT64),
        "F32": (0.5, types.FLOAT32),
        "F64": (0.1, types.FLOAT64),
        "BOOL": (True, types.BOOL),
        "STRING": ("héllo\n€", types.STRING),
    }
    for name, (value, value_type) in scalars.items():
        writer.add_key_value(f"x.{name}", value, value_type)
    writer.add_array("x.strings", ["a", "", "ü" * 200])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1.0])
    writer.add_array("x.bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    checkpoint = GgufCheckpoint(path)
    for name, (value, _) in scalars.items():
        found = checkpoint.metadata[f"x.{name}"]
        assert found == value
        assert type(found) is type(value)
        assert checkpoint.metadata_types[f"x.{name}"] is ValueType[name]
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert checkpoint.metadata["x.strings"] == ["a", "", "ü" * 200]
    ints, floats, bools = (checkpoint.metadata[f"x.{name}"] for name in ("ints", "floats", "bools"))
    assert (ints.dtype, ints.tolist()) == (np.int32, [1, -2, 3])
    assert (floats.dtype, floats.tolist()) == (np.float32, [0.5, -1.0])
    assert (bools.dtype, bools.tolist()) == (np.bool_, [True, False])
    assert ints.flags.aligned
    assert checkpoint.names() == []


def test_nested_arrays(write_file, raw_gguf) -> None:
    inner = [raw_gguf.array(0, 2, b"\x01\x02"), raw_gguf.array(8, 1, raw_gguf.string("x")), raw_gguf.array(0, 0, b"")]
    path = write_file("n.gguf", raw_gguf.build([raw_gguf.key("n", 9, raw_gguf.array(9, 3, b"".join(inner)))]))
    first, second, third = GgufCheckpoint(path).metadata["n"]
    assert first.tolist() == [1, 2]
    assert second == ["x"]
    assert third.tolist() == []


def test_token_bytes_that_are_not_utf8(write_file, raw_gguf) -> None:
    tokens = raw_gguf.array(8, 2, raw_gguf.string(b"\xf0\x9f") + raw_gguf.string(b"\x00"))
    path = write_file("t.gguf", raw_gguf.build([raw_gguf.key("tokenizer.ggml.tokens", 9, tokens)]))
    assert GgufCheckpoint(path).metadata["tokenizer.ggml.tokens"].tobytes_list() == [b"\xf0\x9f", b"\x00"]


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions(write_file, raw_gguf, version: int) -> None:
    data = np.float32([1, 2]).tobytes()
    path = write_file("v.gguf", raw_gguf.build([], [raw_gguf.tensor("w", [2])], data, version=version))
    checkpoint = GgufCheckpoint(path)
    assert checkpoint.version == version
    assert checkpoint.read("w").tolist() == [1, 2]


def test_scalar_tensor_gaps_and_missing_last_padding(write_file, raw_gguf) -> None:
    """Legal, if unusual: no dimensions, unused bytes between tensors, a file that ends with its last number."""
    tensors = [raw_gguf.tensor("late", [1], offset=96), raw_gguf.tensor("scalar", [])]
    data = np.float32([7]).tobytes().ljust(96, b"\xee") + np.float32([9]).tobytes()
    checkpoint = GgufCheckpoint(write_file("g.gguf", raw_gguf.build([], tensors, data)))
    assert checkpoint.read("scalar").shape == ()
    assert checkpoint.read("scalar") == 7
    assert checkpoint.read("late").tolist() == [9]
    assert checkpoint.names() == ["late", "scalar"]


def test_unknown_tensor_names_the_similar_ones(write_file, raw_gguf) -> None:
    path = write_file("w.gguf", raw_gguf.build([], [raw_gguf.tensor("blk.0.attn_q.weight", [1])], bytes(4)))
    with pytest.raises(FormatError, match=r"w\.gguf: there is no tensor 'blk\.0\.attn_k\.weight' .*'blk\.0\.attn_q\.weight'"):
        GgufCheckpoint(path).read("blk.0.attn_k.weight")


def write_split(folder: Path, **numbers: int) -> list[Path]:
    """Three shards by gguf-py, each with one tensor."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
    writer.add_string("general.name", "split one")
    for name, value in numbers.items():
        writer.add_tensor(name, np.full((2, 4), value, np.float32))
    writer.write_header_to_file(folder / "model.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_split_set_from_any_shard(tmp_path: Path, opened: int) -> None:
    shards = write_split(tmp_path, a=1, b=2, c=3)
    checkpoint = GgufCheckpoint(shards[opened])
    assert checkpoint.path == shards[opened]
    assert checkpoint.files == shards
    assert checkpoint.metadata["general.name"] == "split one"
    assert {name: checkpoint.read(name)[0, 0] for name in checkpoint.names()} == {"a": 1, "b": 2, "c": 3}
    assert checkpoint.entry("c").file == shards[2]
    assert not any(key.startswith("split.") for key in checkpoint.typed_metadata())


def test_split_set_errors(tmp_path: Path) -> None:
    shards = write_split(tmp_path, a=1, b=2, c=3)
    renamed = tmp_path / "other.gguf"
    shutil.copy(shards[1], renamed)
    with pytest.raises(FormatError, match=r"other\.gguf: this is part 2 of 3 .* -00002-of-00003\.gguf"):
        GgufCheckpoint(renamed)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(FormatError, match=r"00002-of-00003\.gguf: its keys .* do not say part 2 of 3"):
        GgufCheckpoint(shards[2])
    shards[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"00002-of-00003\.gguf: no such file .*part 2 of 3 of the split model"):
        GgufCheckpoint(shards[0])


def split_keys(raw_gguf, number: int, count: int, tensors: int) -> list[bytes]:
    return [raw_gguf.u32("split.no", number), raw_gguf.u32("split.count", count), raw_gguf.u32("split.tensors.count", tensors)]


def test_split_set_with_a_tensor_twice_or_too_few(write_file, raw_gguf) -> None:
    for number, name in enumerate(["w", "w"]):
        path = write_file(
            f"m-0000{number + 1}-of-00002.gguf",
            raw_gguf.build(split_keys(raw_gguf, number, 2, 2), [raw_gguf.tensor(name, [1])], bytes(4)),
        )
    with pytest.raises(FormatError, match=r"00002-of-00002\.gguf: tensor 'w' is also in m-00001-of-00002\.gguf"):
        GgufCheckpoint(path)
    path = write_file(
        "m-00002-of-00002.gguf", raw_gguf.build(split_keys(raw_gguf, 1, 2, 3), [raw_gguf.tensor("v", [1])], bytes(4))
    )
    GgufCheckpoint(path)
    write_file("m-00001-of-00002.gguf", raw_gguf.build(split_keys(raw_gguf, 0, 2, 3), [raw_gguf.tensor("w", [1])], bytes(4)))
    with pytest.raises(FormatError, match=r"split\.tensors\.count is 3, the parts hold 2 tensors"):
        GgufCheckpoint(path)


def test_split_keys_of_the_wrong_kind(write_file, raw_gguf) -> None:
    path = write_file("s.gguf", raw_gguf.build([raw_gguf.key("split.count", 8, raw_gguf.string("3"))]))
    with pytest.raises(FormatError, match=r"split\.count must be a number, found .*3"):
        GgufCheckpoint(path)
    path = write_file("s.gguf", raw_gguf.build([raw_gguf.u32("split.count", 3)]))
    with pytest.raises(FormatError, match=r"split\.no must be a number, found 'None'"):
        GgufCheckpoint(path)

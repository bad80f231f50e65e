"""Our writer, read back by gguf-py's reader and by ours; what it refuses; what it leaves behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from llmctl.errors import FormatError, OutputError, UnsupportedError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS, Format
from llmctl.runtime.checkpoint.dtypes import PLAIN_DTYPES, SAFETENSORS_FORMATS
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.checkpoint.gguf_types import ValueType
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed
from llmctl.runtime.checkpoint.string_array import StringArray

F32, F16, Q4_0 = FORMATS["F32"], FORMATS["F16"], FORMATS["Q4_0"]


def random_tensor(name: str) -> np.ndarray | QuantTensor:
    form = FORMATS[name]
    raw = np.random.default_rng(form.gguf_id).integers(0, 256, (3, 2 * form.bytes_per_block), np.uint8)
    if form.is_plain:
        return raw.view(PLAIN_DTYPES[name])
    return QuantTensor(form, (3, 2 * form.elements_per_block), raw)


def raw_bytes(tensor: np.ndarray | QuantTensor) -> bytes:
    return (tensor.blocks if isinstance(tensor, QuantTensor) else tensor).tobytes()


def write_one(path: Path, metadata: dict, tensors: dict | None = None, alignment: int | None = None) -> None:
    tensors = tensors or {}
    with GgufWriter(path, metadata, alignment) as writer:
        for name, tensor in tensors.items():
            form = tensor.format if isinstance(tensor, QuantTensor) else FORMATS[_plain_name(tensor)]
            writer.declare(name, form, tensor.shape)
        for name, tensor in tensors.items():
            writer.write(name, tensor)


def _plain_name(tensor: np.ndarray) -> str:
    return next(name for name, dtype in PLAIN_DTYPES.items() if dtype == tensor.dtype)


@pytest.mark.parametrize("alignment", [None, 8, 64])
def test_every_type_read_by_gguf_py(tmp_path: Path, alignment: int | None) -> None:
    path = tmp_path / "all.gguf"
    tensors = {f"t.{name}": random_tensor(name) for name in FORMATS}
    write_one(path, {"general.architecture": "llama"}, tensors, alignment)
    reader = gguf.GGUFReader(path)
    assert reader.alignment == (alignment or 32)
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    for tensor in reader.tensors:
        expected = tensors[tensor.name]
        assert tensor.tensor_type.value == FORMATS[tensor.name.removeprefix("t.")].gguf_id
        assert tuple(tensor.shape[::-1]) == expected.shape
        assert tensor.data.tobytes() == raw_bytes(expected)
        assert tensor.data_offset % reader.alignment == 0
    assert path.stat().st_size % reader.alignment == 0


def test_every_type_read_by_our_reader(tmp_path: Path) -> None:
    tensors = {f"t.{name}": random_tensor(name) for name in FORMATS}
    write_one(tmp_path / "all.gguf", {}, tensors)
    checkpoint = GgufCheckpoint(tmp_path / "all.gguf")
    for name, tensor in tensors.items():
        assert raw_bytes(checkpoint.read(name)) == raw_bytes(tensor)
        assert checkpoint.read(name).shape == tensor.shape


INFERRED = {
    "bool": (True, ValueType.BOOL),
    "zero": (0, ValueType.U32),
    "u32": (2**32 - 1, ValueType.U32),
    "negative": (-(2**31), ValueType.I32),
    "u64": (2**64 - 1, ValueType.U64),
    "i64": (-(2**31) - 1, ValueType.I64),
    "float": (0.5, ValueType.F32),
    "infinity": (float("inf"), ValueType.F32),
    "text": ("héllo\n", ValueType.STRING),
    "typed": (Typed(7, ValueType.U8), ValueType.U8),
    "double": (Typed(0.1, ValueType.F64), ValueType.F64),
    "numpy": (np.int16(-3), ValueType.I16),
    "numpy float": (np.float64(0.1), ValueType.F64),
}


@pytest.mark.parametrize("name", INFERRED)
def test_scalars(tmp_path: Path, name: str) -> None:
    value, expected_type = INFERRED[name]
    write_one(tmp_path / "k.gguf", {"k": value})
    checkpoint = GgufCheckpoint(tmp_path / "k.gguf")
    assert checkpoint.metadata["k"] == (value.value if isinstance(value, Typed) else value)
    assert checkpoint.metadata_types["k"] is expected_type


ARRAYS = {
    "ints": ([1, 2**32 - 1], np.uint32),
    "negative": ([-1, 1], np.int32),
    "wide": ([1, 2**32], np.uint64),
    "wide negative": ([-1, 2**32], np.int64),
    "floats": ([0.5, 2], np.float32),
    "bools": ([True, False], np.bool_),
    "typed": (Typed([1, 2], ValueType.I8), np.int8),
    "typed empty": (Typed([], ValueType.F32), np.float32),
    "numpy": (np.array([1, 2], np.int16), np.int16),
    "big-endian numpy": (np.array([1, 2], ">i4"), np.int32),
    "converted numpy": (Typed(np.array([1, 2]), ValueType.U32), np.uint32),
    "tuple": ((1, 2), np.uint32),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_number_arrays(tmp_path: Path, name: str) -> None:
    value, dtype = ARRAYS[name]
    write_one(tmp_path / "k.gguf", {"k": value})
    found = GgufCheckpoint(tmp_path / "k.gguf").metadata["k"]
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, value.value if isinstance(value, Typed) else value)


def test_string_and_nested_arrays(tmp_path: Path) -> None:
    tokens = StringArray.encode(["a", b"\xff", ""])
    nested = [np.array([1], np.uint8), StringArray.encode(["x"]), [[2.5]]]
    values = {"list": ["é", b"\xf0"], "array": tokens, "empty": StringArray.encode([]), "nested": nested}
    write_one(tmp_path / "k.gguf", values)
    found = GgufCheckpoint(tmp_path / "k.gguf").metadata
    assert found["list"].tobytes_list() == ["é".encode(), b"\xf0"]
    assert found["array"] == tokens
    assert len(found["empty"]) == 0
    assert [found["nested"][0].tolist(), list(found["nested"][1]), found["nested"][2][0].tolist()] == [[1], ["x"], [2.5]]


def test_metadata_read_by_gguf_py(tmp_path: Path) -> None:
    write_one(tmp_path / "k.gguf", {"s": "text", "n": -5, "f": 0.25, "b": True, "l": ["x", "y"], "i": [1, 2]})
    reader = gguf.GGUFReader(tmp_path / "k.gguf")
    assert {key: reader.get_field(key).contents() for key in "snfbli"} == {
        "s": "text", "n": -5, "f": 0.25, "b": True, "l": ["x", "y"], "i": [1, 2],
    }  # fmt: skip


def test_metadata_and_tensors_pass_through_unchanged(tmp_path: Path) -> None:
    """What a quantizer does: read, write everything with the types it had. The second copy equals the first."""
    source = {
        "general.alignment": 64, "a": Typed(1, ValueType.I8), "b": Typed(0.1, ValueType.F64), "c": Typed(5, ValueType.U64),
        "tokens": ["x", b"\xff"], "scores": np.array([0.5], np.float64), "nested": [[1], ["y"]], "flag": True,
        "split.count": 1,
    }  # fmt: skip
    write_one(tmp_path / "1.gguf", source, {"w": np.ones((2, 3), np.float32)})
    for number in (1, 2):
        with GgufCheckpoint(tmp_path / f"{number}.gguf") as checkpoint:
            tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
            write_one(tmp_path / f"{number + 1}.gguf", checkpoint.typed_metadata(), tensors)
    assert (tmp_path / "2.gguf").read_bytes() == (tmp_path / "3.gguf").read_bytes()
    first, second = GgufCheckpoint(tmp_path / "1.gguf"), GgufCheckpoint(tmp_path / "2.gguf")
    assert second.metadata_types == {k: v for k, v in first.metadata_types.items() if k != "split.count"}
    assert second.metadata["tokens"] == first.metadata["tokens"]
    assert second.alignment == 64


def test_strided_and_scalar_arrays(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors = {"transposed": values.T, "strided": values[::2, 1::2], "scalar": np.array(3, np.float32)}
    write_one(tmp_path / "s.gguf", {}, tensors)
    checkpoint = GgufCheckpoint(tmp_path / "s.gguf")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_bfloat16_is_bit_exact(tmp_path: Path) -> None:
    bits = np.array([0x47C3, 0x0001, 0x8000, 0x7FC1, 0xFF80], np.uint16)  # 1e5, a subnormal, -0, a NaN with payload, -inf
    write_one(tmp_path / "b.gguf", {}, {"w": bits.view(ml_dtypes.bfloat16)})
    np.testing.assert_array_equal(GgufCheckpoint(tmp_path / "b.gguf").read("w").view(np.uint16), bits)


REFUSED_VALUES = {
    "none": (None, "NoneType has no place"),
    "object": ({"a": 1}, "dict has no place"),
    "empty list": ([], "give their type"),
    "mixed": ([1, "a"], "give their type"),
    "list and number": ([[1], 2], "give their type"),
    "too wide": (2**64, "beyond 64 bits"),
    "too wide together": ([-1, 2**63], "beyond 64 bits"),
    "f32 overflow": (1e300, "too large"),
    "array overflow": (Typed(np.array([1e300]), ValueType.F32), "overflow"),
    "no such range": (Typed(300, ValueType.U8), "cannot be stored"),
    "array out of range": (Typed(np.array([300]), ValueType.U8), "do not fit U8"),
    "float as int": (Typed(1.5, ValueType.U32), "cannot be stored"),
    "bool as int": (Typed(True, ValueType.U32), "U32 does not hold bool"),
    "int as bool": (Typed(1, ValueType.BOOL), "BOOL does not hold int"),
    "half": (np.array([1], np.float16), "no type for float16"),
    "surrogate": ("\ud800", "surrogates not allowed"),
    "deep": ([[[[[[[[[[1]]]]]]]]]], "nested deeper than 8"),
}


@pytest.mark.parametrize("name", REFUSED_VALUES)
def test_refused_values(tmp_path: Path, name: str) -> None:
    value, reason = REFUSED_VALUES[name]
    with pytest.raises(FormatError, match=f"metadata key 'k': .*{reason}"):
        GgufWriter(tmp_path / "k.gguf", {"k": value})
    assert list(tmp_path.iterdir()) == []


def test_refused_keys_and_alignments(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    for key in ("", "k" * 65536):
        with pytest.raises(FormatError, match="must be 1 to 65535 bytes long"):
            GgufWriter(path, {key: 1})
    for alignment in (0, 3, 4, 2**30):
        with pytest.raises(FormatError, match=f"alignment {alignment}: expected a power of two"):
            GgufWriter(path, {}, alignment)
    with pytest.raises(FormatError, match=r"general\.alignment is 64 in the metadata, but 32 was asked for"):
        GgufWriter(path, {"general.alignment": 64}, 32)
    assert list(tmp_path.iterdir()) == []


REFUSED_DECLARATIONS = [
    ("", F32, (2,), "name of 1 to 63 bytes"),
    ("n" * 64, F32, (2,), "name of 1 to 63 bytes"),
    ("\ud800", F32, (2,), "name of 1 to 63 bytes"),
    ("s", F32, (1, 1, 1, 1, 1), "tensor 's' of shape .* cannot be stored as F32"),
    ("s", F32, (2, 0), r"tensor 's' of shape \(2, 0\) cannot be stored as F32"),
    ("s", F32, (-1,), r"tensor 's' of shape \(-1,\) cannot be stored as F32"),
    ("s", Q4_0, (), r"tensor 's' of shape \(\) cannot be stored as Q4_0"),
    ("s", Q4_0, (33,), "tensor 's': Q4_0 needs rows that are a multiple of 32 elements, got 33"),
    ("w", F32, (2,), "tensor 'w' is declared twice"),
]


@pytest.mark.parametrize(("name", "form", "shape", "reason"), REFUSED_DECLARATIONS)
def test_refused_declarations(tmp_path: Path, name: str, form: Format, shape: tuple[int, ...], reason: str) -> None:
    writer = GgufWriter(tmp_path / "w.gguf", {})
    writer.declare("w", F32, (2,))
    with pytest.raises(FormatError, match=reason):
        writer.declare(name, form, shape)
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_format_that_gguf_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "w.gguf"
    with GgufWriter(path, {}) as writer, pytest.raises(UnsupportedError, match="tensor 's': GGUF has no type F8_E4M3"):
        writer.declare("s", SAFETENSORS_FORMATS["F8_E4M3"], (2,))


ONES = np.ones(2, np.float32)
REFUSED_WRITES = [
    ("c", ONES, FormatError, "tensor 'c' was never declared"),
    ("b", ONES, FormatError, "tensor 'b' is out of order: it is the turn of 'a'"),
    ("a", ONES[:, None], FormatError, r"tensor 'a' was declared F32 \(2,\), got F32 \(2, 1\)"),
    ("a", ONES.astype(np.float16), FormatError, r"tensor 'a' was declared F32 \(2,\), got F16 \(2,\)"),
    ("a", random_tensor("Q4_0"), FormatError, r"tensor 'a' was declared F32 \(2,\), got Q4_0 \(3, 64\)"),
    ("a", ONES.astype(np.complex64), UnsupportedError, "tensor 'a': arrays of dtype complex64"),
    ("a", ONES.astype(">f4"), UnsupportedError, "tensor 'a': arrays of dtype >f4"),
]


@pytest.mark.parametrize(("name", "tensor", "error", "reason"), REFUSED_WRITES)
def test_refused_writes(tmp_path: Path, name: str, tensor: np.ndarray, error: type[Exception], reason: str) -> None:
    writer = GgufWriter(tmp_path / "w.gguf", {})
    writer.declare("a", F32, (2,))
    writer.declare("b", Q4_0, (1, 32))
    with pytest.raises(error, match=reason):
        writer.write(name, tensor)
    with pytest.raises(FormatError, match="tensor 'c' is declared after the first tensor was written"):
        writer.declare("c", F32, (2,))
    with pytest.raises(FormatError, match="2 declared tensors were never written, the first is 'a'"):
        writer.close()
    assert list(tmp_path.iterdir()) == []


def test_tensor_written_twice(tmp_path: Path) -> None:
    with GgufWriter(tmp_path / "w.gguf", {}) as writer:
        writer.declare("a", F32, (1,))
        writer.write("a", np.ones(1, np.float32))
        with pytest.raises(FormatError, match="tensor 'a' is out of order: all tensors are written"):
            writer.write("a", np.ones(1, np.float32))
        writer.close()  # the end of the block then has nothing to do
    assert GgufCheckpoint(tmp_path / "w.gguf").read("a").tolist() == [1]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_nothing_is_left_after_an_exception(tmp_path: Path, failure: type[BaseException]) -> None:
    old = tmp_path / "old.gguf"
    old.write_bytes(b"the truth")

    def write() -> None:
        with GgufWriter(old, {}) as writer:
            writer.declare("a", F32, (2,))
            writer.declare("b", F32, (2,))
            writer.write("a", np.ones(2, np.float32))
            assert len(list(tmp_path.iterdir())) == 2
            raise failure

    with pytest.raises(failure):
        write()
    assert list(tmp_path.iterdir()) == [old]
    assert old.read_bytes() == b"the truth"


def test_disk_full_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, written = os.write, []

    def filling(descriptor: int, data: memoryview) -> int:
        if sum(written) + len(data) > 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(len(data))
        return original(descriptor, data)

    monkeypatch.setattr(os, "write", filling)
    tensors = dict.fromkeys("abc", np.ones(1000, np.float32))
    with pytest.raises(OutputError, match=r"w\.gguf: no space left on this disk"):
        write_one(tmp_path / "w.gguf", {}, tensors)
    assert list(tmp_path.iterdir()) == []
    assert written


def test_disk_too_small_is_said_before_writing(tmp_path: Path) -> None:
    writer = GgufWriter(tmp_path / "w.gguf", {})
    writer.declare("huge", F32, (2**20, 2**30))
    with pytest.raises(OutputError, match=r"w\.gguf: needs \d+ bytes, \d+ are free"):
        writer.write("huge", np.ones(1, np.float32))
    writer.abort()
    assert list(tmp_path.iterdir()) == []

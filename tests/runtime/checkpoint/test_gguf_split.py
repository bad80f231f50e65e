"""GGUF models in several files: read as one, written all or none, merged again."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from llmctl.errors import FormatError, ModelNotFoundError, OutputError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_split import SplitGgufWriter, shard_paths

TENSORS = {f"blk.{i}.ffn_up.weight": np.full((4, 32), i, np.float32) for i in range(5)}  # 512 bytes each
METADATA = {"general.architecture": "llama", "general.name": "split"}


def write(path: Path, limit: int | None, metadata: dict[str, object] = METADATA) -> list[Path]:
    with SplitGgufWriter(path, metadata, limit) as writer:
        for name, tensor in TENSORS.items():
            writer.declare(name, FORMATS["F32"], tensor.shape)
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
    return writer.paths


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_any_file_opens_the_whole(tmp_path: Path) -> None:
    paths = write(tmp_path / "m.gguf", 1100)
    assert names(tmp_path) == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)] == [path.name for path in paths]
    for path in paths:
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.names() == list(TENSORS)
            for name, tensor in TENSORS.items():
                assert checkpoint.read(name).tobytes() == tensor.tobytes()
            assert checkpoint.metadata["general.name"] == "split"
            assert "split.count" not in checkpoint.typed_metadata()


def test_keys_are_those_of_llama_cpp(tmp_path: Path) -> None:
    for index, path in enumerate(write(tmp_path / "m.gguf", 1100)):
        fields = gguf.GGUFReader(path).fields
        assert [fields[f"split.{key}"].contents() for key in ("no", "count", "tensors.count")] == [index, 3, 5]
        types = [fields[f"split.{key}"].types[0].name for key in ("no", "count", "tensors.count")]
        assert types == ["UINT16", "UINT16", "INT32"]
        assert ("general.name" in fields) == (index == 0)


def test_one_file_has_no_number(tmp_path: Path) -> None:
    assert write(tmp_path / "a.gguf", None) == [tmp_path / "a.gguf"]
    assert write(tmp_path / "b.gguf", 10**9) == [tmp_path / "b.gguf"]
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_every_file_keeps_the_alignment(tmp_path: Path) -> None:
    paths = write(tmp_path / "m.gguf", 600, {**METADATA, "general.alignment": 64})
    assert len(paths) == 5
    assert all(gguf.GGUFReader(path).alignment == 64 for path in paths)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = write(tmp_path / "m.gguf", 1100)
    paths[1].unlink()
    with pytest.raises(ModelNotFoundError, match=r"m-00002-of-00003\.gguf: no such file.*part 2 of 3 of the split model"):
        open_checkpoint(paths[2])


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def stopped() -> None:
        with SplitGgufWriter(tmp_path / "m.gguf", METADATA, 600) as writer:
            for name, tensor in TENSORS.items():
                writer.declare(name, FORMATS["F32"], tensor.shape)
            writer.write("blk.0.ffn_up.weight", TENSORS["blk.0.ffn_up.weight"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert names(tmp_path) == []


def test_files_that_were_never_filled_do_not_appear(tmp_path: Path) -> None:
    def forgetful() -> None:
        with SplitGgufWriter(tmp_path / "m.gguf", METADATA, 600) as writer:
            for name, tensor in TENSORS.items():
                writer.declare(name, FORMATS["F32"], tensor.shape)
            for name, tensor in list(TENSORS.items())[1:]:
                writer.write(name, tensor)

    with pytest.raises(FormatError, match="never written"):
        forgetful()
    assert names(tmp_path) == []


def test_the_disk_must_have_room_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.runtime.checkpoint.output_file.free_bytes", lambda folder: 2000)
    with pytest.raises(OutputError, match="needs 2560 bytes, 2000 are free"):
        write(tmp_path / "m.gguf", 600)
    assert names(tmp_path) == []


def test_names_of_a_set(tmp_path: Path) -> None:
    assert [path.name for path in shard_paths(Path("a/m-00001-of-00009.gguf"), [5, 5], 5)] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    assert shard_paths(Path("a/m.gguf"), [5, 5], None) == [Path("a/m.gguf")]
    with pytest.raises(FormatError, match="65535 at most"):
        shard_paths(Path("m.gguf"), [5] * 70000, 5)

"""Names of the types of whole files."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import LlamaFileType
from safetensors.numpy import save_file

from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.file_types import FILE_TYPES, file_type
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter, Typed, ValueType


def test_the_table_is_ggufs():
    theirs = {
        t.value: t.name.removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE")
        for t in LlamaFileType
        if t.name not in ("GUESSED", "MOSTLY_Q4_1_SOME_F16")
    }
    assert {number: theirs[number] for number in FILE_TYPES if number in theirs} == {
        number: name for number, name in FILE_TYPES.items() if number in theirs
    }
    assert set(theirs) - set(FILE_TYPES) <= set(range(39, 64))  # newer than this table


@pytest.mark.parametrize(("stated", "name"), [(15, "Q4_K_M"), (7, "Q8_0"), (9999, "F16"), (None, "F16")])
def test_what_the_file_states_or_else_its_weights(tmp_path, stated, name):
    metadata = {"general.architecture": "llama"} | ({} if stated is None else {"general.file_type": Typed(stated, ValueType.U32)})
    small, large = np.ones(3, np.float32), np.ones((4, 4), np.float16)
    with GgufWriter(tmp_path / "model.gguf", metadata) as writer:
        writer.declare("small", FORMATS["F32"], small.shape)
        writer.declare("large", FORMATS["F16"], large.shape)
        writer.write("small", small)
        writer.write("large", large)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        assert file_type(checkpoint) == name


def test_safetensors_are_named_by_their_weights(tmp_path):
    save_file({"a": np.ones((4, 4), np.float16), "b": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path / "model.safetensors") as checkpoint:
        assert file_type(checkpoint) == "F16"

"""Damaged files: whatever the damage, the reader succeeds or raises one of our errors, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from llmctl.errors import LlmctlError
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter


def sound_gguf(path: Path) -> bytes:
    metadata = {"general.alignment": 8, "n": 3, "name": "tiny", "tokens": ["a", "bc", ""], "list": [1, 2], "nested": [[True]]}
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "q": QuantTensor(FORMATS["Q4_0"], (1, 32), np.zeros((1, 18), np.uint8)),
    }
    with GgufWriter(path, metadata) as writer:
        writer.declare("a", FORMATS["F32"], (2, 3))
        writer.declare("q", FORMATS["Q4_0"], (1, 32))
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    return path.read_bytes()


def sound_safetensors(path: Path) -> bytes:
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.zeros(0, np.uint8), "c": np.ones(3, np.int64)}
    return save(tensors, {"format": "pt"})


SOUND = {"m.gguf": sound_gguf, "m.safetensors": sound_safetensors}


@pytest.fixture(scope="module", params=SOUND)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    """Name and content of an undamaged file of each kind."""
    return request.param, SOUND[request.param](tmp_path_factory.mktemp("sound") / "sound")


def read_everything(path: Path) -> None:
    """What any command does with a file."""
    with open_checkpoint(path) as checkpoint:
        for value in checkpoint.metadata.values():
            if hasattr(value, "tolist"):
                value.tolist()
        for name in checkpoint.names():
            tensor = checkpoint.read(name)
            data = tensor.blocks if isinstance(tensor, QuantTensor) else tensor
            assert data.nbytes == checkpoint.entry(name).nbytes
            data.tobytes()


def outcome(path: Path) -> str:
    """ "read", or the message of the error the file is refused with; any other exception goes through."""
    try:
        read_everything(path)
    except LlmctlError as error:
        return f"{type(error).__name__}: {error}"
    return "read"


@st.composite
def damage(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with bytes changed, eight-byte numbers made extreme, pieces removed, repeated or cut off."""
    damaged = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(damaged) - 1)))
        kind = draw(st.sampled_from(["byte", "number", "remove", "repeat", "cut"]))
        span = draw(st.integers(1, 40))
        if kind == "byte":
            damaged[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            value = draw(st.sampled_from([0, 1, 255, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
            size = draw(st.sampled_from([4, 8]))
            damaged[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        elif kind == "remove":
            del damaged[at : at + span]
        elif kind == "repeat":
            damaged[at:at] = damaged[at : at + span]
        else:
            del damaged[at:]
    return bytes(damaged)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files(tmp_path: Path, sound: tuple[str, bytes], data: st.DataObject) -> None:
    path = tmp_path / sound[0]
    path.write_bytes(data.draw(damage(sound[1])))
    found = outcome(path)
    assert found == "read" or str(path) in found
    assert "\n" not in found


def test_every_byte_of_the_header_set_to_every_extreme(tmp_path: Path, sound: tuple[str, bytes]) -> None:
    name, content = sound
    path = tmp_path / name
    assert len(content) > 200
    outcomes = set()
    for at in range(len(content)):
        for value in (0x00, 0x80, 0xFF):
            path.write_bytes(content[:at] + bytes([value]) + content[at + 1 :])
            outcomes.add(outcome(path).split(":")[0])
    assert outcomes >= {"read", "FormatError"}


HOSTILE = """
import resource, sys
from pathlib import Path
from llmctl.errors import FormatError
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint import gguf, safetensors

in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + (64 << 20),) * 2)
folder = Path(sys.argv[1])
refused = 0
for path in sorted(folder.iterdir()):
    try:
        open_checkpoint(path)
    except FormatError:
        refused += 1
print(refused)
"""


def test_claims_far_above_memory_under_a_memory_limit(tmp_path: Path, raw_gguf, raw_safetensors) -> None:
    """With a limit on the address space, anything allocated by a claim (2^40 items) would be a MemoryError."""
    claims = [raw_gguf.array(item_type, 2**40, bytes(64)) for item_type in (0, 4, 8, 9, 10)]
    files = [raw_gguf.build([raw_gguf.key("k", 9, claim)]) for claim in claims]
    files.append(raw_gguf.build([raw_gguf.key("k", 8, (2**40).to_bytes(8, "little"))]))
    files.append(raw_gguf.build([], [raw_gguf.tensor("w", [2**40])], bytes(64)))
    files.append(raw_gguf.build(num_keys=2**40))
    files.append(raw_gguf.build(num_tensors=2**40))
    files.append(raw_safetensors({"w": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}, bytes(64)))
    for number, content in enumerate(files):
        (tmp_path / f"{number}.safetensors").write_bytes(content)
    result = subprocess.run([sys.executable, "-c", HOSTILE, tmp_path], capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == (f"{len(files)}\n", "")

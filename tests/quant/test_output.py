"""The file appears whole, at a name that was free, or not at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.errors import OutputError
from llmctl.quant.convert import Written, make_plan, output_path, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.runtime.checkpoint import open_checkpoint

Convert = Callable[..., Written]


@pytest.fixture
def folder(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


def test_the_conventional_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(open_source(folder), recipe_by_name("Q4_0"))
    size = plan.source.metadata["general.size_label"]
    monkeypatch.chdir(tmp_path)
    assert output_path(plan, None) == Path(f"tiny-llama-{size}-Q4_0.gguf")
    assert output_path(plan, tmp_path) == tmp_path / f"tiny-llama-{size}-Q4_0.gguf"
    assert output_path(plan, Path("x.gguf")) == Path("x.gguf")
    kept = make_plan(open_source(folder), None)
    assert output_path(kept, None).name == f"tiny-llama-{size}-F32.gguf"


def test_an_existing_file_is_kept_unless_forced(folder: Path, tmp_path: Path) -> None:
    plan, taken = make_plan(open_source(folder), None), tmp_path / "taken.gguf"
    taken.write_text("precious")
    dangling = tmp_path / "dangling.gguf"
    dangling.symlink_to(tmp_path / "nowhere")
    for path in (taken, dangling):
        with pytest.raises(OutputError, match="exists already; --force replaces it"):
            output_path(plan, path)
        assert output_path(plan, path, force=True) == path
    assert taken.read_text() == "precious"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("by", ["path", "symlink", "hard link"])
def test_no_file_of_the_source_is_replaced(folder: Path, tmp_path: Path, name: str, by: str) -> None:
    plan, target = make_plan(open_source(folder), None), folder / name
    if by != "path":
        target = tmp_path / "other"
        target.symlink_to(folder / name) if by == "symlink" else target.hardlink_to(folder / name)
    with pytest.raises(OutputError, match="the output is the same file as the input"):
        output_path(plan, target, force=True)


def test_a_gguf_is_not_written_over_itself(folder: Path, convert: Convert, tmp_path: Path) -> None:
    source = convert(folder, tmp_path / "a.gguf").output
    before = source.read_bytes()
    with pytest.raises(OutputError, match="the output is the same file as the input"):
        output_path(make_plan(open_source(source), recipe_by_name("Q8_0")), source, force=True)
    assert source.read_bytes() == before


def test_beside_the_source_is_fine(tiny: Callable[..., Path], changed: Callable[..., Path]) -> None:
    folder = changed("llama")
    plan = make_plan(open_source(folder), recipe_by_name("F16"))
    written = write(plan, output_path(plan, folder))
    assert open_checkpoint(written.output).metadata["general.file_type"] == 1
    again = make_plan(open_source(folder), recipe_by_name("F16"))
    assert output_path(again, folder, force=True) == written.output, "a GGUF file there is no part of the source"


def test_a_full_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, real, left = make_plan(open_source(folder), None), os.write, [300_000]

    def write_until_full(descriptor: int, data: memoryview) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(data)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write_until_full)
    with pytest.raises(OutputError, match=r"out\.gguf: no space left on this disk"):
        write(plan, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_half_way(folder: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(make_plan(open_source(folder), None), tmp_path / "out.gguf", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


SLOWLY = """
import sys, time
from pathlib import Path
from llmctl.quant.convert import make_plan, write
from llmctl.quant.source import open_source

def wait(done, total):
    if done > total // 2:
        print("half", flush=True)
        time.sleep(60)

write(make_plan(open_source(Path(sys.argv[1])), None), Path(sys.argv[2]), progress=wait)
"""


def test_killed_half_way_and_run_again(folder: Path, convert: Convert, tmp_path: Path) -> None:
    output = tmp_path / "out.gguf"
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, folder, output], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    assert [path.name for path in tmp_path.iterdir()] == [".out.gguf.partial"], "what the next run takes over"
    convert(folder, output)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    assert open_checkpoint(output).metadata["general.architecture"] == "llama"


def test_progress_ends_at_the_total(folder: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    plan = make_plan(open_source(folder), recipe_by_name("Q8_0"))
    write(plan, tmp_path / "out.gguf", progress=lambda *call: calls.append(call))
    assert len(calls) == len(plan.tensors)
    assert calls == sorted(calls)
    assert calls[-1] == (sum(tensor.nbytes for tensor in plan.tensors),) * 2

"""Output appears complete or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.errors import OutputError
from llmctl.runtime.checkpoint.output_file import OutputFile, refuse_same_file


def test_content_appears_at_commit(tmp_path: Path) -> None:
    path = tmp_path / "modèle ü.gguf"
    output = OutputFile(path)
    output.write(b"one ")
    output.write(memoryview(b"two"))
    assert output.position == 7
    assert not path.exists()
    output.commit()
    assert path.read_bytes() == b"one two"
    assert list(tmp_path.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
    output.abort()  # too late to do harm
    assert path.exists()
    with pytest.raises(ValueError, match="already closed"):
        output.write(b"x")


def test_abort_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    output = OutputFile(path)
    output.write(b"new")
    output.abort()
    output.abort()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: original(descriptor, data[:3]))
    output = OutputFile(tmp_path / "f")
    output.write(b"0123456789")
    output.commit()
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_killed_run_is_followed_by_a_clean_one(tmp_path: Path) -> None:
    path = tmp_path / "f"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from llmctl.runtime.checkpoint.output_file import OutputFile\n"
        "output = OutputFile(Path(sys.argv[1])); output.write(b'half of a long file'); print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        with pytest.raises(OutputError, match="f: another process is writing this file"):
            OutputFile(path)
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    output = OutputFile(path)
    output.write(b"whole")
    output.commit()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_lock_won_on_a_file_that_was_renamed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other writer finishes between our open and our lock: its result must not be emptied."""
    path = tmp_path / "f"
    other = OutputFile(path)
    other.write(b"the other's result")
    original, opened = os.open, []

    def racing(name: Path, *args: int) -> int:
        descriptor = original(name, *args)
        if not opened:
            opened.append(name)
            other.commit()
        return descriptor

    monkeypatch.setattr(os, "open", racing)
    ours = OutputFile(path)
    assert path.read_bytes() == b"the other's result"
    ours.write(b"ours")
    ours.commit()
    assert path.read_bytes() == b"ours"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    """Whoever writes for an hour was not asked whether to replace what came in that hour."""
    path = tmp_path / "f"
    output = OutputFile(path)
    output.write(b"ours")
    path.write_bytes(b"theirs")
    with pytest.raises(OutputError, match="a file of this name has appeared while it was written; it is kept"):
        output.commit()
    assert path.read_bytes() == b"theirs"
    assert list(tmp_path.iterdir()) == [path]


def test_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "f", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    output = OutputFile(link)
    output.write(b"new")
    output.commit()
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_temporary_name_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".f.partial").symlink_to(victim)
    with pytest.raises(OutputError, match="f: cannot be written"):
        OutputFile(tmp_path / "f")
    assert victim.read_bytes() == b"precious"


def test_places_that_cannot_hold_a_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"missing/f: the folder .*missing does not exist"):
        OutputFile(tmp_path / "missing" / "f")
    with pytest.raises(OutputError, match="the output must be a file, this is a folder"):
        OutputFile(tmp_path)
    with pytest.raises(OutputError, match="the output must be a file, this is a device"):
        OutputFile(Path(os.devnull))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file/f: cannot be written: Not a directory"):
        OutputFile(tmp_path / "file" / "f")


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder nobody may write to, as a user whom that stops (root is not stopped by it)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o700)


def test_read_only_folder(read_only_folder: Path) -> None:
    with pytest.raises(OutputError, match=r"f: the folder .* cannot be written to \(Permission denied\)"):
        OutputFile(read_only_folder / "f")


def test_output_that_is_the_input(tmp_path: Path) -> None:
    source, other, link = tmp_path / "a", tmp_path / "b", tmp_path / "link"
    source.write_bytes(b"x")
    other.write_bytes(b"x")
    link.symlink_to(source)
    (tmp_path / "hard").hardlink_to(source)
    refuse_same_file([source], other)
    refuse_same_file([source], tmp_path / "new")
    for output in (source, link, tmp_path / "hard", tmp_path / ".." / tmp_path.name / "a"):
        with pytest.raises(OutputError, match="the output is the same file as the input"):
            refuse_same_file([other, source], output)


def test_a_file_that_is_gone_on_with_keeps_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    first = OutputFile(path, resume=True)
    assert first.kept == b""
    first.write(b"one\ntw")
    first.suspend()
    first.suspend()
    assert not path.exists()
    second = OutputFile(path, resume=True)
    assert second.kept == b"one\ntw"
    with pytest.raises(OutputError, match="another process"):
        OutputFile(path, resume=True)
    second.cut(4)
    second.write(b"two\n")
    second.commit()
    assert path.read_bytes() == b"one\ntwo\n"
    assert [file.name for file in tmp_path.iterdir()] == ["lines"]


def test_a_new_file_forgets_what_was_left(tmp_path: Path) -> None:
    left = OutputFile(tmp_path / "file", resume=True)
    left.write(b"old and long")
    left.suspend()
    new = OutputFile(tmp_path / "file")
    new.write(b"new")
    new.commit()
    assert (tmp_path / "file").read_bytes() == b"new"

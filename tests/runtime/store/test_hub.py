"""Models of the hub: huggingface_hub itself, talking to a hub of our own on loopback."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from llmctl.errors import ModelNotFoundError
from llmctl.runtime.store.hub import HubFile, choose_files

GGUF = b"GGUF" + bytes(range(256)) * 64
FOLDER = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "tokenizer.model": b"\x0a",
    "chat_template.jinja": b"{{ messages }}",
    "model-00001-of-00002.safetensors": b"first",
    "model-00002-of-00002.safetensors": b"second",
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"a pickle",
    "onnx/model.onnx": b"another copy",
    "onnx/config.json": b"{}",
}
Repository = Callable[..., None]
Pull = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def pull(home: Path, server: object, tmp_path: Path, llmctl: Callable[..., object]) -> Pull:
    """llmctl models … against our hub; in a process of its own, since huggingface_hub reads its settings at import."""
    settings = {
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    return lambda *arguments, **env: llmctl("models", *arguments, env={**settings, **env})


def test_a_gguf_is_chosen_by_type_and_kept_in_the_hubs_cache(
    pull: Pull, repository: Repository, tmp_path: Path
) -> None:
    repository(
        "owner/tiny-GGUF", {"tiny.Q8_0.gguf": GGUF + b"8", "tiny.Q4_K_M.gguf": GGUF, "README.md": b""}, "apache-2.0"
    )
    done = pull("pull", "hf:owner/tiny-GGUF:q4_k")
    assert (done.returncode, done.stderr) == (0, "Pulling hf:owner/tiny-GGUF: tiny.Q4_K_M.gguf (16.4 kB)\n")
    path = Path(done.stdout.rstrip("\n"))
    assert path.read_bytes() == GGUF
    assert path.is_relative_to(tmp_path / "hf")
    listed = json.loads(pull("list", "--json").stdout)["models"]
    assert [(m["name"], m["license"], m["size"], m["sha256"]) for m in listed] == [
        ("owner/tiny-GGUF:q4_k", "apache-2.0", len(GGUF), hashlib.sha256(GGUF).hexdigest())
    ]
    assert listed[0]["source"].startswith("hf:owner/tiny-GGUF:q4_k@")


def test_a_folder_brings_weights_config_and_tokenizer_but_no_pickle(pull: Pull, repository: Repository) -> None:
    repository("owner/tiny", FOLDER)
    done = pull("pull", "hf:owner/tiny")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.rstrip("\n"))
    unwanted = {"consolidated.safetensors", "pytorch_model.bin", "onnx/model.onnx", "onnx/config.json"}
    brought = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert brought == set(FOLDER) - unwanted


def test_what_was_pulled_is_used_without_the_network(pull: Pull, repository: Repository, server: object) -> None:
    repository("owner/tiny-GGUF", {"tiny.Q4_0.gguf": GGUF})
    first = pull("pull", "hf:owner/tiny-GGUF")
    assert first.returncode == 0, first.stderr
    before = len(server.requests)
    assert pull("pull", "hf:owner/tiny-GGUF").stdout == first.stdout
    assert pull("pull", "--force", "hf:owner/tiny-GGUF", HF_HUB_OFFLINE="1").stdout == first.stdout
    assert len(server.requests) == before


def test_the_token_is_sent(pull: Pull, repository: Repository, server: object) -> None:
    repository("owner/tiny-GGUF", {"tiny.Q4_0.gguf": GGUF})
    assert pull("pull", "hf:owner/tiny-GGUF", HF_TOKEN="hf_secret").returncode == 0
    assert "Bearer hf_secret" in server.authorizations


def test_bytes_that_differ_from_the_hubs_sha256_are_removed(
    pull: Pull, repository: Repository, server: object, tmp_path: Path
) -> None:
    repository("owner/tiny-GGUF", {"tiny.Q4_0.gguf": GGUF})
    path = next(path for path in server.pages if path.endswith("/tiny.Q4_0.gguf"))
    status, headers, body = server.pages[path]
    server.page(path, body[:-1] + b"?", status, **headers)
    done = pull("pull", "hf:owner/tiny-GGUF")
    assert (done.returncode, done.stdout) == (1, "")
    assert "tiny.Q4_0.gguf arrived with other bytes than the hub states; it was removed" in done.stderr
    assert not [blob for blob in (tmp_path / "hf").rglob("*") if blob.is_file() and blob.read_bytes()[:4] == b"GGUF"]


def answer(server: object, repo: str, status: int, code: str) -> None:
    """Make the hub refuse a repository as the real one does."""
    for suffix in ("", "/revision/main"):
        server.page(f"/api/models/{repo}{suffix}", b"{}", status, **{"X-Error-Code": code, "X-Error-Message": code})


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "no such repository, or a private one that needs HF_TOKEN"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (418, "Teapot", "cannot be fetched: HfHubHTTPError"),
    ],
)
def test_what_the_hub_refuses_is_told_in_one_line(
    pull: Pull, server: object, status: int, code: str, message: str
) -> None:
    answer(server, "owner/model", status, code)
    done = pull("pull", "hf:owner/model")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("llmctl: error: hf:owner/model")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_offline_and_unreachable_are_told_apart(pull: Pull) -> None:
    offline = pull("pull", "hf:owner/model", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids to fetch it" in offline.stderr
    lost = pull("pull", "hf:owner/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert lost.returncode == 1
    assert "hf:owner/model cannot be fetched" in lost.stderr
    assert lost.stderr.count("\n") == 1


def names(repo_files: list[str], selector: str | None) -> list[str]:
    return [file.name for file in choose_files("o/n", [HubFile(name, 1, None) for name in repo_files], selector)]


def test_choice_of_files() -> None:
    shards = ["big-Q4_K_M-00001-of-00002.gguf", "big-Q4_K_M-00002-of-00002.gguf"]
    assert names([*reversed(shards), "big-Q8_0.gguf"], "Q4_K_M") == shards
    assert names([*shards, "big-Q8_0.gguf"], None) == shards
    assert names([*shards, "big-Q8_0.gguf"], shards[1]) == shards
    assert names(["x-f16.gguf", "x-bf16.gguf"], "F16") == ["x-f16.gguf"]
    assert names(["x.gguf", "mmproj-x.gguf"], None) == ["x.gguf"]
    assert names(["IQ4_XS/x-IQ4_XS.gguf", "x-Q4_K_S.gguf"], "iq4_xs") == ["IQ4_XS/x-IQ4_XS.gguf"]
    assert names(["a.safetensors", "config.json"], "a.safetensors") == ["a.safetensors", "config.json"]


@pytest.mark.parametrize(
    ("files", "selector", "message"),
    [
        (["x-Q8_0.gguf", "x-Q6_K.gguf"], None, "has no file or type Q4_K_M; it has x-Q6_K, x-Q8_0"),
        (["x-Q8_0.gguf"], "Q4_K", "has no file or type Q4_K; it has x-Q8_0"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several files are Q8_0, name one: a-Q8_0, b-Q8_0"),
        (["pytorch_model.bin", "README.md"], None, "it has no model files"),
        ([], None, "it has no model files"),
    ],
)
def test_no_choice_is_guessed(files: list[str], selector: str | None, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        names(files, selector)


def test_removing_leaves_the_shared_cache_alone(pull: Pull, repository: Repository) -> None:
    repository("owner/tiny-GGUF", {"tiny.Q4_0.gguf": GGUF})
    path = Path(pull("pull", "hf:owner/tiny-GGUF").stdout.rstrip("\n"))
    done = pull("rm", "hf:owner/tiny-GGUF")
    assert done.returncode == 0
    assert f"stay in the Hugging Face cache, which others share: {path}" in done.stderr
    assert path.exists()
    assert json.loads(pull("list", "--json").stdout)["models"] == []

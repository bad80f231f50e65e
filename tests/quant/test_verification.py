"""What a verification finds in a model: nothing in a sound one, every fault of a damaged one, each by its name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_packed_model import Choices, make_packed_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, OutputError
from llmctl.quant import manifest as manifests
from llmctl.quant.compare import compare
from llmctl.quant.convert import Written
from llmctl.quant.verify import Report, verify
from llmctl.quant.workers import Workers
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter

UP = "model.layers.1.mlp.up_proj.weight"
Convert = Callable[..., Written]


@pytest.fixture
def gguf(tiny: Callable[..., Path], convert: Convert, tmp_path: Path) -> Path:
    """A small model that may be damaged."""
    return convert(tiny("llama"), tmp_path / "m.gguf", "Q4_0").output


def statuses(report: Report) -> dict[str, str]:
    return {check.name: check.status for check in report.checks}


def messages(report: Report, check: str) -> list[str]:
    return [f"{f.level}: {f.tensor or ''}: {f.message}" for f in report.findings if f.check == check]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], *, without: str | None = None) -> Path:
    """The GGUF file again with other metadata, or without a tensor."""
    output = path.with_name("changed.gguf")
    with open_checkpoint(path) as checkpoint:
        metadata = checkpoint.typed_metadata()
        change(metadata)
        entries = [entry for entry in checkpoint.entries() if entry.name != without]
        with GgufWriter(output, metadata) as writer:
            for entry in entries:
                writer.declare(entry.name, entry.format, entry.shape)
            for entry in entries:
                writer.write(entry.name, checkpoint.read(entry.name))
    return output


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("type_name", ["auto", "F16", "Q4_1"])
@pytest.mark.parametrize("threads", [1, 2])
def test_what_we_convert_is_sound(
    tiny: Callable[..., Path], convert: Convert, tmp_path: Path, family: str, type_name: str, threads: int
) -> None:
    for path in (tiny(family), convert(tiny(family), tmp_path / "m.gguf", type_name).output):
        report = verify(path, threads=threads)
        assert report.findings == []
        assert statuses(report) == dict.fromkeys(("structure", "values", "groups", "model", "tokenizer"), "ok") | {
            "manifest": "skipped"
        }
        assert report.ok


def test_a_broken_structure_is_a_finding_and_ends_it(gguf: Path) -> None:
    whole = gguf.read_bytes()
    gguf.write_bytes(whole[:-1])
    report = verify(gguf)
    assert (report.ok, statuses(report)) == (False, {"structure": "error"})
    assert messages(report, "structure")[0].startswith(
        f"error: : truncated or inconsistent: file is {len(whole) - 1} bytes, needs {len(whole)}"
    )


def test_what_a_file_may_have_and_should_not(gguf: Path, tmp_path: Path) -> None:
    gguf.write_bytes(gguf.read_bytes() + bytes(100))
    report = verify(gguf)
    assert report.ok
    assert messages(report, "structure")[0].startswith("warning: : 'm.gguf': ")
    assert "bytes behind the last tensor belong to none" in messages(report, "structure")[0]
    name = b"w" * 64
    info = len(name).to_bytes(8, "little") + name + struct.pack("<IQIQ", 1, 1, 0, 0)
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    (tmp_path / "long.gguf").write_bytes(content + bytes(-len(content) % 32) + struct.pack("<f", 1))
    assert "longer than the 63 bytes" in messages(verify(tmp_path / "long.gguf"), "structure")[0]


def test_all_faults_are_found_in_one_run(changed: Callable[..., Path]) -> None:
    """A NaN, an infinity, a missing tensor: no fault hides another."""
    folder = changed("llama")
    weights = load_file(folder / "model.safetensors")
    weights[UP][3, 4] = np.nan
    weights["model.norm.weight"][0] = np.inf
    del weights["model.layers.0.mlp.gate_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    report = verify(folder)
    assert messages(report, "values") == [
        f"error: {UP}: F32: 1 of 15360 numbers are NaN or infinite, the first in row 3, column 4",
        "error: model.norm.weight: F32: 1 of 96 numbers are NaN or infinite, the first in row 0, column 0",
    ]
    assert messages(report, "model") == ["error: : tensor 'model.layers.0.mlp.gate_proj.weight' is missing"]


def test_tensors_that_do_not_fit_the_config(changed: Callable[..., Path]) -> None:
    folder = changed("llama", {UP: np.ones((96, 160), np.float32)})
    assert "has shape (96, 160), the config asks for (160, 96)" in messages(verify(folder), "model")[0]


@pytest.mark.parametrize("key", ["llama.block_count", "llama.attention.head_count", "llama.embedding_length"])
def test_a_key_the_architecture_needs(gguf: Path, key: str) -> None:
    report = verify(rewrite(gguf, lambda metadata: metadata.pop(key)))
    assert messages(report, "model") == [f"error: : metadata key '{key}' must be a number, found nothing"]


def test_a_tensor_that_the_architecture_does_not_know(gguf: Path) -> None:
    """It may be a needed one under a wrong name: nobody can run such a file."""
    data = gguf.read_bytes()
    gguf.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_X.weight", 1))
    assert messages(verify(gguf), "model") == ["error: : tensor 'blk.1.attn_X.weight' has no place in a llama model"]


def test_an_architecture_that_is_not_known(gguf: Path) -> None:
    """What all have in common is checked all the same, and what was not is said."""
    report = verify(rewrite(gguf, lambda metadata: metadata.update({"general.architecture": "mamba"})))
    found = messages(report, "model")
    assert found[0].startswith("warning: : not checked against its architecture: general.architecture 'mamba'")
    assert found[1:] == [
        f"error: : metadata key 'mamba.{key}' is missing" for key in ("block_count", "context_length", "embedding_length")
    ]

    def known(metadata: dict[str, Any]) -> None:
        keys = ("context_length", "embedding_length")
        metadata |= {"general.architecture": "mamba", "mamba.block_count": 4, **{f"mamba.{key}": 8 for key in keys}}

    found = messages(verify(rewrite(gguf, known)), "model")
    assert found[1:] == ["error: : mamba.block_count is 4, but there are tensors of 3 layers"]


def test_more_tokens_than_rows(gguf: Path) -> None:
    """Tokens without a row of the embedding: a prompt that has one cannot be run."""

    def add_tokens(metadata: dict[str, Any]) -> None:
        tokens = list(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.tokens"] = [*tokens, "surplus", "more"]
        metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], np.int32([1, 1]))

    report = verify(rewrite(gguf, add_tokens))
    assert messages(report, "tokenizer") == [
        "error: : 386 tokens, but 384 rows of embedding; the first surplus token is 'surplus' (id 384)"
    ]


def test_fewer_tokens_than_rows(gguf: Path) -> None:
    """We read such a file; llama.cpp does not."""

    def cut(metadata: dict[str, Any]) -> None:
        for key in ("tokens", "token_type"):
            metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"][:380]
        merges, left = metadata["tokenizer.ggml.merges"], set(metadata["tokenizer.ggml.tokens"])
        metadata["tokenizer.ggml.merges"] = [pair for pair in merges if pair.replace(" ", "") in left]

    report = verify(rewrite(gguf, cut))
    assert report.ok
    assert messages(report, "tokenizer")[0].startswith("warning: : 380 tokens, but 384 rows of embedding: llama.cpp asks")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id"])
def test_special_tokens_that_are_none(gguf: Path, key: str) -> None:
    report = verify(rewrite(gguf, lambda metadata: metadata.update({f"tokenizer.ggml.{key}": 384})))
    assert messages(report, "tokenizer") == [f"error: : tokenizer.ggml.{key} is 384, which is none of the 384 tokens"]
    assert verify(rewrite(gguf, lambda metadata: metadata.update({f"tokenizer.ggml.{key}": 0xFFFFFFFF}))).ok


def test_packed_weights(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Codes, scales and indices of every layout are looked at; what is damaged is named."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    layouts = Choices("gptq", 4, 32, act_order=True), Choices("awq", 4, 32), Choices("compressed-tensors", 4, 64), Choices("fp8")
    for number, choices in enumerate(layouts):
        folder = make_packed_model(tiny("llama", **sizes), tmp_path / str(number), choices, values=tmp_path / f"v{number}")
        report = verify(folder, threads=2)
        assert (report.findings, report.ok) == ([], True)
        assert compare(folder, tmp_path / f"v{number}").total.max_error < 1e-6
    weights = load_file(tmp_path / "0" / "model.safetensors")
    weights["model.layers.0.self_attn.q_proj.g_idx"][7] = 4
    weights["model.layers.1.mlp.up_proj.scales"][1, 2] = np.nan
    save_file(weights, tmp_path / "0" / "model.safetensors")
    report = verify(tmp_path / "0")
    assert messages(report, "groups") == [
        "error: model.layers.0.self_attn.q_proj.g_idx: 1 of 128 entries are not in [0, 4), the first 4 at 7"
    ]
    assert messages(report, "values") == [
        "error: model.layers.1.mlp.up_proj.scales: F16: 1 of 768 numbers are NaN or infinite, the first in row 1, column 2"
    ]


def test_a_tokenizer_that_cannot_be_read(gguf: Path) -> None:
    report = verify(rewrite(gguf, lambda metadata: metadata.update({"tokenizer.ggml.token_type": np.int32([1])})))
    assert statuses(report)["tokenizer"] == "error"


@pytest.mark.parametrize("key", ["general.type", "general.architecture", "tokenizer.ggml.bos_token_id", "llama.block_count"])
@pytest.mark.parametrize("value", [np.arange(3), ["a", "b"], 0.5, True, -1])
def test_keys_of_another_type(gguf: Path, key: str, value: Any) -> None:
    """A list where a word or a number should be is a finding at most, never an exception of ours."""
    report = verify(rewrite(gguf, lambda metadata: metadata.update({key: value})))
    assert [check.name for check in report.checks][:2] == ["structure", "values"]


def test_files_that_are_no_model(gguf: Path, tmp_path: Path) -> None:
    adapter = verify(rewrite(gguf, lambda metadata: metadata.update({"general.type": "adapter"})))
    assert adapter.ok
    assert next(check.skipped for check in adapter.checks if check.name == "model") == "the file holds no model, but 'adapter'"
    save_file({"w": np.ones(4, np.float32)}, tmp_path / "w.safetensors")
    bare = verify(tmp_path / "w.safetensors")
    assert bare.ok
    assert statuses(bare) | {"model": "skipped", "tokenizer": "skipped"} == statuses(bare)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.arange(64, dtype=np.int32) // 32, None),
        (np.int32([0] * 60 + [2, 1, -1, 7]), "3 of 64 entries are not in [0, 2), the first 2 at 60"),
        (np.zeros(64, np.float32), "expected a row of whole numbers, found F32"),
    ],
)
@pytest.mark.parametrize("names", [("q.g_idx", "q.scales", (2, 8)), ("q.weight_g_idx", "q.weight_scale", (8, 2))])
def test_group_indices(tmp_path: Path, index: np.ndarray, message: str | None, names: tuple[Any, ...]) -> None:
    """An index beyond the scales reads memory that is not theirs."""
    name, scales, shape = names
    save_file({name: index, scales: np.ones(shape, np.float16)}, tmp_path / "m.safetensors")
    assert messages(verify(tmp_path / "m.safetensors"), "groups") == ([f"error: {name}: {message}"] if message else [])


def write_manifest(path: Path) -> Path:
    with open_checkpoint(path) as checkpoint:
        target = manifests.default_path(checkpoint)
        manifests.write_manifest(manifests.make_manifest(checkpoint, Workers(2)), target, checkpoint)
    return target


def test_a_manifest_names_the_tensor_that_changed(gguf: Path) -> None:
    manifest = write_manifest(gguf)
    report = verify(gguf)
    assert (report.manifest, report.ok, statuses(report)["manifest"]) == (manifest, True, "ok")
    with open_checkpoint(gguf) as checkpoint:
        entry = checkpoint.entry("blk.1.ffn_up.weight")
    content = bytearray(gguf.read_bytes())
    content[entry.offset + 5] ^= 1
    gguf.write_bytes(content)
    assert messages(verify(gguf), "manifest") == [
        "error: : file 'm.gguf' has changed",
        "error: blk.1.ffn_up.weight: its bytes have changed",
    ]


def test_a_manifest_notices_the_header_and_other_tensors(gguf: Path) -> None:
    manifest = write_manifest(gguf)
    other = rewrite(gguf, lambda metadata: metadata.update({"general.name": "other"}))
    (found,) = messages(verify(other, manifest=manifest), "manifest")
    assert found.endswith("; none of its tensors did, so it is the header")
    lacking = rewrite(gguf, lambda metadata: None, without="output.weight")
    found = messages(verify(lacking, manifest=manifest), "manifest")
    assert found[1:] == ["error: output.weight: is in the manifest, but not in the file"]


def test_a_manifest_of_a_folder_covers_what_lies_beside(changed: Callable[..., Path]) -> None:
    folder = changed("llama")
    manifest = write_manifest(folder)
    assert manifest == folder / "model.safetensors.manifest.json"
    assert set(json.loads(manifest.read_text())["files"]) >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert verify(folder).ok
    assert verify(folder / "model.safetensors").manifest == manifest
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    (folder / "new.json").write_text("{}")
    found = messages(verify(folder), "manifest")
    assert found[0] == "error: : file 'generation_config.json' is missing"
    assert found[1] == "warning: : file 'new.json' is not in the manifest"
    assert found[2].startswith("error: : file 'tokenizer.json' has changed: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "not a manifest"),
        ('{"kind": "llmctl manifest", "algorithm": "sha256", "version": 2}', "manifest version 2 is not read"),
        ('{"kind": "llmctl manifest", "algorithm": "sha256", "version": 1, "files": []}', "'files' must be an object"),
        ('{"kind": "llmctl manifest", "algorithm": "sha256", "version": 1, "files": {"a": {"sha256": 1}}}', "'files' must be"),
    ],
)
def test_files_that_are_no_manifest(gguf: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(FormatError, match=f"x.json: {message}"):
        verify(gguf, manifest=tmp_path / "x.json")


def test_a_manifest_replaces_no_file_of_the_model(changed: Callable[..., Path]) -> None:
    folder = changed("llama")
    with open_checkpoint(folder) as checkpoint, pytest.raises(OutputError, match="the output is the same file as the input"):
        manifests.write_manifest({}, folder / "config.json", checkpoint)


def test_an_interrupt_ends_the_workers() -> None:
    """One stops: the others, asked at their next slice, do too."""
    workers, rounds = Workers(2), []

    def work(item: int) -> int:
        if item == 0:
            return 0
        for number in range(1_000_000):
            rounds.append(number)
            workers.advance(1)
        return item

    results = workers.in_order(work, range(4))
    assert next(results) == 0
    with pytest.raises(KeyboardInterrupt):
        results.throw(KeyboardInterrupt())
    assert len(rounds) < 3_000_000

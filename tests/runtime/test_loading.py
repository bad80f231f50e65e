"""A checkpoint whose tensors and config disagree: refused or said, never run as something else without a word."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.errors import FormatError, UnsupportedError, UsageError
from llmctl.kernels.formats.spec import FORMATS
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter
from llmctl.runtime.engine.engine import check_prompt
from llmctl.runtime.loading import load_model, open_model, read_config

UP = "model.layers.1.mlp.up_proj.weight"
Changed = Callable[..., Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("loading") / "tiny", "llama", tokenizer="bpe")


@pytest.fixture
def changed(tiny: Path, tmp_path: Path) -> Changed:
    """A copy of the folder with other tensors (None removes one) and other config values."""

    def change(tensors: dict[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny, folder)
        weights = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({name: array for name, array in weights.items() if array is not None}, folder / "model.safetensors")
        stated = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(stated | config), "utf-8")
        return folder

    return change


@pytest.fixture
def rewritten(tiny: Path, tmp_path: Path) -> Changed:
    """The model as GGUF, tensors and metadata changed: `rewritten({name: array or None}, {key: value})`."""
    from llmctl.quant.convert import make_plan, write
    from llmctl.quant.source import open_source

    sound = write(make_plan(open_source(tiny), None), tmp_path / "sound.gguf").output

    def change(tensors: dict[str, Any] | None = None, metadata: dict[str, Any] | None = None) -> Path:
        with open_checkpoint(sound) as checkpoint:
            arrays = {name: checkpoint.read(name) for name in checkpoint.names()} | (tensors or {})
            arrays = {name: array for name, array in arrays.items() if array is not None}
            keys = checkpoint.typed_metadata() | (metadata or {})
            with GgufWriter(tmp_path / "changed.gguf", keys) as writer:
                for name, array in arrays.items():
                    writer.declare(name, FORMATS["I8" if array.dtype == np.int8 else "F32"], array.shape)
                for name, array in arrays.items():
                    writer.write(name, array)
        return tmp_path / "changed.gguf"

    return change


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({UP: None}, FormatError, "is missing"),
        ({UP: np.zeros((96, 160), np.float32)}, FormatError, "has shape"),
        ({UP: np.zeros((160, 96), np.int8)}, UnsupportedError, "holds I8 numbers"),
        ({UP.replace("weight", "bias"): np.zeros(160, np.float32)}, FormatError, r"up_proj\.bias' has no place"),
        ({f"{UP}_scale": np.array(2.0, np.float32)}, FormatError, r"weight_scale' has no place"),
        ({UP.replace("up_proj", "sub_norm"): np.ones(96, np.float32)}, FormatError, r"sub_norm\.weight' has no place"),
    ],
)
def test_tensors_that_are_not_as_the_config_says(
    changed: Changed, tensors: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(changed(tensors))


def test_tensors_of_no_layer_are_named(changed: Changed, caplog: pytest.LogCaptureFixture) -> None:
    load_model(changed({"model.layers.9.extra.weight": np.zeros((2, 2), np.float32), "ids": np.zeros(3, np.int64)}))
    assert "left out: 'ids', 'model.layers.9.extra.weight'" in caplog.text


def test_a_head_of_its_own_contradicts_tied_embeddings(changed: Changed) -> None:
    with pytest.raises(FormatError, match=r"tie_word_embeddings, but lm_head\.weight differs"):
        load_model(changed(tie_word_embeddings=True))


def test_a_copied_head_agrees_with_tied_embeddings(changed: Changed, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    embedding = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    model = load_model(changed({"lm_head.weight": embedding}, tie_word_embeddings=True))
    assert model.decoder.lm_head is model.decoder.embed_tokens
    assert not caplog.records


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_k.bias": np.zeros(64, np.float32)}, r"'blk\.1\.attn_k\.bias' has no place"),
        ({"blk.0.attn_q.weight": np.zeros((100, 96), np.float32)}, r"q_proj\.weight' has shape \(100, 96\)"),
        ({"blk.0.attn_q.weight": np.zeros(96, np.float32)}, r"q_proj\.weight' has shape \(96,\)"),
        ({"blk.2.ffn_up.weight": None}, r"layers\.2\.mlp\.up_proj\.weight' is missing"),
    ],
)
def test_gguf_tensors_that_are_not_as_the_metadata_says(rewritten: Changed, tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        load_model(rewritten(tensors))


def test_gguf_integers_are_no_weights(rewritten: Changed) -> None:
    with pytest.raises(UnsupportedError, match=r"'blk\.1\.ffn_up\.weight' holds I8 numbers"):
        load_model(rewritten({"blk.1.ffn_up.weight": np.zeros((160, 96), np.int8)}))


@pytest.mark.parametrize("value", [0, -1, 2**31 - 1, 2.5, "three", True, [1, 2], ["a"]])
def test_a_layer_count_of_any_kind_is_an_error_of_one_line(rewritten: Changed, value: Any) -> None:
    path = rewritten(metadata={"llama.block_count": value})
    for use in (open_model, read_config):
        with pytest.raises(FormatError, match=r"llama\.block_count") as caught:
            use(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [-1, 2.5, "three", [1, 2], ["a"]])
def test_an_expert_count_of_any_kind_is_an_error_of_one_line(rewritten: Changed, value: Any) -> None:
    """It is looked at before the family is known, of which it decides."""
    with pytest.raises(FormatError, match=r"llama\.expert_count"):
        open_model(rewritten(metadata={"llama.expert_count": value}))


def test_a_gguf_file_is_not_said_to_have_a_config(rewritten: Changed) -> None:
    path = rewritten(metadata={"llama.attention.head_count_kv": 5})
    with pytest.raises(FormatError, match="6 query heads cannot share 5") as caught:
        open_model(path)
    assert "config.json" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_pipe_in_a_folder_is_not_waited_for(changed: Changed, name: str) -> None:
    folder = changed()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(FormatError, match="pipe"):
        open_model(folder)


def test_end_tokens_that_are_no_ids(changed: Changed) -> None:
    folder = changed()
    (folder / "generation_config.json").write_text('{"eos_token_id": [[2]]}', "utf-8")
    with pytest.raises(FormatError, match=r"generation_config\.json.*eos_token_id"):
        load_model(folder)


def test_tokens_that_only_pad_the_vocabulary_are_never_sampled(rewritten: Changed) -> None:
    with open_checkpoint(rewritten()) as checkpoint:
        types = np.array(checkpoint.metadata["tokenizer.ggml.token_type"], dtype=np.int32)
    types[-3:] = 5
    opened = open_model(rewritten(metadata={"tokenizer.ggml.token_type": types}))
    assert opened.num_tokens == opened.config.vocab_size - 3


def without_last_rows(folder: Path, count: int) -> Path:
    """The folder with embedding and head `count` rows shorter, the tokenizer as it was."""
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            weights[name] = weights[name][:-count].copy()
    save_file(weights, folder / "model.safetensors")
    return folder


def test_a_learned_token_without_a_row_is_named(changed: Changed, tiny: Path) -> None:
    rows = json.loads((tiny / "config.json").read_text("utf-8"))["vocab_size"] - 2
    folder = without_last_rows(changed(vocab_size=rows), 2)
    with pytest.raises(FormatError, match=rf"the embedding {rows} rows; the first surplus token is '.*' \(id {rows}\)"):
        open_model(folder)


def test_an_added_token_without_a_row_runs_until_a_prompt_has_it(changed: Changed) -> None:
    """As in Gemma 3's text models, whose tokenizer knows a token for pictures."""
    folder = changed()
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text("utf-8"))
    rows = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    picture = {"id": rows, "content": "<picture>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"].append({**picture, **flags})
    file.write_text(json.dumps(tokenizer), "utf-8")
    opened = open_model(folder)
    assert (opened.tokenizer.vocab_size, opened.num_tokens) == (rows + 1, rows)
    with pytest.raises(UsageError, match=f"{rows}"):
        check_prompt(opened.tokenizer.encode("<picture>", parse_special=True), opened.config.vocab_size, 100)

"""llmctl eval on tiny models with real tokenizers, against logits computed in one go."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from make_tiny_model import make_tiny_model

from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model

TEXT = "the house stands where the river turns and the road to the town begins, " * 12


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("eval")
    return {
        "llama": make_tiny_model(folder / "llama", "llama", tokenizer="bpe"),
        "other": make_tiny_model(folder / "other", "llama", tokenizer="bpe", seed=1),
        "gemma": make_tiny_model(folder / "gemma", "gemma3", tokenizer="sentencepiece"),
        "mute": make_tiny_model(folder / "mute", "llama"),
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return file


def perplexity(model: Path, context: int, count: int) -> float:
    """By definition, every chunk in one forward pass."""
    loaded = load_model(model)
    ids = loaded.tokenizer.encode(TEXT)
    losses = []
    for start in range(0, context * count, context):
        chunk = ids[start : start + context]
        if loaded.tokenizer.add_bos:
            chunk[0] = loaded.tokenizer.bos_token_id
        logits = compute_logits(loaded, chunk)[:, : loaded.num_tokens].astype(np.float64)
        losses += [math.log(np.exp(logits[i]).sum()) - logits[i, chunk[i + 1]] for i in range(context // 2, context - 1)]
    return math.exp(np.mean(losses))


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_perplexity_is_the_definitions(call, models, text, name):
    options = ("--ctx", 32, "--chunks", 3, "--backend", "reference", "--json", "-q")
    done = call("eval", models[name], "--text", text, *options)
    assert (done.code, done.err) == (0, "")
    report = json.loads(done.out)
    assert (report["num_chunks"], report["context_length"], report["num_scored"]) == (3, 32, 3 * 15)
    assert report["perplexity"]["value"] == pytest.approx(perplexity(models[name], 32, 3), rel=1e-4)
    assert (report["against"], report["comparison"]) == (None, None)
    assert report["model"]["path"] == str(models[name])


def test_two_models_side_by_side(call, models, text):
    common = ("--text", text, "-c", 24, "--chunks", 4, "-t", 1, "-q")
    report = json.loads(call("eval", models["llama"], "--against", models["other"], *common, "--json").out)
    alone = json.loads(call("eval", models["other"], *common, "--json").out)
    assert report["comparison"]["perplexity"] == alone["perplexity"]
    assert report["comparison"]["kl"]["value"] > 0.1
    assert report["comparison"]["same_top"]["value"] < 0.9
    assert report["against"]["path"] == str(models["other"])


def test_divergence_along_a_chunk_and_from_layer_to_layer(call, models, text):
    common = ("--text", text, "-c", 24, "--chunks", 4, "-t", 1, "-q", "--json")
    report = json.loads(call("eval", models["llama"], "--against", models["other"], *common, "--layers").out)
    parts = report["positions"]
    assert (parts[0]["first"], parts[-1]["last"]) == (12, 22)
    counts = [part["last"] - part["first"] + 1 for part in parts]
    assert sum(counts) * 4 == report["num_scored"]
    mean = sum(part["kl"] * count for part, count in zip(parts, counts, strict=True)) / sum(counts)
    assert mean == pytest.approx(report["comparison"]["kl"]["value"])
    assert len(report["layer_sqnr_db"]) == load_model(models["llama"]).config.num_layers
    assert all(-20 < value < 20 for value in report["layer_sqnr_db"])
    same = json.loads(call("eval", models["llama"], "--against", models["llama"], *common, "--layers").out)
    assert set(same["layer_sqnr_db"]) == {None}  # infinite
    alone = call("eval", models["llama"], *common, "--layers")
    assert (alone.code, alone.out) == (2, "")
    assert "--layers compares two models layer by layer: --against names the other" in alone.err


def test_the_table_names_every_measure(call, models, text):
    done = call("eval", models["llama"], "--against", models["llama"], "--text", text, "-c", 24, "--chunks", 2)
    assert done.code == 0
    assert done.err.endswith(f"2 chunks of 24 tokens, 22 places counted\nThe other model is {models['llama']}\n")
    lines = dict(line.rsplit("  ", 1) for line in done.out.splitlines())
    values = {name.strip(): value for name, value in lines.items()}
    assert values["KL divergence, mean"] == "0.000000 ± 0.000000"
    assert values["same top token"] == "100.000 ± 0.000 %"
    assert values["ratio of the two"] == "1.00000 ± 0.00000"
    assert len(values) == 9


def test_another_cache_type_of_the_same_file(call, models, text):
    options = ("--text", text, "-c", 64, "--json", "-q")
    report = json.loads(call("eval", models["llama"], "--kv-type", "bf16", "--against-kv-type", "f32", *options).out)
    assert (report["model"]["kv_type"], report["against"]["kv_type"]) == ("bf16", "f32")
    assert report["model"]["path"] == report["against"]["path"]
    assert 1e-9 < report["comparison"]["kl"]["value"] < 1e-2


def test_the_text_may_come_from_stdin(call, models, text):
    from_file = call("eval", models["llama"], "--text", text, "-c", 32, "-q").out
    piped = call("eval", models["llama"], "--text", "-", "-c", 32, "-q", stdin=TEXT.encode())
    assert piped.code == 0
    assert piped.out == from_file


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--text FILE"),
        (["--text", "-"], "no text on standard input"),
        (["--text", "TEXT", "-c", "127"], "tokens, a chunk 127"),
        (["--text", "TEXT", "-c", "1000"], "1000 is more than the 128 tokens"),
        (["--text", "TEXT", "-c", "32", "--against", "GEMMA"], "different tokens"),
        (["--text", "TEXT", "-c", "32", "--against", "MUTE"], "no tokenizer"),
        (["--text", "TEXT", "--backend", "reference", "--against-activations", "float"], "has no such choice"),
    ],
)
def test_what_cannot_be_measured(call, models, text, tmp_path, arguments, message):
    short = tmp_path / "short.txt"
    short.write_text("the house")
    names = {"TEXT": short if "127" in arguments else text, "GEMMA": models["gemma"], "MUTE": models["mute"]}
    done = call("eval", models["llama"], *(names.get(a, a) for a in arguments))
    assert done.code != 0
    assert message in done.err
    assert done.out == ""


def test_what_int8_activations_cost(call, models, text, tmp_path):
    file = tmp_path / "tiny.gguf"
    assert call("quantize", models["llama"], "--bits", 8, "-o", file, "-q").code == 0
    options = ("--text", text, "-c", 64, "--backend", "native", "--kv-type", "f32", "--json", "-q")
    rounded = json.loads(call("eval", file, "--against-activations", "float", *options).out)
    assert (rounded["model"]["activations"], rounded["against"]["activations"]) == ("int8", "float")
    assert 1e-6 < rounded["comparison"]["kl"]["value"] < 0.05
    exact = json.loads(call("eval", file, "--activations", "float", "--against-backend", "reference", *options).out)
    assert exact["against"]["backend"] == "reference"
    assert exact["comparison"]["kl"]["value"] < 1e-6
    assert exact["comparison"]["same_top"]["value"] == 1

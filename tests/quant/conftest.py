"""Tiny models to convert, made once, and what the tests ask of the result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from make_tiny_model import make_tiny_model
from safetensors.numpy import load_file, save_file

from llmctl.quant.convert import Written, make_plan, write
from llmctl.quant.recipe import recipe_by_name
from llmctl.quant.source import open_source
from llmctl.runtime.engine.model_runner import compute_logits
from llmctl.runtime.loading import load_model

# GGUF has no key for the query scale and the pattern of windows: what readers know by heart, over a few layers more.
GEMMA3 = {
    "query_pre_attn_scalar": 32,
    "num_hidden_layers": 7,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
}
TOKENIZERS = {"llama": "bpe", "mistral": "bpe", "gemma3": "sentencepiece"}


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home of our own, so that no prepared tokenizer of an earlier run is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCTL_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are faster without threads, and much faster where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a tiny folder, or gives the one made before; it is not to be changed: `tiny("gemma3", rope="linear", …)`."""
    made: dict[str, Path] = {}

    def make(family: str, *, tokenizer: str | None = None, **choices: Any) -> Path:
        choices = {**(GEMMA3 if family == "gemma3" else {}), **choices}
        key = repr((family, tokenizer, sorted(choices.items(), key=str)))
        if key not in made:
            folder = tmp_path_factory.mktemp("tiny") / f"tiny-{family}"
            made[key] = make_tiny_model(folder, family, tokenizer=tokenizer or TOKENIZERS[family], **choices)
        return made[key]

    return make


@pytest.fixture
def changed(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny folder with other tensors or config values: `changed("llama", {name: array or None}, {key: value})`."""

    def change(
        family: str, tensors: dict[str, np.ndarray | None] | None = None, config: dict[str, Any] | None = None, **choices: Any
    ) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny(family, **choices), folder)
        weights = load_file(folder / "model.safetensors")
        weights |= tensors or {}
        save_file({name: np.ascontiguousarray(w) for name, w in weights.items() if w is not None}, folder / "model.safetensors")
        stated = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps(stated | (config or {})), "utf-8")
        return folder

    return change


@pytest.fixture(scope="session")
def convert() -> Callable[..., Written]:
    """Converts and returns what was written: `convert(source, output, "Q4_0", pure=…, measure=…)`."""

    def run(source: Path, output: Path, type_name: str = "auto", *, pure: bool = False, **options: Any) -> Written:
        return write(make_plan(open_source(source), recipe_by_name(type_name), pure=pure), output, **options)

    return run


@pytest.fixture(scope="session")
def logits() -> Callable[[Path], np.ndarray]:
    """Logits [T, vocab_size] of a prompt longer than the tiny models' windows and original context, in our own runtime."""
    ids = np.random.default_rng(5).integers(3, 250, 40).tolist()
    return lambda path: np.asarray(compute_logits(load_model(path), ids))

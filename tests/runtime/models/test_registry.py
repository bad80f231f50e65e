"""docs/families.md says which families there are: it must say what the registry does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from make_tiny_model import make_tiny_model, tiny_config

from llmctl.quant.convert import make_plan, write
from llmctl.quant.source import open_source
from llmctl.runtime.loading import open_model, read_config
from llmctl.runtime.models.registry import FAMILIES, family_by_model_type, family_by_name

PAGE = Path(__file__).parents[3] / "docs" / "families.md"


def rows() -> list[list[str]]:
    """The cells of the table, without its head."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_lists_the_registry() -> None:
    listed = [(name, tuple(types.split(", ")), arch) for name, types, arch, _, _ in rows()]
    assert listed == [(family.name, family.model_types, family.gguf_arch) for family in FAMILIES]
    assert all(models and apart for *_, models, apart in rows())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_name_of_a_family_finds_it(family) -> None:
    assert family_by_name(family.name) is family
    for model_type in family.model_types:
        assert family_by_model_type(model_type) is family
        assert family_by_name(model_type).name == family.name
    assert family_by_name(family.gguf_arch).gguf_arch == family.gguf_arch


@pytest.mark.parametrize(
    ("stated", "name", "expected"),
    [
        ("deepseek_v32", "deepseek_v3", "deepseek_v3"),
        ("deepseek_v2", "deepseek_v3", "deepseek_v3"),
        ("brand", "deepseek", "deepseek_v2"),
        ("deepseek_v3", "deepseek", "deepseek_v3"),
        ("brand", "mistral", "mistral"),
        ("mistral", "llama", "mistral"),
    ],
)
def test_a_model_type_of_a_family_is_more_than_the_family(tmp_path: Path, stated: str, name: str, expected: str) -> None:
    """Mistral has a window and Llama none, V3 scores by sigmoids and V2 by softmax: nothing else would say that it went wrong."""
    config = tmp_path / "config.json"
    values = tiny_config(expected).to_dict() | {"topk_method": "noaux_tc" if expected == "deepseek_v3" else "greedy"}
    config.write_text(json.dumps(values | {"model_type": stated}), "utf-8")
    assert read_config(config, name) == family_by_model_type(expected).read_config(values)


def test_weights_are_read_as_the_model_type_that_was_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "mistral", tokenizer="bpe")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "brand"}), "utf-8")
    windows = {name: open_model(folder, family=name).config.layers[0].sliding_window for name in ("mistral", "llama")}
    assert windows == {"mistral": 8, "llama": None}


def test_a_gguf_file_has_no_model_type(tmp_path: Path) -> None:
    """What it does not say, such as a window, it has not."""
    folder = make_tiny_model(tmp_path / "model", "llama", tokenizer="bpe")
    file = write(make_plan(open_source(folder), None), tmp_path / "model.gguf").output
    assert open_model(file, family="mistral").config == open_model(file).config

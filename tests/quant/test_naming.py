"""What models and files are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.errors import FormatError
from llmctl.quant.model_card import describe_folder, model_card
from llmctl.quant.naming import ModelName, file_name, parse_name, size_label


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("smollm2-135m-fp16", 134e6, ModelName("Smollm2 135m Fp16", "smollm2", "135M")),
        (
            "meta-llama/Llama-3.2-1B-Instruct",
            1.24e9,
            ModelName("Llama 3.2 1B Instruct", "Llama-3.2", "1B", "Instruct", None, "meta-llama"),
        ),
        ("Mistral-7B-Instruct-v0.3", 7.2e9, ModelName("Mistral 7B Instruct v0.3", "Mistral", "7B", "Instruct", "v0.3")),
        ("gemma-3-270m-it", 268e6, ModelName("Gemma 3 270m It", "gemma-3", "270M", "it")),
        ("Yi-6B-200K", 6e9, ModelName("Yi 6B 200K", "Yi", "6B", "200K")),
        ("phi-3-mini-4k-instruct", 3.8e9, ModelName("Phi 3 Mini 4k Instruct", "phi-3-mini-4k", None, "instruct")),
        ("Mixtral-8x7B-v0.1", 46.7e9, ModelName("Mixtral 8x7B v0.1", "Mixtral", "8x7B", None, "v0.1")),
        ("A name with 7B blanks", 7e9, ModelName("A name with 7B blanks")),
        ("model", 1, ModelName("Model", "model")),
    ],
)
def test_parts_of_a_name(text: str, count: float, expected: ModelName) -> None:
    assert parse_name(text, int(count)) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1_235_814_400, "1.2B"), (134_515_008, "135M"), (20_311, "20K"), (9_660_000_000, "10B"), (70.6e9, "71B"), (1.5e12, "1.5T")],
)
def test_size_labels(count: float, expected: str) -> None:
    assert size_label(int(count)) == expected


def test_a_folder_is_called_after_what_says_most(tmp_path: Path) -> None:
    folder = tmp_path / "local-7B"
    folder.mkdir()
    card = "---\nlicense: apache-2.0\nlanguage: en\ntags:\n- chat\n- 7\n---\n# Title\n"
    (folder / "README.md").write_text(card, "utf-8")
    assert describe_folder(folder, {"_name_or_path": "owner/Base-1B-Chat"}, 10**9) == {
        "general.name": "Base 1B Chat",
        "general.basename": "Base",
        "general.size_label": "1B",
        "general.finetune": "Chat",
        "general.organization": "Owner",
        "general.license": "apache-2.0",
        "general.languages": ["en"],
        "general.tags": ["chat", "7"],
    }


@pytest.mark.parametrize("path", ["/home/user/models/x-7B", "./x-7B", "", None, 5])
def test_a_path_is_no_name(tmp_path: Path, path: object) -> None:
    folder = tmp_path / "tiny-20K"
    folder.mkdir()
    found = describe_folder(folder, {"_name_or_path": path}, 20_000)
    assert (found["general.basename"], found["general.size_label"]) == ("tiny", "20K")


def test_a_broken_model_card_is_named(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n", "utf-8")
    with pytest.raises(FormatError, match=r"README\.md: its front matter cannot be read"):
        describe_folder(tmp_path, {}, 1)


@pytest.mark.parametrize(
    ("metadata", "source", "expected"),
    [
        ({"general.basename": "L-3.2", "general.size_label": "1B", "general.finetune": "it"}, "x", "L-3.2-1B-it-Q4_0.gguf"),
        ({"general.basename": "a/../b c", "general.size_label": "1B"}, "x", "a-..-b-c-1B-Q4_0.gguf"),
        ({"general.basename": "../../etc/passwd"}, "x", "etc-passwd-Q4_0.gguf"),
        ({"general.basename": " "}, "Model.Q8_0.gguf", "Model-Q4_0.gguf"),
        ({}, "Model-F16-00001-of-00003.gguf", "Model-Q4_0.gguf"),
        ({"general.basename": 7}, "My.Model.v2", "My.Model.v2-Q4_0.gguf"),
    ],
)
def test_names_of_files(metadata: dict[str, object], source: str, expected: str) -> None:
    assert file_name(metadata, Path("/somewhere") / source, "Q4_0") == expected


def test_what_a_model_comes_from_survives_the_way_there_and_back(tmp_path: Path) -> None:
    card = (
        "---\nbase_model:\n- org/Base-2B-v1.2\n- some where\ndatasets: owner/texts\npipeline_tag: text-generation\n"
        "tags: [chat]\nlicense: [mit, other]\n---\n"
    )
    (tmp_path / "README.md").write_text(card, "utf-8")
    keys = describe_folder(tmp_path, {}, 10**9)
    expected = {
        "general.base_model.count": 2,
        "general.base_model.0.name": "Base 2B v1.2",
        "general.base_model.0.version": "v1.2",
        "general.base_model.0.organization": "Org",
        "general.base_model.0.repo_url": "https://huggingface.co/org/Base-2B-v1.2",
        "general.base_model.1.name": "some where",
        "general.dataset.count": 1,
        "general.dataset.0.name": "Texts",
        "general.tags": ["chat", "text-generation"],
        "general.license": "mit,other",
    }
    assert {key: keys[key] for key in expected} == expected
    (tmp_path / "README.md").write_bytes(model_card({**keys, "general.name": "A\x7f\u2028 name"}, tmp_path / "x.gguf"))
    again = describe_folder(tmp_path, {}, 10**9)
    assert again["general.name"] == "A name"
    for key in ("base_model.0.repo_url", "dataset.0.repo_url", "tags", "license"):
        assert again[f"general.{key}"] == keys[f"general.{key}"]

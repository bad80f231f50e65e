"""Tokenizers written as Hugging Face folders: the libraries that read such folders give the ids of the GGUF file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer.description import Description
from llmctl.runtime.tokenizer.facts import AddedToken, TokenType
from llmctl.runtime.tokenizer.folder_files import TokenizerFiles, tokenizer_files
from llmctl.runtime.tokenizer.folder_source import describe_folder
from llmctl.runtime.tokenizer.gguf_metadata import gguf_metadata
from llmctl.runtime.tokenizer.gguf_source import describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.same_ids import PROBES, find_library_difference
from llmctl.runtime.tokenizer.tokenizer import Tokenizer

Open = Callable[[str], GgufCheckpoint]
DATA = Path(__file__).parents[2] / "data" / "vocab"
# Where the characters of random texts come from: letters of many scripts, marks, digits, white space, emoji, anything at all.
POOLS = (
    range(0x20, 0x7F),
    range(0xA0, 0x250),
    range(0x300, 0x530),
    range(0x5D0, 0x6FF),
    range(0x900, 0xE80),
    range(0x3040, 0x3100),
    range(0x4E00, 0x9FFF),
    range(0xAC00, 0xD7A3),
    range(0x1F300, 0x1F6FF),
    range(0x2000, 0x2070),
    (0x20, 0x20, 0x09, 0x0A, 0x0D),
    range(0x30, 0x3A),
    range(1, 0xD800),
    range(0xE000, 0x110000),
)


def random_texts(count: int, seed: int = 7) -> list[str]:
    """Texts of up to 40 characters, each from a few of the pools."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        pools = rng.sample(POOLS, rng.randint(1, 3))
        texts.append("".join(chr(rng.choice(rng.choice(pools))) for _ in range(rng.randint(1, 40))))
    return texts


def write(made: TokenizerFiles, folder: Path) -> Path:
    for name, data in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=True)


def test_the_same_ids_both_ways(vocabulary: Open, vocabulary_name: str, tmp_path: Path) -> None:
    """GGUF → folder → GGUF, on the strings published with each vocabulary and on random ones."""
    description = describe_gguf(vocabulary(vocabulary_name).metadata)
    made = tokenizer_files(description, 2048)
    assert made.warnings == []
    folder = write(made, tmp_path)
    ours, library = build_tokenizer(description), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    read_back = describe_folder(folder)
    back = build_tokenizer(read_back)
    keys = gguf_metadata(read_back, len(description.texts)).keys
    again = build_tokenizer(describe_gguf({"general.name": vocabulary(vocabulary_name).metadata["general.name"], **keys}))
    published = (DATA / "inputs.txt").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    for text in [*PROBES, *published, *random_texts(2000)]:
        expected = ids(ours, text)
        assert library.encode(text, add_special_tokens=False).ids == expected, text
        assert ids(back, text) == expected, text
        assert ids(again, text) == expected, text


@pytest.mark.parametrize("name", ["llama-spm", "qwen2", "llama-bpe"])
def test_transformers_reads_it(vocabulary: Open, name: str, tmp_path: Path) -> None:
    description = describe_gguf(vocabulary(name).metadata)
    folder = write(tokenizer_files(description, 4096), tmp_path)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    found, ours = transformers.AutoTokenizer.from_pretrained(folder), build_tokenizer(description)
    assert found.model_max_length == 4096
    for text in ("Hello, world!", " leading  12345", "北京 <|im_end|> ok"):
        assert found.encode(text) == ours.encode(text, parse_special=True)
        assert found.decode(found.encode(text, add_special_tokens=False)) == text
    assert found.eos_token_id == ours.eos_token_ids[0]
    assert {name: getattr(found, name) for name in ours.named_special} == ours.named_special


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"])
def test_sentencepiece_reads_the_model(vocabulary: Open, name: str, tmp_path: Path) -> None:
    description = describe_gguf(vocabulary(name).metadata)
    folder = write(tokenizer_files(description, 4096), tmp_path)
    model, ours = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), build_tokenizer(description)
    for text in [*PROBES, *random_texts(300)]:
        if "\0" not in text:
            assert model.encode(text) == ours.encode(text, add_special=False), text
    assert (model.unk_id(), model.bos_id(), model.eos_id()) == (0, 1, description.facts.eos_token_ids[0])


def small(**changes: object) -> Description:
    """A tokenizer by scores with a filler, a user-defined run of spaces and a template."""
    texts = [b"<unk>", b"<s>", b"</s>", "▁▁".encode(), "▁".encode(), b"a", b"b", b"ab", "▁ab".encode(), b"[PAD9]"]
    types = np.array([2, 3, 3, 4, 1, 1, 1, 1, 1, 5], np.uint8)
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text if text != "▁▁".encode() else b"  " for text in texts],
        "tokenizer.ggml.token_type": types.astype(np.int32),
        "tokenizer.ggml.scores": np.array([0, 0, 0, 0, -5, -6, -7, -1, -2, -1000], np.float32),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        **changes,
    }
    return describe_gguf(keys)


def test_what_the_files_hold() -> None:
    made = tokenizer_files(small(), 77)
    assert sorted(made.files) == [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]
    document = json.loads(made.files["tokenizer.json"])
    assert "[PAD9]" not in document["model"]["vocab"]
    assert document["model"]["merges"] == ["▁ ▁", "a b", "▁ ab"]
    spaces = next(token for token in document["added_tokens"] if token["id"] == 3)
    assert (spaces["content"], spaces["normalized"], spaces["special"]) == ("▁▁", True, False)
    config = json.loads(made.files["tokenizer_config.json"])
    assert (config["bos_token"], config["add_bos_token"], config["model_max_length"]) == ("<s>", True, 77)
    library = tokenizers.Tokenizer.from_str(made.files["tokenizer.json"].decode())
    assert library.encode("  ab ab").ids == [1, 3, 7, 8]


def test_a_template_names_no_other_folder() -> None:
    made = tokenizer_files(small(**{"tokenizer.chat_template.../../evil": "x"}), 1)
    assert "additional_chat_templates/______evil.jinja" in made.files


def test_what_a_folder_cannot_say() -> None:
    broken = small()
    broken.texts[5] = b"\xff"
    with pytest.raises(FormatError, match=r"the token 5 is b'\\xff', no UTF-8"):
        tokenizer_files(broken, 1)
    collapsing = small(**{"tokenizer.ggml.remove_extra_whitespaces": True})
    with pytest.raises(UnsupportedError, match="is not written yet"):
        tokenizer_files(collapsing, 1)
    twice = small()
    twice.texts[6] = b"a"
    made = tokenizer_files(twice, 1)
    assert "1 tokens have the text of another" in made.warnings[0]
    assert "tokenizer.model is left out" in made.warnings[1]
    assert "tokenizer.model" not in made.files


def test_a_difference_is_found() -> None:
    description = small()
    made = tokenizer_files(description, 1)
    assert find_library_difference(build_tokenizer(description), made.files["tokenizer.json"]) is None
    document = json.loads(made.files["tokenizer.json"])
    document["normalizer"] = None
    difference = find_library_difference(build_tokenizer(description), json.dumps(document).encode())
    assert difference is not None
    with pytest.raises(FormatError, match="does not load"):
        find_library_difference(build_tokenizer(description), b"{}")
    assert AddedToken(1, "<s>", True) in description.facts.added
    assert TokenType.UNUSED == 5

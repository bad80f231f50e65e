"""Tokenizers written as GGUF metadata: read back they give the same ids, and what cannot be written is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer import Tokenizer
from llmctl.runtime.tokenizer.description import Description
from llmctl.runtime.tokenizer.folder_settings import FolderSettings
from llmctl.runtime.tokenizer.gguf_metadata import gguf_metadata
from llmctl.runtime.tokenizer.gguf_source import describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.pre_tokenizers import RULES, to_json
from llmctl.runtime.tokenizer.same_ids import PROBES, find_difference
from llmctl.runtime.tokenizer.tokenizer_json import describe_document, read_document

LINES = [line for path in Path(__file__).parent.glob("*.py") for line in path.read_text("utf-8").splitlines()]
SPECIAL = ["<unk>", "<s>", "</s>"]
REPLACE = normalizers.Replace(" ", "▁")
PATH = Path("somewhere/tokenizer.json")


def described(library: tokenizers.Tokenizer, **settings: Any) -> Description:
    """The library's tokenizer as our reader describes it."""
    return describe_document(PATH, read_document(PATH, library.to_str().encode()), FolderSettings(**settings))


def tokenizer_of(keys: Mapping[str, Any]) -> Tokenizer:
    return build_tokenizer(describe_gguf(keys))


def byte_level(pre: Any = None, **options: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(**options))
    library.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=alphabet, special_tokens=SPECIAL)
    library.train_from_iterator(LINES, trainer)
    return library


def marked(all_ways: bool) -> tokenizers.Tokenizer:
    """Gemma's kind, from tokenizer.json alone: ▁ for the space, byte tokens.

    all_ways: every two pieces that make a piece are a merge, as converters from SentencePiece write it; without it only
    the merges that training found.
    """
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.normalizer, library.pre_tokenizer = REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    library.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=special))
    document = json.loads(library.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    if all_ways:
        vocab = document["model"]["vocab"]
        made = list(dict.fromkeys(left + right for left, right in document["model"]["merges"]))
        ways = [(piece[:at], piece[at:]) for piece in made for at in range(1, len(piece))]
        document["model"]["merges"] = [way for way in ways if way[0] in vocab and way[1] in vocab]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def test_public_vocabularies_are_written_as_they_were(vocabulary: Callable[[str], GgufCheckpoint], vocabulary_name: str) -> None:
    metadata = vocabulary(vocabulary_name).metadata
    description = describe_gguf(metadata)
    keys = gguf_metadata(description, len(description.texts)).keys
    assert keys["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
    if keys["tokenizer.ggml.model"] == "llama":
        np.testing.assert_array_equal(keys["tokenizer.ggml.scores"], metadata["tokenizer.ggml.scores"])
    else:
        assert keys["tokenizer.ggml.merges"] == metadata["tokenizer.ggml.merges"]
    same = ("model", "bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
    for name in same:
        key = f"tokenizer.ggml.{name}"
        if key in metadata and key in keys:
            assert keys[key] == metadata[key]
    before, after = build_tokenizer(describe_gguf(metadata)), tokenizer_of(keys | {"general.name": metadata["general.name"]})
    assert find_difference(before, after, [token.text for token in description.facts.added]) is None
    assert (after.eos_token_ids, after.bos_token_id, after.add_bos, after.add_eos) == (
        before.eos_token_ids, before.bos_token_id, before.add_bos, before.add_eos,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.byte_level])
def test_every_rule_is_recognised(name: str) -> None:
    """By its own patterns, whatever the vocabulary: rules that are guessed give other ids for numbers."""
    rule = RULES[name]
    document = json.loads(byte_level(ignore_merges=rule.ignore_merges).to_str())
    description = described(tokenizers.Tokenizer.from_str(json.dumps(document)))
    description.facts.settings["pre_tokenizer"] = to_json(rule)
    keys = gguf_metadata(description, 600).keys
    written = RULES[keys["tokenizer.ggml.pre"]]
    assert (written.patterns, written.ignore_merges) == (rule.patterns, rule.ignore_merges)
    assert find_difference(build_tokenizer(description), tokenizer_of(keys)) is None


DIGITS = pre_tokenizers.Digits(individual_digits=True)
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
FOURS = pre_tokenizers.Split(tokenizers.Regex(r"\d{4}"), "isolated")


def test_case_9_digits_one_by_one() -> None:
    library = byte_level(pre_tokenizers.Sequence([DIGITS, LEVEL]))
    keys = gguf_metadata(described(library), 600).keys
    assert keys["tokenizer.ggml.pre"] == "smollm"
    for text in ("abc 12345 don't", *PROBES):
        ids = tokenizer_of(keys).encode(text, add_special=False, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("pre", "named"),
    [
        (pre_tokenizers.Sequence([FOURS, LEVEL]), r"Split \\d\{4\}, ByteLevel"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "ByteLevel"),
        (pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), LEVEL]), "Whitespace, ByteLevel"),
    ],
)
def test_an_unknown_rule_is_refused_by_name(pre: Any, named: str) -> None:
    description = described(byte_level(pre))
    with pytest.raises(UnsupportedError, match=rf"no name for how this tokenizer splits text \({named}\); --pre NAME"):
        gguf_metadata(description, 600)
    assert gguf_metadata(description, 600, pre="qwen2").keys["tokenizer.ggml.pre"] == "qwen2"
    with pytest.raises(UnsupportedError, match="unknown pre-tokenizer rule 'nonsense'"):
        gguf_metadata(description, 600, pre="nonsense")


def test_a_marked_bpe_is_sentencepiece_with_scores_from_the_merges() -> None:
    """From tokenizer.json only; byte tokens typed as bytes."""
    library = marked(all_ways=True)
    made = gguf_metadata(described(library), 900)
    assert (made.keys["tokenizer.ggml.model"], made.keys["tokenizer.ggml.pre"]) == ("llama", "default")
    assert made.keys["tokenizer.ggml.add_space_prefix"] is False
    assert list(made.keys["tokenizer.ggml.token_type"][:5]) == [2, 3, 3, 6, 6]
    scores, tokens = made.keys["tokenizer.ggml.scores"], made.keys["tokenizer.ggml.tokens"]
    order = sorted((i for i in range(900) if scores[i] < 0), key=lambda i: -scores[i])
    assert [tokens[i] for i in order[:3]] == ["".join(pair) for pair in _first_made(library, 4)[1:]]
    tokenizer = tokenizer_of(made.keys)
    for text in ("a\n€ ", "it  is <0x0A>", *LINES[:60], *PROBES):
        ids = tokenizer.encode(text, add_special=False, parse_special=True)
        assert ids == library.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special=False) == text.replace("▁", " ")


def _first_made(library: tokenizers.Tokenizer, count: int) -> list[tuple[str, str]]:
    """The first merges that make different pieces."""
    merges = json.loads(library.to_str())["model"]["merges"]
    found: dict[str, tuple[str, str]] = {}
    for left, right in merges:
        found.setdefault(left + right, (left, right))
    return list(found.values())[:count]


def test_merges_that_scores_cannot_say_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"the piece '.+' can be made of pieces in \d+ ways, of which 1 are merges"):
        gguf_metadata(described(marked(all_ways=False)), 900)
    document = json.loads(marked(all_ways=True).to_str())
    merges = document["model"]["merges"]
    several = next(i for i, (a, b) in enumerate(merges[1:], 1) if "".join(merges[i - 1]) == a + b)
    merges.append(merges.pop(several))
    with pytest.raises(UnsupportedError, match="that come before and after others"):
        gguf_metadata(described(tokenizers.Tokenizer.from_str(json.dumps(document))), 900)


def test_user_defined_tokens_have_plain_spaces() -> None:
    library = marked(all_ways=True)
    library.add_tokens([tokenizers.AddedToken("▁▁▁", normalized=False, special=False)])
    keys = gguf_metadata(described(library), 901).keys
    assert (keys["tokenizer.ggml.tokens"][900], keys["tokenizer.ggml.token_type"][900]) == ("   ", 4)


def test_case_7_rows_without_a_token() -> None:
    description = described(byte_level())
    keys = gguf_metadata(description, 603).keys
    assert keys["tokenizer.ggml.tokens"][599:] == [description.texts[599].decode(), "[PAD600]", "[PAD601]", "[PAD602]"]
    assert list(keys["tokenizer.ggml.token_type"][599:]) == [1, 5, 5, 5]
    tokenizer = tokenizer_of(keys)
    assert tokenizer.encode("[PAD600]", parse_special=True) == build_tokenizer(description).encode("[PAD600]")
    marked_keys = gguf_metadata(described(marked(all_ways=True)), 902).keys
    assert list(marked_keys["tokenizer.ggml.scores"][900:]) == [-10000, -10000]
    assert len(marked_keys["tokenizer.ggml.scores"]) == 902


def test_case_7_tokens_without_a_row() -> None:
    library = byte_level()
    library.add_tokens(["surplus", "more"])
    description = described(library)
    with pytest.raises(FormatError, match=r"has 601 rows, but there are 1 tokens beyond them, the first is 'more' \(id 601\)"):
        gguf_metadata(description, 601)
    assert len(gguf_metadata(description, 601, drop_surplus=True).keys["tokenizer.ggml.tokens"]) == 601


def test_what_surrounds_a_text() -> None:
    library = byte_level()
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    library.post_processor = template
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    keys = gguf_metadata(described(library, named=named), 600).keys
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, True)
    assert tokenizer_of(keys).encode("x") == library.encode("x").ids
    library.post_processor = processors.TemplateProcessing(single="<s> <unk> $A", special_tokens=[("<s>", 1), ("<unk>", 0)])
    with pytest.raises(UnsupportedError, match=r"puts the tokens \[1, 0\] before a text, GGUF can only say whether 1"):
        gguf_metadata(described(library, named=named), 600)


def test_end_tokens_and_templates() -> None:
    library = byte_level()
    library.add_special_tokens(["<|eot_id|>", "<turn-end>", "<doc-end>", "<fourth>"])
    settings = {
        "named": {"eos_token": "</s>", "pad_token": "<unk>"},
        "end_ids": [600, 601, 602],
        "chat_templates": {"default": "{{ d }}", "tool-use": "{{ t }}"},
    }
    made = gguf_metadata(described(library, **settings), 604)
    expected = {"eos": 2, "eot": 601, "eom": 602, "padding": 0}
    assert {name: made.keys[f"tokenizer.ggml.{name}_token_id"] for name in expected} == expected
    assert made.keys["tokenizer.chat_template"] == "{{ d }}"
    assert (made.keys["tokenizer.chat_templates"], made.keys["tokenizer.chat_template.tool_use"]) == (["tool_use"], "{{ t }}")
    assert made.warnings == []
    assert set(tokenizer_of(made.keys).eos_token_ids) == {2, 600, 601, 602}
    settings["end_ids"].append(603)
    assert gguf_metadata(described(library, **settings), 604).warnings == [
        "GGUF has no key for the end tokens [603]: generation will not stop at them"
    ]


def test_what_gguf_has_no_key_for_is_said() -> None:
    library = byte_level()
    library.normalizer = normalizers.Sequence([normalizers.NFC()])
    library.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert gguf_metadata(described(library), 601).warnings == [
        "GGUF has no flags for tokens that swallow the white space beside them: '<mask>'",
        "readers of GGUF do not normalize text as this tokenizer does (NFC)",
    ]


def test_differences_are_found_and_shown() -> None:
    one, other = (build_tokenizer(described(byte_level(pre))) for pre in (None, pre_tokenizers.Sequence([DIGITS, LEVEL])))
    difference = find_difference(one, other)
    assert difference is not None
    assert difference.expected == one.encode(difference.text)
    assert difference.found == other.encode(difference.text)
    assert f"{difference.text[:60]!r} becomes [" in str(difference)
    assert find_difference(one, one, SPECIAL) is None

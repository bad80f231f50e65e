"""tokenizer.json of all the shapes BPE comes in, compared with the `tokenizers` library that defines it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.runtime.tokenizer import Tokenizer
from llmctl.runtime.tokenizer.folder_settings import FolderSettings
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.tokenizer_json import describe_document, read_document

CORPUS = Path(__file__).parents[3] / "pyproject.toml", *Path(__file__).parent.glob("*.py")
# Without what might teach a vocabulary to spell special tokens.
LINES = [line.replace("<", "‹") for path in CORPUS for line in path.read_text(encoding="utf-8").splitlines()]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PATH = Path("somewhere/tokenizer.json")

ODDITIES = ["the ", " def", "<s>", "</s>", "<tool>", "<sys>", "▁", "  ", "\n", "e\u0301", "<0x0A>", "42", "٣", "😀", "It's", "LL"]
# Ordinary text, and what a tokenizer may trip over.
TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(ODDITIES)).map("".join),
    st.sampled_from(LINES),
)


def byte_level(*, pre: Any = None, **options: Any) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.BPE(**options))
    library.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    library.train_from_iterator(LINES, trainer)
    return library


def marked(normalizer: Any, pre: Any, strip: int, *, byte_tokens: bool = True, **options: Any) -> tokenizers.Tokenizer:
    """Llama-2's and Gemma's kind: ▁ for the space."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=byte_tokens, **options))
    library.normalizer, library.pre_tokenizer = normalizer, pre
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*steps, decoders.Strip(" ", strip, 0)] if strip else steps)
    special = ["<unk>", "<s>", "</s>", *(BYTES if byte_tokens else [])]
    trainer = trainers.BpeTrainer(vocab_size=900, show_progress=False, special_tokens=special, max_token_length=12)
    library.train_from_iterator(LINES, trainer)
    document = json.loads(library.to_str())  # byte tokens are no added tokens
    document["added_tokens"] = document["added_tokens"][:3]
    return tokenizers.Tokenizer.from_str(json.dumps(document))


def qwen_like() -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(tokenizers.Regex(r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s+(?!\S)|\s+"), "isolated")
    library = byte_level(pre=pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]))
    library.normalizer = normalizers.NFC()
    return library


def with_added_tokens() -> tokenizers.Tokenizer:
    library = byte_level()
    flags = [{"normalized": False}, {"lstrip": True}, {"rstrip": True, "normalized": False}, {"single_word": True}]
    for name, given_flags in zip(("<tool>", " def", "42", "the"), flags, strict=True):
        library.add_tokens([tokenizers.AddedToken(name, special=False, **given_flags)])
    library.add_special_tokens([tokenizers.AddedToken("<sys>", lstrip=True, rstrip=True, normalized=False)])
    return library


REPLACE = normalizers.Replace(" ", "▁")
MADE: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "gpt-2": byte_level,
    "prefix space": lambda: byte_level(pre=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "ignore_merges": lambda: byte_level(ignore_merges=True),
    "normalizer": qwen_like,
    "added tokens": with_added_tokens,
    "llama-2, older": lambda: marked(normalizers.Sequence([normalizers.Prepend("▁"), REPLACE]), None, 1, fuse_unk=True),
    "llama-2, newer": lambda: marked(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), 1, fuse_unk=True),
    "always": lambda: marked(None, pre_tokenizers.Metaspace(prepend_scheme="always", split=True), 1),
    "gemma": lambda: marked(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous"), 0, fuse_unk=True),
    "no bytes": lambda: marked(REPLACE, None, 0, byte_tokens=False, fuse_unk=True),
    "no bytes, not fused": lambda: marked(REPLACE, None, 0, byte_tokens=False, fuse_unk=False),
}


def ours(library: tokenizers.Tokenizer, **settings: Any) -> Tokenizer:
    document = read_document(PATH, library.to_str().encode())
    return build_tokenizer(describe_document(PATH, document, FolderSettings(**settings)))


@pytest.fixture(scope="module", params=MADE)
def pair(request: pytest.FixtureRequest) -> tuple[tokenizers.Tokenizer, Tokenizer]:
    library = MADE[request.param]()
    return library, ours(library)


@given(text=TEXTS)
def test_ids_are_the_library_s(pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    library, tokenizer = pair
    for parse_special in (False, True):
        library.encode_special_tokens = not parse_special
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special=False, parse_special=parse_special) == expected


@given(text=TEXTS)
def test_decoded_text_is_the_library_s(pair: tuple[tokenizers.Tokenizer, Tokenizer], text: str) -> None:
    library, tokenizer = pair
    library.encode_special_tokens = False
    ids = library.encode(text, add_special_tokens=False).ids
    for skip_special in (False, True):
        assert tokenizer.decode(ids, skip_special=skip_special) == library.decode(ids, skip_special_tokens=skip_special)


def test_long_text(pair: tuple[tokenizers.Tokenizer, Tokenizer]) -> None:
    library, tokenizer = pair
    library.encode_special_tokens = True
    shuffled = random.Random(3).sample(LINES, len(LINES))
    for text in ("\n".join(shuffled), "a" * 3000, " " * 500, "".join(shuffled).replace(" ", "")):
        assert tokenizer.encode(text, add_special=False) == library.encode(text, add_special_tokens=False).ids


def test_case_22_byte_tokens_of_a_tokenizer_json_alone() -> None:
    library = MADE["llama-2, older"]()
    tokenizer = ours(library)
    newline = library.token_to_id("<0x0A>")
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_text(newline) == "<0x0A>"
    assert newline in tokenizer.encode("a\n€")
    assert tokenizer.decode(tokenizer.encode("a\n€")) == "a\n€"
    literal = tokenizer.encode("<0x0A>")
    assert newline not in literal
    assert tokenizer.decode(literal) == "<0x0A>"
    assert [tokenizer.token_bytes(library.token_to_id(text)) for text in BYTES] == [bytes([byte]) for byte in range(256)]


def test_a_vocabulary_cannot_smuggle_control_tokens_into_text() -> None:
    """Merges that spell out a special token, or a word that is one: the library makes it, we do not."""
    letters = {letter: place for place, letter in enumerate("<s>")}
    document = json.loads(byte_level(ignore_merges=True).to_str())
    document["model"]["vocab"] = letters | {"<s": 3, "<s>": 4}
    document["model"]["merges"] = [["<", "s"], ["<s", ">"]]
    document["added_tokens"] = [{"id": 4, "content": "<s>", "special": True}]
    document["pre_tokenizer"]["use_regex"] = False
    tokenizer = build_tokenizer(describe_document(PATH, document, FolderSettings()))
    assert tokenizer.encode("<s>") == [3, 2]
    assert tokenizer.encode("<s>", parse_special=True) == [4]


def test_what_surrounds_a_text_comes_from_the_post_processor() -> None:
    library = byte_level()
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    assert (ours(library).encode("a"), ours(library).add_bos) == (library.encode("a").ids, False)
    template = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)])
    library.post_processor = processors.Sequence([processors.ByteLevel(), template])
    tokenizer = ours(library, named={"bos_token": "<s>", "eos_token": "</s>"})
    assert tokenizer.encode("a") == library.encode("a").ids
    assert (tokenizer.add_bos, tokenizer.add_eos) == (True, True)
    library.post_processor = processors.RobertaProcessing(("</s>", eos), ("<s>", bos), add_prefix_space=False)
    assert ours(library).encode("a") == library.encode("a").ids


def test_flags_beside_the_document_win() -> None:
    library = byte_level()
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    bos, eos = library.token_to_id("<s>"), library.token_to_id("</s>")
    a = ours(library).encode("a")
    assert ours(library, named=named, add_bos=True).encode("a") == [bos, *a]
    assert ours(library, named=named, add_bos=True, add_eos=True).encode("a") == [bos, *a, eos]
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    assert ours(library, named=named, add_bos=False).encode("a") == a
    assert ours(library, add_bos=True).encode("a") == [bos, *a]


def broken(change: Callable[[dict[str, Any]], Any]) -> bytes:
    document = json.loads(MADE["gemma"]().to_str())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda d: d.pop("model"), FormatError, "it has no model"),
        (lambda d: d["model"].update(type="Unigram"), UnsupportedError, "of type Unigram; only BPE"),
        (lambda d: d["model"].update(dropout=0.1), UnsupportedError, "has dropout 0.1"),
        (lambda d: d["model"].update(end_of_word_suffix="</w>"), UnsupportedError, "end_of_word_suffix '</w>'"),
        (lambda d: d["model"].update(vocab=[]), FormatError, "model.vocab must be an object"),
        (lambda d: d["model"]["vocab"].update(x="y"), FormatError, "an id that is no integer"),
        (lambda d: d["model"]["vocab"].update(x=-1), FormatError, "the ids -1 to"),
        (lambda d: d["model"]["vocab"].update(x=1 << 40), FormatError, "the ids 0 to 1099511627776"),
        (lambda d: d["model"]["merges"].append(["a", "no such token"]), FormatError, "'no such token', which is not in"),
        (lambda d: d["model"]["merges"].append(["a"]), FormatError, "which is no pair"),
        (lambda d: d["model"]["merges"].append("abc"), FormatError, "which is no pair"),
        (lambda d: d["model"].update(unk_token="nowhere"), FormatError, "unk_token is 'nowhere'"),
        (lambda d: d["added_tokens"].append({"id": 7}), FormatError, "added_tokens holds an entry"),
        (lambda d: d["added_tokens"].append({"id": 1 << 40, "content": "x"}), FormatError, "added_tokens holds ids up to"),
        (lambda d: d.update(decoder=None), UnsupportedError, "decoder is neither byte-level"),
        (lambda d: d.update(normalizer={"type": "Nonsense"}), FormatError, "normalizer or pre_tokenizer cannot be used"),
    ],
)
def test_broken_documents_are_refused(change: Callable[[dict[str, Any]], Any], error: type[Exception], message: str) -> None:
    data = broken(change)
    with pytest.raises(error, match=message):
        build_tokenizer(describe_document(PATH, read_document(PATH, data), FolderSettings())).encode("a")


ODD_VALUES = [None, True, 1 << 40, "", [], {}, ["x"], [None], {"type": "x"}]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a document; of long lists and objects the first few."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    for key, inner in items[:6]:
        found.append((value, key))
        places(inner, found)
    return found


@pytest.mark.parametrize("name", ["added tokens", "llama-2, older", "llama-2, newer"])
def test_anything_anywhere_is_read_or_refused(name: str) -> None:
    library = MADE[name]()
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    document = json.loads(library.to_str())
    few = [*list(document["model"]["vocab"])[:5], *"abs <>▁Ġ"]
    document["model"] |= {"vocab": {text: i for i, text in enumerate(dict.fromkeys(few))}, "merges": []}
    refused = 0
    for container, key in places(document, []):
        kept = container[key]
        for odd in ODD_VALUES:
            container[key] = odd
            try:
                read = read_document(PATH, json.dumps(document).encode())
                build_tokenizer(describe_document(PATH, read, FolderSettings())).encode("a <s> b", parse_special=True)
            except LlmctlError as error:
                refused += 1
                assert str(error).startswith(str(PATH))  # noqa: PT017
        container[key] = kept
    assert refused > 50


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"somewhere.tokenizer\.json: not a tokenizer\.json"):
        read_document(PATH, data)


def test_merges_of_older_files_are_one_text_each() -> None:
    library = MADE["gpt-2"]()
    document = json.loads(library.to_str())
    document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
    del document["model"]["type"]
    tokenizer = build_tokenizer(describe_document(PATH, read_document(PATH, json.dumps(document).encode()), FolderSettings()))
    for text in LINES[:50]:
        assert tokenizer.encode(text) == library.encode(text).ids

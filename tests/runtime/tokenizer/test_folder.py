"""Hugging Face folders: which file counts, and what the small files beside it add."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import tokenizers
from sentencepiece import sentencepiece_model_pb2 as protobuf

from llmctl.errors import FormatError, ModelNotFoundError, UnsupportedError
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer
from llmctl.runtime.tokenizer.folder_source import describe_folder
from llmctl.runtime.tokenizer.load import build_tokenizer

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model")
TOKENIZER_FILES = (*VOCABULARY_FILES, "tokenizer_config.json", "generation_config.json", "config.json", "chat_template.jinja")


def copy_of(folder: Path, into: Path, *, without: tuple[str, ...] = ()) -> Path:
    into.mkdir()
    for name in TOKENIZER_FILES:
        if name not in without and (folder / name).exists():
            shutil.copy(folder / name, into / name)
    return into


def random_texts(tokenizer: Tokenizer, count: int) -> list[str]:
    """Mixtures of scripts, white space, special tokens' texts and characters from anywhere in Unicode."""
    source = random.Random(17)
    words = ["the ", " def", "I'LL", "don't", "123", "▁", "  ", "\n\n", "\t", "\r\n", "e\u0301", "\u200d"]
    words += list(tokenizer.special_tokens())[:20]
    ranges = [(32, 127), (32, 127), (0xA0, 0x2000), (0x3040, 0x9FFF), (0x1F300, 0x1F700), (0, 0xD800), (0xE000, 0x110000)]

    def part() -> str:
        return source.choice(words) if source.random() < 0.3 else chr(source.randrange(*source.choice(ranges)))

    return ["".join(part() for _ in range(source.randrange(1, 40))) for _ in range(count)]


@pytest.fixture(scope="module", params=["smollm2_fp16", "gemma3_fp16"])
def real_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_real_folders_read_as_transformers_does(real_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer, judge = load_tokenizer(open_checkpoint(real_folder)), AutoTokenizer.from_pretrained(real_folder)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (len(judge), judge.bos_token_id)
    assert judge.eos_token_id == tokenizer.eos_token_ids[0]
    assert {name: judge.special_tokens_map[name] for name in tokenizer.named_special} == tokenizer.named_special
    assert tokenizer.chat_templates.get("default") == judge.chat_template
    backend = judge.backend_tokenizer
    for text in random_texts(tokenizer, 1500):
        for parse_special in (False, True):
            backend.encode_special_tokens = not parse_special
            expected = backend.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, add_special=False, parse_special=parse_special) == expected
        assert tokenizer.decode(expected, skip_special=False) == judge.decode(expected)
        assert tokenizer.decode(expected) == judge.decode(expected, skip_special_tokens=True)
    assert tokenizer.encode("Hello there") == judge("Hello there").input_ids


def test_both_files_and_either_give_the_same_ids(gemma3_fp16: Path, gemma3_gguf: Path, tmp_path: Path) -> None:
    """tokenizer.model is only a shortcut to what tokenizer.json says; the GGUF file of the model agrees."""
    json_only = copy_of(gemma3_fp16, tmp_path / "json", without=("tokenizer.model",))
    model_only = copy_of(gemma3_fp16, tmp_path / "model", without=("tokenizer.json",))
    described = [describe_folder(folder) for folder in (gemma3_fp16, json_only, model_only)]
    assert [description.facts.engine for description in described] == ["sentencepiece", "bpe", "sentencepiece"]
    pair, by_json, by_model = map(build_tokenizer, described)
    by_gguf = load_tokenizer(open_checkpoint(gemma3_gguf))
    for text in random_texts(pair, 300):
        for parse_special in (False, True):
            ids = pair.encode(text, parse_special=parse_special)
            for other in (by_json, by_model, by_gguf):
                assert other.encode(text, parse_special=parse_special) == ids
                assert other.decode(ids) == pair.decode(ids)
    assert pair.eos_token_ids == by_json.eos_token_ids == by_model.eos_token_ids == by_gguf.eos_token_ids
    assert pair.special_tokens() == by_json.special_tokens() == by_model.special_tokens() == by_gguf.special_tokens()


@pytest.fixture(scope="module")
def spm_model() -> protobuf.ModelProto:
    """A small SentencePiece model, as Llama-2's is made."""
    lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, model_type="bpe", vocab_size=600, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return protobuf.ModelProto.FromString(written.getvalue())


def as_document(model: protobuf.ModelProto, **parts: Any) -> dict[str, Any]:
    """The tokenizer.json that belongs to it: all ways to make a piece are merges, better pieces first."""
    index = {piece.piece: token_id for token_id, piece in enumerate(model.pieces)}
    ways = [
        (-piece.score, index[piece.piece[:cut]], [piece.piece[:cut], piece.piece[cut:]])
        for piece in model.pieces
        for cut in range(1, len(piece.piece))
        if piece.type == 1 and piece.piece[:cut] in index and piece.piece[cut:] in index
    ]
    added = [ADDED | {"id": i, "content": model.pieces[i].piece} for i in range(3)]
    steps = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    bpe = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    bpe |= {"vocab": index, "merges": [way for *_, way in sorted(ways)]}
    strip = [] if parts == {"normalizer": REPLACE} else [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    document = {"version": "1.0", "added_tokens": added, "decoder": {"type": "Sequence", "decoders": steps + strip}}
    return document | {"normalizer": None, "pre_tokenizer": None, "post_processor": None} | parts | {"model": bpe}


ADDED = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, REPLACE]}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
PAIRS: dict[str, dict[str, Any]] = {
    "always": {"normalizer": PREPEND},
    "always, unless there is one": {"pre_tokenizer": METASPACE | {"prepend_scheme": "always"}},
    "first": {"pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
    "never": {"normalizer": REPLACE},
}


@pytest.mark.parametrize("style", [{"separators": (",", ":")}, {"indent": 2}], ids=["compact", "pretty"])
@pytest.mark.parametrize("parts", PAIRS.values(), ids=PAIRS)
def test_small_pairs(spm_model: protobuf.ModelProto, tmp_path: Path, parts: dict[str, Any], style: dict[str, Any]) -> None:
    document = json.dumps(as_document(spm_model, **parts), ensure_ascii=False, **style)
    (tmp_path / "tokenizer.json").write_text(document, encoding="utf-8")
    by_json = describe_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(spm_model.SerializeToString())
    pair = describe_folder(tmp_path)
    assert (by_json.facts.engine, pair.facts.engine) == ("bpe", "sentencepiece")
    library = tokenizers.Tokenizer.from_str(document)
    tokenizer, slower = build_tokenizer(pair), build_tokenizer(by_json)
    for text in [*random_texts(tokenizer, 150), " a", "a<s> a</s>", "▁a"]:
        for parse_special in (False, True):
            library.encode_special_tokens = not parse_special
            ids = library.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, parse_special=parse_special, add_special=False) == ids
            assert slower.encode(text, parse_special=parse_special, add_special=False) == ids
        assert tokenizer.decode(ids, skip_special=False) == library.decode(ids, skip_special_tokens=False)


NORMALIZED = ADDED | {"id": 600, "content": "<t>", "special": False, "normalized": True}


def swap(document: dict[str, Any]) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["in"], vocabulary["on"] = vocabulary["on"], vocabulary["in"]


@pytest.mark.parametrize(
    "change",
    [
        swap,
        lambda document: document["model"]["vocab"].update({"more": 600}),
        lambda document: document["model"].update(byte_fallback=False),
        lambda document: document["added_tokens"].append(NORMALIZED),
        lambda document: document.update(pre_tokenizer={"type": "Digits", "individual_digits": True}),
        lambda document: document.update(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, REPLACE]}),
        lambda document: document.update(normalizer=None),
    ],
)
def test_a_tokenizer_model_that_is_not_the_same_does_not_count(
    spm_model: protobuf.ModelProto, tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    document = as_document(spm_model, normalizer=REPLACE)
    change(document)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document, ensure_ascii=False, indent=2), encoding="utf-8")
    (tmp_path / "tokenizer.model").write_bytes(spm_model.SerializeToString())
    described = describe_folder(tmp_path)
    assert described.facts.engine == "bpe"
    library, tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), build_tokenizer(described)
    library.encode_special_tokens = True
    for text in ("in on <t> 12 e\u0301", "a b"):
        assert tokenizer.encode(text) == library.encode(text).ids


def test_a_broken_tokenizer_model_is_no_obstacle(spm_model: protobuf.ModelProto, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(as_document(spm_model, normalizer=REPLACE)), encoding="utf-8")
    for data in (b"", b"\x0a\xff", b"nonsense"):
        (tmp_path / "tokenizer.model").write_bytes(data)
        assert describe_folder(tmp_path).facts.engine == "bpe"


SMALL = {
    "added_tokens": [
        {"id": 2, "content": "<s>", "special": True},
        {"id": 3, "content": "</s>", "special": True},
        {"id": 4, "content": "<tool>", "special": False, "normalized": False},
    ],
    "decoder": {"type": "ByteLevel"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 5}, "merges": [["a", "b"]]},
}


def small(folder: Path, **files: Any) -> Tokenizer:
    """The tokenizer of a folder with a small tokenizer.json and these files (a_b="…" is a_b.json)."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(SMALL))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return load_tokenizer(SimpleNamespace(kind="safetensors", folder=folder))


def test_case_32_end_tokens_are_a_union(tmp_path: Path) -> None:
    named = {"eos_token": "</s>"}
    tokenizer = small(tmp_path / "a", tokenizer_config=named, generation_config={"eos_token_id": [5]}, config={"eos_token_id": 1})
    assert tokenizer.eos_token_ids == (3, 5, 1)
    assert small(tmp_path / "b", generation_config={"eos_token_id": 5}).eos_token_ids == (5,)
    assert small(tmp_path / "c", config={"text_config": {"eos_token_id": [0, 1]}}).eos_token_ids == (0, 1)
    assert small(tmp_path / "d", generation_config={"eos_token_id": None}, config={"eos_token_id": True}).eos_token_ids == ()
    ending = tokenizer.stream()
    assert ending.push(3) + ending.flush() == ""


def test_named_tokens(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"}
    config |= {"pad_token": None, "unk_token": "nowhere"}
    tokenizer = small(tmp_path / "a", tokenizer_config=config, config={"bos_token_id": 0, "pad_token_id": 1})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (2, (3,))
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (None, None)
    assert tokenizer.named_special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "nowhere"}
    older = small(tmp_path / "b", special_tokens_map={"bos_token": "<s>", "pad_token": {"content": "</s>"}})
    assert (older.bos_token_id, older.pad_token_id) == (2, 3)
    bare = small(tmp_path / "c", config={"bos_token_id": 2, "pad_token_id": 3, "eos_token_id": 3})
    assert (bare.bos_token_id, bare.pad_token_id) == (2, 3)
    assert bare.named_special == {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}


def test_more_special_tokens_than_the_vocabulary_file_marks(tmp_path: Path) -> None:
    assert small(tmp_path / "a").encode("<tool>ab") == [4, 5]
    for key, value in (
        ("additional_special_tokens", ["<tool>", "nowhere"]),
        ("extra_special_tokens", [{"content": "<tool>"}]),
        ("extra_special_tokens", {"tool_token": "<tool>"}),
        ("tool_token", "<tool>"),
    ):
        tokenizer = small(tmp_path / "b", tokenizer_config={key: value})
        assert tokenizer.special_tokens() == {"<s>": 2, "</s>": 3, "<tool>": 4}
        assert tokenizer.encode("<tool>ab") == [5]
        assert tokenizer.encode("<tool>ab", parse_special=True) == [4, 5]


def test_added_tokens_beside_the_vocabulary_file(tmp_path: Path) -> None:
    decoder = {"4": {"content": "<tool>", "rstrip": True, "normalized": False}, "6": {"content": "<new>", "special": True}}
    tokenizer = small(tmp_path / "a", tokenizer_config={"added_tokens_decoder": decoder}, added_tokens={"<old>": 7})
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("<tool>  ab<new>", parse_special=True) == [4, 5, 6]
    older = small(tmp_path / "b", added_tokens={"<old>": 7, "ab": 99}, special_tokens_map={"pad_token": "<old>"})
    assert older.vocab_size == 8
    assert older.encode("a<old>ab", parse_special=True) == [0, 7, 5]
    assert older.token_text(6) == ""
    assert older.decode([0, 6, 5]) == "aab"


def test_templates_and_their_order(tmp_path: Path) -> None:
    assert small(tmp_path / "a").chat_templates == {}
    assert small(tmp_path / "a", tokenizer_config={"chat_template": "A"}).chat_templates == {"default": "A"}
    several = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    assert small(tmp_path / "a", tokenizer_config={"chat_template": several}).chat_templates == {"default": "A", "rag": "B"}
    assert small(tmp_path / "a", chat_template={"chat_template": "C"}).chat_templates == {"default": "C", "rag": "B"}
    (tmp_path / "a" / "chat_template.jinja").write_text("Dü", encoding="utf-8")
    (tmp_path / "a" / "additional_chat_templates").mkdir()
    (tmp_path / "a" / "additional_chat_templates" / "rag.jinja").write_text("E")
    assert small(tmp_path / "a").chat_templates == {"default": "Dü", "rag": "E"}
    (tmp_path / "a" / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(FormatError, match=r"chat_template\.jinja: the chat template cannot be read"):
        small(tmp_path / "a")


def test_an_empty_template_is_none(tmp_path: Path) -> None:
    assert small(tmp_path / "a", tokenizer_config={"chat_template": " \n"}).chat_templates == {}


def test_bos_flags(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    assert small(tmp_path / "a", tokenizer_config=named).encode("ab") == [5]
    assert small(tmp_path / "b", tokenizer_config=named | {"add_bos_token": True}).encode("ab") == [2, 5]
    both = named | {"add_bos_token": True, "add_eos_token": True}
    assert small(tmp_path / "c", tokenizer_config=both).encode("ab") == [2, 5, 3]
    assert small(tmp_path / "d", tokenizer_config=named | {"add_bos_token": None}).encode("ab") == [5]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer: neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(SimpleNamespace(kind="safetensors", folder=tmp_path))
    (tmp_path / "tekken.json").touch()
    with pytest.raises(ModelNotFoundError, match=r"tekken\.json cannot be read: save the tokenizer once"):
        load_tokenizer(SimpleNamespace(kind="safetensors", folder=tmp_path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": "{"}, r"tokenizer_config\.json: not valid JSON"),
        ({"tokenizer_config": []}, r"tokenizer_config\.json: expected a JSON object"),
        ({"tokenizer_config": {"added_tokens_decoder": []}}, "added_tokens_decoder must be an object"),
        ({"tokenizer_config": {"added_tokens_decoder": {"x": {}}}}, "added_tokens_decoder holds an entry that is no token"),
        ({"tokenizer_config": {"added_tokens_decoder": {"5": {"content": 1}}}}, "holds an entry that is no token"),
        ({"tokenizer_config": {"added_tokens_decoder": {str(1 << 40): {"content": "x"}}}}, "has the id 1099511627776"),
        ({"added_tokens": {"x": "y"}}, r"added_tokens\.json: 'x' has 'y' for an id"),
        ({"generation_config": "nonsense"}, r"generation_config\.json: not valid JSON"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        small(tmp_path / "a", **files)


def test_a_broken_tokenizer_model_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises((FormatError, UnsupportedError), match=r"tokenizer\.model: "):
        load_tokenizer(SimpleNamespace(kind="safetensors", folder=tmp_path))

"""SentencePiece vocabularies, from tokenizer.model and from GGUF, compared with the library that made them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import assume, given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as protobuf

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.tokenizer import Tokenizer
from llmctl.runtime.tokenizer.facts import TokenType
from llmctl.runtime.tokenizer.folder_settings import FolderSettings
from llmctl.runtime.tokenizer.folder_source import describe_model
from llmctl.runtime.tokenizer.gguf_source import describe_gguf
from llmctl.runtime.tokenizer.load import build_tokenizer
from llmctl.runtime.tokenizer.spm_model import read_spm_model

LINES = [
    line
    for path in sorted(Path(__file__).parent.glob("*.py"))
    for line in path.read_text(encoding="utf-8").splitlines()
    if line.strip()
]
ODDITIES = ["the ", " the", "<s>", "<table>", "▁", "  ", "   ", "\n", "\n\n", "\t", "e\u0301", "½", "ﬁ", "<0x0A>", "42"]
ODDITIES += ["😀", "本", "\0"]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(ODDITIES)).map("".join), st.sampled_from(LINES))

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
GEMMA = PLAIN | {"byte_fallback": True, "add_dummy_prefix": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama": PLAIN | {"byte_fallback": True, "split_digits": True},
    "gemma": GEMMA | {"user_defined_symbols": ["\n", "\n\n", "▁▁", "▁▁▁", "<table>"], "control_symbols": ["<turn>"]},
    "over spaces": GEMMA | {"split_by_whitespace": False},
    "unused": GEMMA,
    "normalizing": {"normalization_rule_name": "nmt_nfkc"},
    "unknown characters": PLAIN,
}


def train(name: str) -> bytes:
    written = io.BytesIO()
    fixed = {"vocab_size": 700, "model_type": "bpe", "character_coverage": 0.998, "minloglevel": 2, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **fixed, **OPTIONS[name])
    model = protobuf.ModelProto.FromString(written.getvalue())
    if name == "unused":
        merged = [piece for piece in model.pieces if piece.type == TokenType.NORMAL and len(piece.piece) > 2]
        for piece in merged[::3]:
            piece.type = protobuf.ModelProto.SentencePiece.UNUSED
    return model.SerializeToString()


@pytest.fixture(scope="module")
def models() -> dict[str, bytes]:
    return {name: train(name) for name in OPTIONS}


@pytest.fixture(scope="module", params=OPTIONS)
def pair(request: pytest.FixtureRequest, models: dict[str, bytes]) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    data = models[request.param]
    tokenizer = build_tokenizer(describe_model(read_spm_model(data), FolderSettings()))
    return sentencepiece.SentencePieceProcessor(model_proto=data), tokenizer


@given(text=TEXTS)
def test_ids_are_the_library_s(pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    library, tokenizer = pair
    assert tokenizer.encode(text, add_special=False) == library.encode(text)


def test_long_text(pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer]) -> None:
    library, tokenizer = pair
    for text in ("\n".join(LINES), "a" * 3000, " " * 500, "".join(LINES).replace(" ", "")):
        assert tokenizer.encode(text, add_special=False) == library.encode(text)


@given(text=TEXTS)
def test_decoded_text_is_the_library_s(pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    library, tokenizer = pair
    known = "".join(letter for letter in text if library.unk_id() not in library.encode(letter))  # it writes unknown ones as ⁇
    ids = library.encode(known.lstrip(" ▁"))  # it drops many spaces at the beginning
    assume(library.unk_id() not in ids)  # normalizing may still have joined two letters to an unknown one
    assert tokenizer.decode(ids) == library.decode(ids)


def test_the_file_is_read_as_protobuf_reads_it(models: dict[str, bytes]) -> None:
    for data in models.values():
        model = protobuf.ModelProto.FromString(data)
        ours = read_spm_model(data)
        assert ours.pieces == [piece.piece.encode() for piece in model.pieces]
        assert ours.scores.tolist() == [piece.score for piece in model.pieces]
        assert ours.types.tolist() == [piece.type for piece in model.pieces]
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        assert (ours.unk_id, ours.bos_id, ours.eos_id) == (trainer.unk_id, trainer.bos_id, trainer.eos_id)
        assert ours.pad_id == trainer.pad_id == -1
        assert ours.add_dummy_prefix == normalizer.add_dummy_prefix
        assert ours.remove_extra_whitespaces == normalizer.remove_extra_whitespaces
        assert ours.charsmap == normalizer.precompiled_charsmap


def test_pieces_of_unusual_shape() -> None:
    model = protobuf.ModelProto()
    model.trainer_spec.model_type = 2
    shapes = [("a" * 127, -1.0, 1), ("b" * 200, -2.5, 4), ("c" * 40000, 0.0, 1), ("\x15\x18", 3.0, 5), ("", 1.0, 3)]
    for text, score, kind in shapes:
        model.pieces.add(piece=text, score=score, type=kind)
    model.pieces.add(piece="no score and no type")
    read = read_spm_model(model.SerializeToString())
    assert read.pieces == [piece.piece.encode() for piece in model.pieces]
    assert read.scores.tolist() == [-1.0, -2.5, 0.0, 3.0, 1.0, 0.0]
    assert read.types.tolist() == [1, 4, 1, 5, 3, 1]


@pytest.mark.parametrize("cut", [1, 2, 3, 10, 1000, 4001])
def test_a_file_cut_short_is_refused(models: dict[str, bytes], cut: int) -> None:
    with pytest.raises((FormatError, UnsupportedError)):
        read_spm_model(models["llama"][:cut])


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        read_spm_model(data)
    except (FormatError, UnsupportedError):
        return


def test_other_kinds_of_model_are_refused_by_name(models: dict[str, bytes]) -> None:
    model = protobuf.ModelProto.FromString(models["llama"])
    model.trainer_spec.model_type = 1
    with pytest.raises(UnsupportedError, match="of type Unigram; only BPE"):
        read_spm_model(model.SerializeToString())
    model.trainer_spec.model_type = 2
    model.trainer_spec.treat_whitespace_as_suffix = True
    with pytest.raises(UnsupportedError, match="as a suffix"):
        read_spm_model(model.SerializeToString())


def as_gguf(data: bytes) -> dict[str, Any]:
    """The metadata a converter writes."""
    model = protobuf.ModelProto.FromString(data)
    spaced = [piece.piece.replace("▁", " ") if piece.type == 4 else piece.piece for piece in model.pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": spaced,
        "tokenizer.ggml.scores": np.array([piece.score for piece in model.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in model.pieces], np.int32),
        "tokenizer.ggml.unknown_token_id": model.trainer_spec.unk_id,
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
    }


@pytest.fixture(scope="module", params=["llama", "gemma", "over spaces", "unused"])
def gguf_pair(request: pytest.FixtureRequest, models: dict[str, bytes]) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    data = models[request.param]
    return sentencepiece.SentencePieceProcessor(model_proto=data), build_tokenizer(describe_gguf(as_gguf(data)))


@given(text=TEXTS)
def test_ids_from_gguf_are_the_library_s(gguf_pair: tuple[sentencepiece.SentencePieceProcessor, Tokenizer], text: str) -> None:
    library, tokenizer = gguf_pair
    ids = tokenizer.encode(text, add_special=False)
    assert ids == library.encode(text)
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_user_defined_pieces_decode_to_plain_spaces(models: dict[str, bytes]) -> None:
    for tokenizer in (
        build_tokenizer(describe_gguf(as_gguf(models["gemma"]))),
        build_tokenizer(describe_model(read_spm_model(models["gemma"]), FolderSettings())),
    ):
        ids = tokenizer.encode("   x<table>", add_special=False)
        assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b"   ", b"x", b"<table>"]
        assert tokenizer.encode("<turn>", parse_special=True, add_special=False) == [tokenizer.special_tokens()["<turn>"]]


def test_prefix_first_is_for_the_beginning_only(models: dict[str, bytes]) -> None:
    model = read_spm_model(models["llama"])
    first = build_tokenizer(describe_model(model, FolderSettings(legacy=False)))
    always = build_tokenizer(describe_model(model, FolderSettings()))
    never = build_tokenizer(describe_model(model, FolderSettings(add_prefix_space=False)))
    text = "the</s>the"
    texts = [
        [tokenizer.token_text(i) for i in tokenizer.encode(text, parse_special=True, add_special=False)]
        for tokenizer in (first, always, never)
    ]
    spaced, plain = ["▁the"], ["the"]
    assert texts == [[*spaced, "</s>", *plain], [*spaced, "</s>", *spaced], [*plain, "</s>", *plain]]
    assert [t.decode(t.encode(" the")) for t in (first, always, never)] == [" the"] * 3


def _message(*pieces: tuple[bytes, int | None]) -> bytes:
    """The pieces of a ModelProto: text, score 1.5, and a type where one is given."""
    bodies = [
        bytes([0x0A, len(text)]) + text + b"\x15\x00\x00\xc0\x3f" + (b"" if kind is None else bytes([0x18, kind]))
        for text, kind in pieces
    ]
    return b"".join(bytes([0x0A, len(body)]) + body for body in bodies)


@given(st.lists(st.tuples(st.binary(max_size=100), st.sampled_from([None, 1, 3, 4, 6])), max_size=30), st.binary(max_size=12))
def test_pieces_found_in_bulk_are_those_found_one_by_one(pieces, rest):
    from llmctl.runtime.tokenizer.spm_model import _chain_of_plain_pieces, _walk_pieces

    data = _message(*pieces) + b"\x12" + rest
    at, stop = _walk_pieces(data)
    assert len(at) == len(pieces)
    found = _chain_of_plain_pieces(data)
    if found is not None:
        assert (found[0].tolist(), found[1]) == (at.tolist(), stop)


def test_pieces_of_an_ordinary_file_are_found_in_bulk():
    from llmctl.runtime.tokenizer.spm_model import _chain_of_plain_pieces

    data = _message(*((f"piece{number}".encode(), None if number % 7 else 4) for number in range(500)))
    assert _chain_of_plain_pieces(data + b"\x12\x00") is not None

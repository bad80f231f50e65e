"""Trouble that people report again and again with converters: each on a small model, by what the command line runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from llmctl.errors import FormatError, LlmctlError, UnsupportedError
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.spec import FORMATS
from llmctl.quant.compare import compare
from llmctl.quant.convert import Written
from llmctl.runtime.checkpoint import open_checkpoint
from llmctl.runtime.checkpoint.gguf_writer import GgufWriter
from llmctl.runtime.checkpoint.safetensors_writer import SafetensorsWriter
from llmctl.runtime.loading import open_model
from llmctl.runtime.tokenizer import Tokenizer, load_tokenizer

Tiny = Callable[..., Path]
Convert = Callable[..., Written]
UP, GGUF_UP = "model.layers.1.mlp.up_proj.weight", "blk.1.ffn_up.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def replace_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(load_file(folder / "model.safetensors") | tensors, folder / "model.safetensors")


def replace_tokenizer(folder: Path, document: str | dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """The folder with this tokenizer.json, and nothing else that says how to split a text."""
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / "tokenizer.json").write_text(text, "utf-8")
    (folder / "tokenizer.model").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}), "utf-8")
    return folder


class TestTiedEmbeddings:
    """A model whose head is its embedding has one matrix for both: files without lm_head must load, and must not grow one."""

    def test_no_second_copy_on_disk(self, tiny: Tiny, convert: Convert, logits: Any, tmp_path: Path) -> None:
        folder = tiny("llama", tie_word_embeddings=True)
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        output = convert(folder, tmp_path / "m.gguf").output
        with open_checkpoint(output) as checkpoint:
            assert "output.weight" not in checkpoint
            assert checkpoint.total_bytes == open_checkpoint(folder).total_bytes
        np.testing.assert_allclose(logits(output), logits(folder), atol=1e-5)

    def test_the_result_of_a_result_is_no_different(self, tiny: Tiny, convert: Convert, tmp_path: Path) -> None:
        first = convert(tiny("gemma3"), tmp_path / "a.gguf", "F16").output
        second = convert(first, tmp_path / "b.gguf").output
        assert compare(second, first).total.identical
        assert "output.weight" not in open_checkpoint(second)

    @pytest.mark.parametrize("view", [lambda a: a.T, lambda a: a[::2], lambda a: a[:, ::3], lambda a: a[::-1], np.asfortranarray])
    def test_views_are_written_with_the_right_values(self, tmp_path: Path, view: Callable[[np.ndarray], np.ndarray]) -> None:
        """Transposed, strided and reversed arrays are not in memory as they read: the memory as it lies would be wrong."""
        array = view(np.arange(24, dtype=np.float32).reshape(4, 6))
        with GgufWriter(tmp_path / "m.gguf", {}) as writer:
            writer.declare("w", FORMATS["F32"], array.shape)
            writer.write("w", array)
        with SafetensorsWriter(tmp_path) as writer:
            writer.declare("w", FORMATS["F32"], array.shape)
            writer.write("w", [array])
        for path in (tmp_path / "m.gguf", tmp_path / "model.safetensors"):
            np.testing.assert_array_equal(open_checkpoint(path).read("w"), array)


class TestBfloat16:
    """bfloat16 holds what float16 does not (100000), and has subnormals, -0 and NaN whose bits must survive."""

    ODD = np.array([1e5, 1e-40, -0.0, np.nan, -1e-45, 3e38, -np.inf, 1.0], np.float32).astype(ml_dtypes.bfloat16)

    @pytest.fixture
    def folder(self, changed: Callable[..., Path]) -> Path:
        folder = changed("llama", dtype="bfloat16")
        weight = load_file(folder / "model.safetensors")[UP].copy()
        weight[2, :8] = self.ODD
        replace_tensors(folder, {UP: weight})
        return folder

    @pytest.mark.parametrize("type_name", ["auto", "BF16"])
    def test_bits_are_kept(self, folder: Path, convert: Convert, tmp_path: Path, type_name: str) -> None:
        output = convert(folder, tmp_path / "m.gguf", type_name).output
        expected = load_file(folder / "model.safetensors")[UP]
        assert open_checkpoint(output).read(GGUF_UP).tobytes() == expected.tobytes()

    @pytest.mark.parametrize("value", [1e5, -1e5, 65536, np.inf, np.nan])
    def test_what_float16_cannot_hold_names_its_tensor(
        self, changed: Callable[..., Path], convert: Convert, tmp_path: Path, value: float
    ) -> None:
        folder = changed("llama", dtype="bfloat16")
        weight = load_file(folder / "model.safetensors")[UP].copy()
        weight[2, 7] = value
        replace_tensors(folder, {UP: weight})
        with pytest.raises(FormatError, match=f"tensor '{UP}'.*row 2, column 7"):
            convert(folder, tmp_path / "m.gguf", "F16")
        assert not (tmp_path / "m.gguf").exists()

    def test_what_float16_can_hold_is_rounded_to_nearest(self, changed: Any, convert: Convert, tmp_path: Path) -> None:
        folder = changed("llama", dtype="bfloat16")
        weight = load_file(folder / "model.safetensors")[UP].copy()
        weight[0, :4] = np.array([65280, -0.0, 1e-7, 6e-8], np.float32).astype(ml_dtypes.bfloat16)
        replace_tensors(folder, {UP: weight})
        found = open_checkpoint(convert(folder, tmp_path / "m.gguf", "F16").output).read(GGUF_UP)
        np.testing.assert_array_equal(found, weight.astype(np.float32).astype(np.float16))
        assert np.signbit(found[0, 1])


class TestRowsAndTokens:
    """Embeddings are often longer than the vocabulary (padded for the hardware), and sometimes, by mistake, shorter."""

    def folder(self, changed: Callable[..., Path], tokens: int, rows: int) -> Path:
        """A llama whose tokenizer has `tokens` tokens (256 bytes among them) and whose embedding has `rows` rows."""
        folder = changed("llama", vocab_size=rows, tokenizer="bpe") if rows != 384 else changed("llama")
        library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        document = json.loads(library.to_str())
        vocab = document["model"]["vocab"]
        bytes_only = {text: index for text, index in vocab.items() if len(text) == 1 or text.startswith("<|")}
        order = sorted(bytes_only, key=bytes_only.get)
        document["model"] |= {"vocab": {text: i for i, text in enumerate(order)}, "merges": []}
        for token in document["added_tokens"]:
            token["id"] = order.index(token["content"])
        flags = {"special": False, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        more = range(len(order), tokens)
        document["added_tokens"] += [{"id": i, "content": f"<more{i}>", **flags} for i in more]
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        return replace_tokenizer(folder, document, {"tokenizer_class": "PreTrainedTokenizerFast", **special})

    @pytest.mark.parametrize("tokens", [259, 260, 264])
    def test_rows_without_a_token_are_unused_and_never_sampled(
        self, changed: Any, convert: Convert, tmp_path: Path, tokens: int
    ) -> None:
        output = convert(self.folder(changed, tokens, 264), tmp_path / "m.gguf").output
        metadata = open_checkpoint(output).metadata
        assert len(metadata["tokenizer.ggml.tokens"]) == 264
        types = list(metadata["tokenizer.ggml.token_type"])
        assert types[tokens:] == [5] * (264 - tokens)
        assert 5 not in types[:tokens]
        assert open_model(output).num_tokens == tokens, "the sampler draws from the tokens there are"
        assert load_tokenizer(open_checkpoint(output)).encode(f"[PAD{tokens}]", parse_special=True, add_special=False) != [tokens]

    def test_tokens_without_a_row_are_named(self, changed: Any, convert: Convert, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"264 rows.*the first is '<more264>' \(id 264\)"):
            convert(self.folder(changed, 265, 264), tmp_path / "m.gguf")
        assert not (tmp_path / "m.gguf").exists()


class TestScalesBesideWeights:
    """A float8 weight is worth nothing without its scale, which may be a single number: a tensor without axes."""

    def fp8(self, changed: Callable[..., Path], scale: np.ndarray | None, name: str = "weight_scale") -> tuple[Path, np.ndarray]:
        folder = changed("llama")
        weight = load_file(folder / "model.safetensors")[UP]
        codes = (weight / np.float32(0.01)).astype(ml_dtypes.float8_e4m3fn)
        tensors = {UP: codes} | ({} if scale is None else {UP.replace("weight", name): scale})
        self.save(folder, tensors)
        return folder, codes.astype(np.float32)

    def save(self, folder: Path, tensors: dict[str, np.ndarray]) -> None:
        weights = load_file(folder / "model.safetensors") | tensors
        with SafetensorsWriter(folder) as writer:
            for key, array in weights.items():
                writer.declare(key, FORMATS["F32"] if array.dtype == np.float32 else _float8(), array.shape)
            for key, array in weights.items():
                writer.write(key, [array])

    @pytest.mark.parametrize("scale", [np.float32(0.01), np.full(1, 0.01, np.float32), np.full((160, 1), 0.01, np.float32)])
    @pytest.mark.parametrize("type_name", ["F32", "auto"])
    def test_the_scale_is_multiplied_in(
        self, changed: Any, convert: Convert, tmp_path: Path, scale: np.ndarray, type_name: str
    ) -> None:
        folder, codes = self.fp8(changed, np.asarray(scale))
        found = open_checkpoint(convert(folder, tmp_path / "m.gguf", type_name).output).read(GGUF_UP)
        np.testing.assert_allclose(dequantize(found), codes * np.float32(0.01), rtol=0.01)

    def test_a_weight_without_its_scale_is_refused_by_name(self, changed: Any, convert: Convert, tmp_path: Path) -> None:
        folder, _ = self.fp8(changed, None)
        with pytest.raises(LlmctlError, match=f"{UP}"):
            convert(folder, tmp_path / "m.gguf")
        assert not (tmp_path / "m.gguf").exists()

    def test_a_scale_that_belongs_to_nothing_is_not_dropped(self, changed: Any, convert: Convert, tmp_path: Path) -> None:
        """A number beside a weight that is no float8: whoever wrote it meant something by it."""
        folder = changed("llama", {UP.replace("weight", "weight_scale"): np.array(2.0, np.float32)})
        with pytest.raises(FormatError, match=r"up_proj\.weight_scale"):
            convert(folder, tmp_path / "m.gguf")


def _float8() -> Any:
    from llmctl.runtime.checkpoint.dtypes import SAFETENSORS_FORMATS

    return SAFETENSORS_FORMATS["F8_E4M3"]


TEXTS = ["abc 12345 don't", "1234567 1 22 333", "It's 3.14, isn't it?", "x=10;y=200", "  two  spaces\n\n\ttab", "été 北京 42"]


def byte_level(pre: Any) -> tokenizers.Tokenizer:
    """A byte-level BPE with this way to split, trained on texts whose words and numbers would merge across a wrong split."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS * 3, trainer)
    return library


LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
PLAIN_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"), PLAIN_LEVEL])


class TestDigits:
    """Byte-level vocabularies differ in how they cut numbers; a converter that guesses the rule gives other ids for them."""

    @pytest.mark.parametrize(
        "pre",
        [
            pytest.param(LEVEL, id="runs"),
            pytest.param(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), LEVEL]), id="one by one"),
            pytest.param(split(LLAMA3.replace("{1,3}", "")), id="one by one, by pattern"),
        ],
    )
    def test_the_same_ids_before_and_after(self, changed: Any, convert: Convert, tmp_path: Path, pre: Any) -> None:
        library = byte_level(pre)
        folder = replace_tokenizer(changed("llama"), library.to_str(), {"eos_token": "<|end|>"})
        output = convert(folder, tmp_path / "m.gguf").output
        for source in (folder, output):
            tokenizer = load_tokenizer(open_checkpoint(source))
            for text in TEXTS:
                assert tokenizer.encode(text, add_special=False) == library.encode(text).ids, (source, text)

    @pytest.mark.parametrize(
        ("pre", "name"),
        [
            (split(r"\p{N}{1,7}|\s+"), r"Split \\p\{N\}\{1,7\}"),
            (pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), LEVEL]), "Punctuation"),
        ],
    )
    def test_a_rule_without_a_name_is_refused(self, changed: Any, convert: Convert, tmp_path: Path, pre: Any, name: str) -> None:
        folder = replace_tokenizer(changed("llama"), byte_level(pre).to_str(), {"eos_token": "<|end|>"})
        with pytest.raises(UnsupportedError, match=rf"no name for how this tokenizer splits text \({name}.*--pre"):
            convert(folder, tmp_path / "m.gguf")
        assert not (tmp_path / "m.gguf").exists()


class TestByteTokens:
    """SentencePiece writes unknown characters as bytes, tokens named <0x0A>; a text that spells the name is not the byte."""

    @pytest.fixture
    def folder(self, changed: Callable[..., Path]) -> Path:
        """A llama with a vocabulary of SentencePiece's kind in tokenizer.json alone."""
        library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        library.normalizer = normalizers.Replace(" ", "▁")
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
        library.train_from_iterator(["a b ab <x AA 0x0"], trainer)
        document = json.loads(library.to_str())
        document["added_tokens"] = document["added_tokens"][:3]
        config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "GemmaTokenizer"}
        vocab = document["model"]["vocab"]
        ways = {a + b: [] for a, b in document["model"]["merges"]}
        document["model"]["merges"] = [
            (piece[:at], piece[at:]) for piece in ways for at in range(1, len(piece)) if {piece[:at], piece[at:]} <= vocab.keys()
        ]
        return replace_tokenizer(changed("llama"), document, config)

    def test_bytes_are_bytes_and_text_is_text(self, folder: Path, convert: Convert, tmp_path: Path) -> None:
        output = convert(folder, tmp_path / "m.gguf").output
        metadata = open_checkpoint(output).metadata
        tokens = list(metadata["tokenizer.ggml.tokens"])
        types = list(metadata["tokenizer.ggml.token_type"])
        assert [types[tokens.index(f"<0x{byte:02X}>")] for byte in range(256)] == [6] * 256
        newline = tokens.index("<0x0A>")
        for source in (folder, output):
            tokenizer = load_tokenizer(open_checkpoint(source))
            self.check_round_trip(tokenizer, newline)

    def check_round_trip(self, tokenizer: Tokenizer, newline: int) -> None:
        ids = tokenizer.encode("a\n€", add_special=False)
        assert newline in ids
        assert tokenizer.decode(ids) == "a\n€"
        for parse_special in (False, True):
            literal = tokenizer.encode("a<0x0A>b", add_special=False, parse_special=parse_special)
            assert newline not in literal
            assert tokenizer.decode(literal) == "a<0x0A>b"

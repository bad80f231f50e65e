"""A model that says what the test expects: the next token depends on the last one alone."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from chat_terminal import Terminal
from safetensors.numpy import save_file

from llmctl.cli import main

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
NUMBERS = [" one", " two", " three", " four", " five", " six", " seven", " eight"]
WORDS = ["Paris", " is", " the", " answer", " more", *NUMBERS]
CONTEXT = 20_000
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER = "Paris is the answer."


def byte(character: str | int) -> int:
    """Token id of one byte."""
    return len(SPECIAL) + (character if isinstance(character, int) else ord(character))


def word(text: str) -> int:
    """Token id of one of WORDS."""
    return len(SPECIAL) + 256 + WORDS.index(text)


def chain(*tokens: int) -> list[tuple[int, int, float]]:
    return [(first, second, 30.0) for first, second in pairwise(tokens)]


# (token, the next one, its logit); what has no entry gets the end token. Of the emoji only the bytes are tokens.
FOLLOWS = [
    *chain(byte("\n"), word("Paris"), word(" is"), word(" the"), word(" answer"), byte("."), END),
    *chain(byte("A"), word("Paris")),
    *chain(byte("E"), *(byte(b) for b in "🙂".encode()), END),
    *chain(byte("B"), byte(0x1B), byte("["), byte("3"), byte("m"), END),
    *chain(byte("M"), word(" more"), word(" more")),
    (byte("."), word(" more"), 10.0),
    *((start, word(number), 30.0) for start in (byte("R"), *map(word, NUMBERS)) for number in NUMBERS),
]


def write_scripted_model(folder: Path, *, template: str | None = TEMPLATE, **generation: object) -> Path:
    """A Hugging Face folder of the llama family whose layers add nothing: logits are a table over the last token.

    After "A", or after the template's assistant line, it says ANSWER and ends (with the end token forbidden it goes on
    with " more" for ever, as after "M"); after "R" it draws numbers for ever; after "E" it says an emoji, after "B" an
    escape sequence. generation: fields of generation_config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = len(SPECIAL) + 256 + len(WORDS)
    config = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": vocab_size,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": END,
        "bos_token_id": 1,
    }
    _write_json(folder / "config.json", config)
    if generation:
        _write_json(folder / "generation_config.json", generation)
    save_file(_tensors(vocab_size), folder / "model.safetensors")
    _write_json(folder / "tokenizer.json", _tokenizer())
    special = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[END], "add_bos_token": False}
    chat = {} if template is None else {"chat_template": template}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special, **chat})
    return folder


def _tensors(size: int) -> dict[str, np.ndarray]:
    table = np.zeros((size, size), dtype=np.float32)
    table[END, [t for t in range(size) if t not in {first for first, _, _ in FOLLOWS}]] = 30.0
    for first, second, logit in FOLLOWS:
        table[second, first] = logit
    prefix, f32 = "model.layers.0.", np.float32
    return {
        "model.embed_tokens.weight": np.eye(size, dtype=f32),
        "lm_head.weight": table / f32(size) ** f32(0.5),  # the norm makes the one of a one-hot row sqrt(size)
        "model.norm.weight": np.ones(size, f32),
        prefix + "input_layernorm.weight": np.ones(size, f32),
        prefix + "post_attention_layernorm.weight": np.ones(size, f32),
        **{f"{prefix}self_attn.{name}_proj.weight": np.zeros((8, size), f32) for name in "qkv"},
        prefix + "self_attn.o_proj.weight": np.zeros((size, 8), f32),
        **{f"{prefix}mlp.{name}_proj.weight": np.zeros((4, size), f32) for name in ("gate", "up")},
        prefix + "mlp.down_proj.weight": np.zeros((size, 4), f32),
    }


def _tokenizer() -> dict[str, object]:
    """Byte-level BPE without merges; the words are added tokens."""
    added = [
        {"id": i, "content": text, "special": i < 3, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
        for i, text in [*enumerate(SPECIAL), *((word(text), text) for text in WORDS)]
    ]
    vocab = {**{text: i for i, text in enumerate(SPECIAL)}, **{_letter(b): byte(b) for b in range(256)}}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": False, "ignore_merges": False}
    steps = {"normalizer": None, "pre_tokenizer": level, "decoder": level, "post_processor": None}
    return {"version": "1.0", "added_tokens": added, **steps, "model": model}


def _letter(value: int) -> str:
    """GPT-2's letter for a byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(value) if value in printable else chr(0x100 + [b for b in range(256) if b not in printable].index(value))


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Path:
    """The scripted model, with a ChatML template."""
    return write_scripted_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="session")
def untemplated(tmp_path_factory) -> Path:
    """The scripted model without a chat template."""
    return write_scripted_model(tmp_path_factory.mktemp("models") / "untemplated", template=None)


class Done(NamedTuple):
    """How a command line ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(capsys, monkeypatch) -> Callable[..., Done]:
    """Runs llmctl in this process, off a terminal, where no process of its own is needed: `call("run", …, stdin=b"…")`."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*arguments: object, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return Done(code, output.out, output.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def broken_extension(tmp_path: Path) -> dict[str, str]:
    """An environment in which the native extension cannot be loaded."""
    fault = "the fault of the test"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys\n"
        "class Broken:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'llmctl.kernels.native._native':\n"
        f"            raise ImportError({fault!r})\n"
        "sys.meta_path.insert(0, Broken())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])}


@pytest.fixture
def terminal(llmctl_script, scripted, tmp_path):
    """Opens a chat with the scripted model: `terminal("--temp", "0")`."""
    opened: list[Terminal] = []

    def begin(
        *arguments: object, model: Path = scripted, home: Path = tmp_path / "home", env: dict[str, str] | None = None
    ) -> Terminal:
        opened.append(Terminal(llmctl_script, model, *arguments, home=home, env=env or {}))
        return opened[-1]

    yield begin
    for chat in opened:
        chat.close()

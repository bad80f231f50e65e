"""What the tests of tokenizers share: public vocabularies, and for templates transformers' own renderer, both clocks stopped."""

from __future__ import annotations

import datetime
import functools
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from llmctl.errors import ChatTemplateError
from llmctl.runtime.checkpoint.gguf import GgufCheckpoint
from llmctl.runtime.tokenizer.chat_template import render_chat

Messages = Sequence[Mapping[str, Any]]
NOW = datetime.datetime(2025, 3, 4, 5, 6, 7)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class StoppedClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
        return NOW


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({token: index for index, token in enumerate(SPECIAL.values())}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


class Judge:
    """transformers' apply_chat_template and our render_chat, given the same."""

    now = NOW
    special = SPECIAL

    def render(self, template: str | None, messages: Messages, **given: Any) -> str:
        """Ours."""
        return render_chat(template, messages, special=SPECIAL, clock=lambda: NOW, **given)

    def verdict(self, template: str, messages: Messages, **given: Any) -> str | Exception:
        """Theirs: the text, or what was raised."""
        import transformers.utils.chat_template_utils as utils

        try:
            with mock.patch.object(utils, "datetime", StoppedClock):
                return _tokenizer().apply_chat_template(messages, chat_template=template, tokenize=False, **given)
        except Exception as error:
            return error

    def refused(self, template: str | None, messages: Any, **given: Any) -> str:
        """The message of the error with which ours refuses."""
        with pytest.raises(ChatTemplateError) as caught:
            self.render(template, messages, **given)
        return str(caught.value)

    def agrees(self, template: str, messages: Messages, **given: Any) -> str | None:
        """Assert that both give the same text (returned) or both refuse (None)."""
        given = {"add_generation_prompt": True, **given}  # the defaults differ
        expected = self.verdict(template, messages, **given)
        if isinstance(expected, str):
            assert self.render(template, messages, **given) == expected
            return expected
        message = self.refused(template, messages, **given)
        assert "\n" not in message
        if type(expected).__name__ == "TemplateError":  # raise_exception: the template's own words
            assert " ".join(str(expected).split()) in " ".join(message.split())
        return None


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


# What the tests of vocabularies share.

VOCABULARIES = ("deepseek-coder", "gpt-2", "llama-bpe", "llama-spm", "phi-3", "qwen2")
VOCABULARY_DATA = Path(__file__).parents[2] / "data" / "vocab"


@pytest.fixture(scope="session", autouse=True)
def tokenizer_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of our own, so that no prepared tokenizer of an earlier run is found."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLMCTL_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GgufCheckpoint]:
    """Opens one of the public vocabularies by name."""
    folder = tmp_path_factory.mktemp("vocab")

    @functools.cache
    def unpack(name: str) -> GgufCheckpoint:
        path = folder / f"ggml-vocab-{name}.gguf"
        path.write_bytes(lzma.decompress((VOCABULARY_DATA / f"{path.name}.xz").read_bytes()))
        return GgufCheckpoint(path)

    return unpack


@pytest.fixture(params=VOCABULARIES)
def vocabulary_name(request: pytest.FixtureRequest) -> str:
    """Each of the public vocabularies."""
    return request.param

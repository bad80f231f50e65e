"""Whether two tokenizers give the same ids: the check after one was made from the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llmctl.errors import FormatError
from llmctl.runtime.tokenizer.tokenizer import Tokenizer

# Everything splitting rules and normalizers treat differently: digits in runs, contractions in both cases, white space of
# all kinds, scripts with and without spaces, marks, emoji with joiners, code, and spellings that look like special tokens.
PROBES = (
    "",
    " ",
    "Hello, world!",
    " leading, trailing ",
    "abc 12345 don't",
    "I'll say we've DON'T WE'RE it's 'tis o'clock",
    "1 22 333 4444 55555 666666 7777777 3.14159 1,000,000 0x1F ½ ² ٣٤٥",
    "tabs\tand\t\ttabs, lines\nand\n\nlines\r\nand\n \n  spaces   between    words     here",
    "def f(x):\n    return {'a': [x**2 for x in range(10)]}  # comment\n\n\nclass A:\n\tpass\n",
    "<div class=\"a-b_c\">&nbsp;</div> https://example.org/a?b=c&d=%20#e user@example.org",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING iPhone McDonald's XMLHttpRequest",
    "Ünïcödé naïve façade Straße İstanbul ΑΒΓ αβγ привет мир ПРИВЕТ",
    "北京市は東京都と上海市 한국어 텍스트 ภาษาไทย हिन्दी العربية עברית",
    "👍🏽 👨‍👩‍👧‍👦 🇩🇪 ☃️ e\u0327 a\u0308 \u200b\ufeff\u00a0nbsp\u3000wide",
    "!!!??? ...---*** «quotes» “curly” ‘single’ —dash– (a)[b]{c}<d> $5 €6 £7 ¥8 100% #1 @x",
    "<0x0A> <|nothing|> <s> </s> [INST] <unk> <pad> ▁underscore ▁▁ Ġspace Ċline",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa ababababababababab ....................",
    "supercalifragilisticexpialidocious antidisestablishmentarianism 123abc456def",
    "\u0000\u0001\u001f\u007f\u0080 control \u2028 \u2029 \U0001f9ff\U0002a6d6",
)
_SURROUNDED = "Hello, world!"  # one of them
_TRIED = 500  # added tokens tried, evenly spread: some vocabularies have thousands of unused ones


@dataclass(frozen=True)
class Difference:
    """A text that two tokenizers read differently: its ids in the one and the other."""

    text: str
    expected: list[int]
    found: list[int]

    def __str__(self) -> str:
        at = next(
            (i for i, (a, b) in enumerate(zip(self.expected, self.found, strict=False)) if a != b),
            min(len(self.expected), len(self.found)),
        )
        return (
            f"{self.text[:60]!r} becomes {_shown(self.found, at)} instead of {_shown(self.expected, at)}, from token {at} on"
        )


def _shown(ids: list[int], start: int) -> str:
    return "[" + ", ".join(map(str, ids[start : start + 6])) + (", …]" if ids[start + 6 :] else "]")


def find_library_difference(expected: Tokenizer, document: bytes, added: Sequence[str] = ()) -> Difference | None:
    """The first text that the `tokenizers` library encodes differently with this tokenizer.json, or None.

    FormatError for a document the library does not load.
    """
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_str(document.decode())
    except Exception as error:  # the library raises nothing narrower
        raise FormatError(f"the tokenizers library does not load the tokenizer.json made: {error}") from error
    for text in probe_texts(added):
        # What surrounds a text is compared for one alone: the library doubles a BOS that is spelled out, we do not.
        around = text == _SURROUNDED
        pair = (
            expected.encode(text, add_special=around, parse_special=True),
            found.encode(text, add_special_tokens=around).ids,
        )
        if pair[0] != pair[1]:
            return Difference(text, *pair)
    return None


def find_difference(expected: Tokenizer, found: Tokenizer, added: Sequence[str] = ()) -> Difference | None:
    """The first text the two encode differently, or None.

    added: texts of added tokens, tried alone and inside text. Every text is tried with special tokens parsed and not.
    """
    for text in probe_texts(added):
        for parse_special in (False, True):
            pair = [tokenizer.encode(text, parse_special=parse_special) for tokenizer in (expected, found)]
            if pair[0] != pair[1]:
                return Difference(text, *pair)
    return None


def probe_texts(added: Sequence[str]) -> Iterator[str]:
    """Texts that tell tokenizers apart, and the added tokens (a spread of them) alone and inside text."""
    yield from PROBES
    chosen = added[:: max(1, len(added) // _TRIED)]
    yield from chosen
    yield "a".join(chosen)
    yield " word ".join(chosen[:20])

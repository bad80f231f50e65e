"""How byte-level BPE vocabularies cut text into words before merging: the rules GGUF names, as data.

A rule is a list of patterns, applied one after the other: each cuts every piece so far into its matches and what lies
between them. The patterns are those of the models' own tokenizer.json, in the syntax of the `tokenizers` library (it
compiles them with Oniguruma), not the approximations readers without Unicode classes use. The names are llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llmctl.errors import UnsupportedError
from llmctl.runtime.checkpoint.text import quoted

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NO_HAN = r"&&[^\p{Han}]]"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?") + rf"|\p{{N}}{{1,3}}|{_CASED_TAIL}"
_DIGITS_OF_3 = r"\p{N}{1,3}"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_WORDS = rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class Rule:
    """A way to cut text.

    patterns: applied in order. byte_level: the words' bytes are written as the 256 letters of GPT-2; else they are UTF-8
    with ▁ for the space. ignore_merges: a word that is a token is taken whole. add_bos: what holds if the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


_LLAMA3_RULE = Rule((_LLAMA3,), ignore_merges=True, add_bos=True)
_SMOLLM_RULE = Rule((r"\p{N}", GPT2))
_DEEPSEEK3_RULE = Rule((_DIGITS_OF_3, _CJK, rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"))
_BAILING_RULE = Rule(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_AYA_RULE = Rule((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
_KIMI_UPPER, _KIMI_LOWER = "[" + _UPPER[1:-1] + _NO_HAN, "[" + _LOWER[1:-1] + _NO_HAN
_KIMI = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN = "[一-龥ࠀ-一가-퟿]+"

# The first name of each rule is the one a rule found in a tokenizer.json is written under.
RULES: dict[str, Rule] = {
    "gpt-2": Rule((GPT2,)),
    "llama-bpe": _LLAMA3_RULE,
    "qwen2": Rule((_QWEN2,)),
    "smollm": _SMOLLM_RULE,
    "default": Rule((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "dbrx": replace(_LLAMA3_RULE, ignore_merges=False, add_bos=False),
    "glm4": replace(_LLAMA3_RULE, add_bos=False),
    "deepseek-llm": Rule(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Rule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")),
    "deepseek-v3": _DEEPSEEK3_RULE,
    "spark2_5": Rule((_DIGITS_OF_3, _CJK, rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    "youtu": Rule(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?") + rf"|\p{{N}}|{_CASED_TAIL}",
        ),
        ignore_merges=True,
    ),
    "falcon": Rule((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "qwen35": Rule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "bloom": Rule((_BLOOM,)),
    "viking": Rule((_BLOOM, r"\p{N}")),
    "tekken": Rule((_CASED % ("", "") + rf"|\p{{N}}|{_CASED_TAIL}",), ignore_merges=True, add_bos=True),
    "gpt-4o": Rule((_GPT4O,)),
    "granite-embed-multi-97m": Rule((_GPT4O,), ignore_merges=True),
    "tiny_aya": _AYA_RULE,
    "kimi-k2": Rule((_KIMI,)),
    "superbpe": Rule((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe": _BAILING_RULE,
    "seed-coder": Rule((rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": Rule((rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}",)),
    "jais-2": Rule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|"
            + "|".join(rf"\s{{{size}}}(?!\S)" for size in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
            + r"|\s{1}",
        )
    ),
    "afmoe": Rule(
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            rf"{_DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
        )
    ),
    "laguna": Rule((_LINES, _QWEN2)),
    "exaone-moe": Rule(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": Rule(
        (
            _DIGITS_OF_3,
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+|{_PUNCTUATION}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "chameleon": Rule(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "gemma4": Rule((_LINES,), add_bos=True, byte_level=False),
    "sarvam-moe": Rule((_LINES,), byte_level=False),
}

_ALIASES: dict[str, tuple[str, ...]] = {
    "gpt-2": (
        "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert",
        "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4",
    ),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "qwen2": (
        "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2",
    ),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "dbrx": ("smaug-bpe", "chatglm-bpe"),
    "glm4": ("glm5",),
    "deepseek-v3": ("hunyuan-dense", "hy_v4", "joyai-llm"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "tiny_aya": ("cohere2moe",),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
    "gemma4": ("granite-embed-multi-311m",),
}  # fmt: skip
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}


def rule(name: str) -> Rule:
    """The rule of this name; UnsupportedError if there is none."""
    found = RULES.get(_NAMES.get(name, name))
    if found is None:
        raise UnsupportedError(
            f"unknown pre-tokenizer rule {quoted(name)} (tokenizer.ggml.pre); known: {', '.join(sorted({*RULES, *_NAMES}))}"
        )
    return found


def to_json(chosen: Rule) -> dict[str, Any]:
    """The rule as the pre_tokenizer of a tokenizer.json."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in chosen.patterns
    ]
    if chosen.byte_level:
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    return {"type": "Sequence", "pretokenizers": steps}


def rule_name(pre_tokenizer: dict[str, Any] | None, *, ignore_merges: bool) -> str | None:
    """The name under which GGUF knows the pre_tokenizer of a tokenizer.json, or None if it has none.

    ignore_merges: of the same file's model; GGUF has no key for it, so it is part of the rule.
    """
    patterns = _patterns(pre_tokenizer)
    for name, known in RULES.items():
        if known.byte_level and known.patterns == patterns and known.ignore_merges == ignore_merges:
            return name
    return None


def _patterns(step: dict[str, Any] | None) -> tuple[str, ...] | None:
    """The pre_tokenizer as patterns that isolate their matches, if it is only that and ends in ByteLevel."""
    steps = _flatten(step)
    if not steps or steps[-1].get("type") != "ByteLevel":
        return None
    found = [_pattern(one) for one in steps]
    return None if None in found else tuple(pattern for pattern in found if pattern)


def _flatten(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for one in step.get("pretokenizers", []) for inner in _flatten(one)]
    return [step]


def _pattern(step: dict[str, Any]) -> str | None:
    """One step as a pattern ("" for none), or None if no pattern does the same."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step.get("add_prefix_space", True):
        return GPT2 if step.get("use_regex", True) else ""
    if kind == "Digits":
        return r"\p{N}" if step.get("individual_digits") else r"\p{N}+"
    if kind == "Split" and step.get("behavior") in ("Isolated", "Removed") and not _removes(step):
        return step.get("pattern", {}).get("Regex")
    return None


def _removes(step: dict[str, Any]) -> bool:
    """Whether a Split drops text. Removed with invert keeps the matches, and drops what a full pattern leaves: nothing."""
    return step["behavior"] == "Removed" and not step.get("invert", False)

"""What a folder says about how its weights were quantized, wherever and however it spells it.

Sources: `quantization_config` of config.json (older compressed-tensors: `compression_config`), then quantize_config.json
(AutoGPTQ, GPTQModel) and quant_config.json (AutoAWQ) beside it. What the first says counts; the others fill its gaps.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.huggingface import read_optional_json
from llmctl.runtime.checkpoint.text import quoted

_log = logging.getLogger(__name__)

_IN_CONFIG = ("quantization_config", "compression_config")
_BESIDE = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
# Key → the ways it is spelled, the usual one first.
_SPELLINGS = {
    "quant_method": ("quant_method", "method"),
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size", "groupsize"),
    "checkpoint_format": ("checkpoint_format", "format"),
    "version": ("version", "format"),
}
_REFUSED_METHODS = {
    "bitsandbytes": "load it with transformers, call model.dequantize(), save it and convert that folder",
    "auto-round": "export it again with the format auto_gptq or auto_awq",
}
_ANYTHING_ELSE = "take the original weights, or export them as GPTQ, AWQ (GEMM) or compressed-tensors"
METHODS = ("gptq", "awq", "compressed-tensors", "fp8", "fbgemm_fp8", "modelopt", "mxfp4")
"""quant_method values that are read."""
_MAX_PATTERN = 1000
_NESTED_REPEAT = re.compile(r"[*+}]\)[*+{]")


@dataclass(frozen=True)
class Settings:
    """The quantization a folder states. where: the file and key, for messages. method: one of METHODS."""

    where: str
    method: str
    values: dict[str, Any]

    def value(self, key: str) -> Any:
        """The value under any spelling of the key, None where it is absent; FormatError where two spellings disagree."""
        spelled = {name: self.values[name] for name in _SPELLINGS.get(key, (key,)) if self.values.get(name) is not None}
        found = list(spelled.values())
        if any(_folded(one) != _folded(found[0]) for one in found):
            raise FormatError(f"{self.where}: {' and '.join(spelled)} contradict each other: {quoted(spelled)}")
        return found[0] if found else None

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.value(key)
        if value is not None and not isinstance(value, bool):
            raise FormatError(f"{self.where}: {key!r} must be true or false, found {quoted(value)}")
        return default if value is None else value

    def bits(self) -> int:
        """Bits of a code, 2 to 8."""
        return checked_bits(f"{self.where}: 'bits'", self.value("bits"))

    def group_size(self) -> int:
        """Columns of a group, −1 for whole rows."""
        return checked_group_size(f"{self.where}: 'group_size'", self.value("group_size"))


def checked_bits(where: str, value: Any) -> int:
    """The value itself; FormatError unless it is a number of bits that codes have."""
    if isinstance(value, bool) or not isinstance(value, int) or not 2 <= value <= 8:
        raise FormatError(f"{where} must be a number of bits from 2 to 8, found {quoted(value)}")
    return value


def checked_group_size(where: str, value: Any) -> int:
    """The value itself; FormatError unless it is a number of columns or −1, the whole row."""
    if isinstance(value, bool) or not isinstance(value, int) or (value != -1 and value < 1):
        raise FormatError(f"{where} must be a number of columns, or -1 for whole rows, found {quoted(value)}")
    return value


def checked_pattern(where: str, text: Any) -> re.Pattern[str]:
    """A regular expression of a config; FormatError for one that is none, or that could take for ever to match."""
    if not isinstance(text, str) or len(text) > _MAX_PATTERN or _NESTED_REPEAT.search(text):
        raise FormatError(f"{where}: {quoted(text)} is no pattern for module names that is safe to use")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(f"{where}: {quoted(text)} is no regular expression: {error}") from error


def read_settings(folder: Path, config: dict[str, Any]) -> Settings | None:
    """How the weights in the folder were quantized, None where nothing says they were.

    Errors: FormatError for values of the wrong kind, UnsupportedError, with what to do, for a method that is not read.
    """
    stated = [(f"{folder / 'config.json'}: {key}", config[key]) for key in _IN_CONFIG if config.get(key) is not None]
    for name, method in _BESIDE.items():
        if values := read_optional_json(folder / name):
            stated.append((str(folder / name), {"quant_method": method, **values}))
    for where, values in stated:
        if not isinstance(values, dict):
            raise FormatError(f"{where} must be an object, found {quoted(values)}")
    if not stated:
        return None
    where, values = stated[0]
    for other, more in stated[1:]:
        _name_differences(where, values, other, more)
        values = {**more, **values}
    return Settings(where, _method(where, values), values)


def _folded(value: Any) -> Any:
    """Words whatever their case: AutoAWQ writes GEMM and gemm."""
    return value.lower() if isinstance(value, str) else value


def _name_differences(where: str, values: dict[str, Any], other: str, more: dict[str, Any]) -> None:
    different = [key for key in values.keys() & more.keys() if _folded(values[key]) != _folded(more[key])]
    if different:
        _log.warning("%s and %s differ in %s: the first counts", where, other, ", ".join(sorted(different)))


def _method(where: str, values: dict[str, Any]) -> str:
    method = values.get("quant_method", values.get("method"))
    if not isinstance(method, str):
        raise FormatError(f"{where}: quant_method must be one of {', '.join(METHODS)}, found {quoted(method)}")
    name = method.lower().replace("compressed_tensors", "compressed-tensors")
    if name not in METHODS:
        advice = _REFUSED_METHODS.get(name, _ANYTHING_ELSE)
        raise UnsupportedError(f"{where}: weights quantized with {quoted(method)} cannot be read: {advice}")
    return name

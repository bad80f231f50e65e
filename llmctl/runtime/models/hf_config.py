"""A config.json read strictly: every value is checked before it is used, and what is wrong is named."""

from __future__ import annotations

import math
from typing import Any

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.text import quoted

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000  # choices are kept per layer: a claim must not cost memory before its tensors are missed
MAX_HEAD_DIM = 1 << 16


class HfConfig:
    """The values of a config.json, whatever they may be."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None, limit: int = MAX_COUNT) -> int:
        """A positive integer up to `limit`."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"config.json: {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"config.json: {key!r} must be a positive integer, found {quoted(value)}")
        if value > limit:
            raise FormatError(f"config.json: {key!r} is {quoted(value)}, the limit is {limit}")
        return value

    def layers(self) -> int:
        """num_hidden_layers."""
        return self.integer("num_hidden_layers", limit=MAX_LAYERS)

    def head_dim(self, default: int | None = None) -> int:
        """head_dim; without it `default`, else hidden_size / heads."""
        if self.values.get("head_dim") is None and default is None:
            default = self.integer("hidden_size") // self.integer("num_attention_heads")
        return self.integer("head_dim", default, limit=MAX_HEAD_DIM)

    def positive(self, key: str, default: float) -> float:
        """A number above zero; `default` where the key is absent or null."""
        value = self.optional_positive(key)
        return default if value is None else value

    def optional_positive(self, key: str) -> float | None:
        """A number above zero, or None."""
        value = self.values.get(key)
        return None if value is None else positive_number(value, key)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise FormatError(f"config.json: {key!r} must be true or false, found {quoted(value)}")
        return value

    def text(self, key: str, default: str) -> str:
        """A string; `default` where the key is absent or null."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise FormatError(f"config.json: {key!r} must be a string, found {quoted(value)}")
        return value

    def refuse(self, key: str, accepted: tuple[Any, ...], why: str) -> None:
        """UnsupportedError when a key holds something this family's file does not assume."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise UnsupportedError(f"config.json: {key} = {quoted(value)} is not supported: {why}")

    def eos_token_ids(self) -> tuple[int, ...]:
        """eos_token_id as a tuple, whether it is absent, an integer or a list."""
        return token_ids(self.values.get("eos_token_id"), "config.json: 'eos_token_id'")

    def layer_types(self, num_layers: int) -> list[str] | None:
        """The list of layer types, checked for length; None where the config has none."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
            raise UnsupportedError(
                f"config.json: layer_types must be {num_layers} of {' / '.join(known)}, found {quoted(types)}"
            )
        return types


def positive_number(value: Any, what: str) -> float:
    """`value` as a float; FormatError unless it is a finite number above zero."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        try:
            return float(value)
        except OverflowError:  # an integer beyond any float
            pass
    raise FormatError(f"config.json: {what} must be a positive number, found {quoted(value)}")


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Token ids written as nothing, a number or a list. where: leads the FormatError for anything else."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) for one in listed):
        raise FormatError(f"{where} must be a token id or a list of them, found {quoted(value)}")
    return tuple(listed)

"""ModelConfig: what the forward pass needs to know, whatever family and file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmctl.errors import FormatError, UnsupportedError
from llmctl.kernels.swiglu import ACTIVATIONS
from llmctl.runtime.cache.memory import LayerShape
from llmctl.runtime.models.rope import RopeConfig


@dataclass(frozen=True)
class LayerConfig:
    """Choices of one decoder layer.

    sliding_window: tokens a query sees, itself included; None sees everything before it.
    rope: how its positions turn; None for a layer without positions.
    """

    sliding_window: int | None
    rope: RopeConfig | None


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and choices of one model, in Hugging Face's names.

    attention_scale: factor on q·k. attention_bias, attention_out_bias: on q/k/v and on o. embedding_scale: factor on embedded
    tokens. norm_offset: added to stored norm weights (1.0 for families that store w of 1 + w). qk_norm: RMSNorm over every
    query and key head. sandwich_norms: a norm after attention and after the MLP as well as before. residual_scale: factor on
    what a block adds. logit_scale multiplies the logits, final_softcap bounds them.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    activation: str
    tie_word_embeddings: bool
    layers: tuple[LayerConfig, ...]
    attention_scale: float
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    attention_softcap: float | None = None
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise FormatError(f"config.json: {self.num_heads} query heads cannot share {self.num_kv_heads} kv heads")
        if len(self.layers) != self.num_layers:
            raise FormatError(f"config.json: {self.num_layers} layers, but choices for {len(self.layers)}")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"config.json: activation {self.activation!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )

    def kv_layers(self) -> tuple[LayerShape, ...]:
        """What each layer keeps in the KV cache."""
        return tuple(LayerShape(self.num_kv_heads, self.head_dim, layer.sliding_window) for layer in self.layers)


class HfConfig:
    """A config.json read strictly: every number is checked, and what is missing is named."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.values.get(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"config.json: {key!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"config.json: {key!r} must be a positive integer, found {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """A number; `default` where the key is absent or null."""
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        """A number or None."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise FormatError(f"config.json: {key!r} must be a number, found {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise FormatError(f"config.json: {key!r} must be true or false, found {value!r}")
        return value

    def refuse(self, key: str, accepted: tuple[Any, ...], why: str) -> None:
        """UnsupportedError when a key holds something this family's file does not assume."""
        value = self.values.get(key)
        if value is not None and value not in accepted:
            raise UnsupportedError(f"config.json: {key} = {value!r} is not supported: {why}")

    def eos_token_ids(self) -> tuple[int, ...]:
        """eos_token_id as a tuple, whether it is absent, an integer or a list."""
        value = self.values.get("eos_token_id")
        if value is None:
            return ()
        return tuple(value) if isinstance(value, list) else (int(value),)

    def layer_types(self, num_layers: int) -> list[str] | None:
        """The list of layer types, checked for length; None where the config has none."""
        types = self.values.get("layer_types")
        if types is None:
            return None
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
            raise UnsupportedError(f"config.json: layer_types must be {num_layers} of {' / '.join(known)}, found {types!r}")
        return types

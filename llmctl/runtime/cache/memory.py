"""How many bytes a KV cache takes: one set of numbers for the engine's allocation and for `inspect-kv`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Bytes per element of a cache type: block types store whole blocks along head_dim.
_PLAIN = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "fp8": 1.0}
_BLOCK = {"q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22), "q4_1": (32, 20), "q4_0": (32, 18)}
KV_TYPES = (*_PLAIN, *_BLOCK)


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps per token: num_kv_heads · head_dim elements for keys and as many for values.

    sliding_window: tokens a query can still see; None for all. latent: above zero, the values are so many of the keys' own
    elements, and nothing is kept for them.
    """

    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    latent: int = 0


def row_bytes(elements: int, kv_type: str) -> int | None:
    """Bytes of one head's vector of `elements` numbers; None where the type's blocks do not divide it."""
    if kv_type in _PLAIN:
        return int(elements * _PLAIN[kv_type])
    per_block, block_bytes = _BLOCK[kv_type]
    blocks, rest = divmod(elements, per_block)
    return None if rest else blocks * block_bytes


def layer_bytes_per_token(layer: LayerShape, kv_type: str) -> int | None:
    """Bytes of keys and values one token adds to a layer; None where the type does not fit head_dim."""
    row = row_bytes(layer.head_dim, kv_type)
    return None if row is None else (1 if layer.latent else 2) * layer.num_kv_heads * row


def bytes_per_token(layers: Sequence[LayerShape], kv_type: str) -> int | None:
    """Bytes one token adds over all layers; None where the type does not fit some layer."""
    sizes = [layer_bytes_per_token(layer, kv_type) for layer in layers]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def cache_bytes(
    layers: Sequence[LayerShape], kv_type: str, context: int, batch: int = 1, *, windowed: bool = False
) -> int | None:
    """Bytes for `batch` sequences of `context` tokens; None where the type does not fit some layer.

    The engine keeps every token of every layer. windowed: count only the tokens a sliding-window layer can still see, the
    least the architecture needs.
    """
    total = 0
    for layer in layers:
        size = layer_bytes_per_token(layer, kv_type)
        if size is None:
            return None
        total += size * (min(context, layer.sliding_window or context) if windowed else context)
    return total * batch

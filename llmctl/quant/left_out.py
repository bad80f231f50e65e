"""Which tensors of a checkpoint are no part of the text model: named where they are known, refused where they are not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from llmctl.errors import UnsupportedError
from llmctl.runtime.checkpoint.text import quoted
from llmctl.runtime.models.weights import ModelWeights

_LAYER = re.compile(r"^(?:model\.|blk\.)(?:layers\.)?(\d+)\.")
# Heads that guess further tokens, as they are called outside the numbered layers.
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn|eh_proj|enorm|hnorm)(?:_\w+)?\.")
_GROUP = re.compile(r"(?:model\.layers\.\d+|blk\.\d+|(?:model\.)?[^.]+)")


def left_out_of(weights: ModelWeights, needed: Iterable[str]) -> list[str]:
    """The stored tensors that a conversion leaves out, vision and sound first.

    Known are the parts of a multimodal model, and layers beyond those the config counts with other heads that predict
    further tokens. UnsupportedError naming any other: what it is for is not known, and without it the model may be another.
    FormatError as `ModelWeights.unneeded`.
    """
    others = weights.unneeded(needed)
    unknown = [name for name in others if not _is_further_layer(name, weights.config.num_layers) and not _MTP.search(name)]
    if unknown:
        more = f" (and {len(unknown) - 1} more)" if unknown[1:] else ""
        raise UnsupportedError(
            f"{weights.checkpoint.path}: tensor {quoted(unknown[0])} has no place in a {weights.family.name} model{more}, "
            "and is none that can be left out"
        )
    return [*weights.left_out, *others]


def _is_further_layer(name: str, num_layers: int) -> bool:
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= num_layers


def summary(names: Iterable[str]) -> str:
    """The tensors by what they belong to: vision_tower (236 tensors), model.layers.30 (12 tensors)."""
    groups: Counter[str] = Counter()
    for name in names:
        found = _GROUP.match(name)
        groups[found[0] if found else name] += 1
    return ", ".join(f"{group} ({count} tensor{'s' if count > 1 else ''})" for group, count in groups.items())

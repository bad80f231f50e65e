"""g_idx of packed checkpoints: the group of each input row, which a reader uses as an index unchecked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from llmctl.quant.findings import Finding
from llmctl.runtime.checkpoint.checkpoint import Checkpoint

CHECK = "groups"
# Name of the index of a module → name of its scales, and the axis of theirs that counts the groups.
_SCALES = {"weight_g_idx": ("weight_scale", -1), "g_idx": ("scales", 0)}


def check_group_indices(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Indices that are no whole numbers, or name a group that the module's scales do not have."""
    for name in checkpoint.names():
        module, _, kind = name.rpartition(".")
        if kind not in _SCALES:
            continue
        scales, axis = _SCALES[kind]
        if f"{module}.{scales}" not in checkpoint:
            yield Finding("error", CHECK, f"there are no {scales} beside it", name)
            continue
        shape = checkpoint.entry(f"{module}.{scales}").shape
        yield from _check(checkpoint, name, shape[axis] if shape else 0)


def _check(checkpoint: Checkpoint, name: str, groups: int) -> Iterator[Finding]:
    index = checkpoint.read(name)
    if not isinstance(index, np.ndarray) or index.dtype.kind not in "iu" or index.ndim != 1:
        yield Finding("error", CHECK, f"expected a row of whole numbers, found {checkpoint.entry(name).format.name}", name)
        return
    wrong = (index < 0) | (index >= groups)
    if wrong.any():
        at, count = int(wrong.argmax()), np.count_nonzero(wrong)
        message = f"{count} of {len(index)} entries are not in [0, {groups}), the first {index[at]} at {at}"
        yield Finding("error", CHECK, message, name)

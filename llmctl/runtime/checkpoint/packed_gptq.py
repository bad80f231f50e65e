"""GPTQ as AutoGPTQ and GPTQModel write it: qweight, qzeros, scales, g_idx.

The codes are packed along the rows of the file, which are the weight's columns. Version 1 stores zero points less one, which
wraps around for a zero point of 0; version 2 stores them as they are.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np

from llmctl.errors import FormatError, UnsupportedError
from llmctl.runtime.checkpoint.packed_bits import unpack_codes, words_for
from llmctl.runtime.checkpoint.packed_integers import StoredIntegers, check_g_idx, check_scales
from llmctl.runtime.checkpoint.packed_parts import CODES, FLOATS, PackedModule, Parts, integer_bytes
from llmctl.runtime.checkpoint.packed_settings import Settings, checked_bits, checked_group_size, checked_pattern
from llmctl.runtime.checkpoint.text import quoted

_log = logging.getLogger(__name__)

_VERSIONS = {"gptq": 1, "gptq_v2": 2}


class GptqReader:
    """Finds and reads the modules of a checkpoint with GPTQ's layout."""

    marker = "qweight"

    def __init__(self, settings: Settings) -> None:
        """Raises FormatError and UnsupportedError for settings that cannot be followed."""
        stated = settings.value("checkpoint_format") or "gptq"
        stated = "marlin" if settings.flag("is_marlin_format", False) else stated
        if not isinstance(stated, str) or stated not in _VERSIONS:
            raise UnsupportedError(
                f"{settings.where}: the layout {quoted(stated)} is not read; write the model again with the format "
                f"{' or '.join(_VERSIONS)}"
            )
        self.version = _VERSIONS[stated]
        self.bits, self.group_size = settings.bits(), settings.group_size()
        self.symmetric = settings.flag("sym", True)
        self.states_symmetry = settings.value("sym") is not None
        self.rules = _rules(settings)
        self._said: set[str] = set()

    def module(self, parts: Parts) -> PackedModule:
        """The module of these parts, its shapes checked. Nothing but headers is read."""
        bits, group_size = self._scheme(parts)
        rows = parts.shape("scales", 2)[1]
        packed = parts.shape("qweight", 2)[0]
        columns = parts.shape("g_idx", 1)[0] if parts.has("g_idx") else packed * 32 // bits
        expected = -(-columns // (columns if group_size == -1 else group_size))
        why = f"{bits}-bit codes of {rows} x {columns} weights in groups of {group_size}"
        parts.check("qweight", CODES, (words_for(columns, bits), rows), why)
        parts.check("scales", FLOATS, (expected, rows), why)
        parts.check("qzeros", CODES, (expected, words_for(rows, bits)), why)
        if parts.has("g_idx"):
            parts.check("g_idx", CODES, (columns,), why)
        shape = (rows, columns)
        return PackedModule(
            name=parts.name("weight"),
            parts=parts.names("qweight", "qzeros", "scales", "g_idx"),
            shape=shape,
            form=f"INT{bits}",
            native_bytes=integer_bytes(shape, bits, group_size),
            read=lambda: self._read(parts, shape, bits, group_size),
        )

    def _scheme(self, parts: Parts) -> tuple[int, int]:
        """Bits and group size of the module: those of the first rule that matches it, else those of the model."""
        for where, pattern, overrides in self.rules:
            if pattern.match(parts.module):
                if overrides is None:
                    raise FormatError(f"{parts.where('qweight')} is quantized, but {where} says the module is not")
                bits = overrides.get("bits", self.bits)
                group_size = overrides.get("group_size", self.group_size)
                return checked_bits(f"{where}: 'bits'", bits), checked_group_size(f"{where}: 'group_size'", group_size)
        return self.bits, self.group_size

    def _read(self, parts: Parts, shape: tuple[int, int], bits: int, group_size: int) -> StoredIntegers:
        scales = check_scales(parts.where("scales"), parts.read("scales"))
        g_idx = check_g_idx(parts.where("g_idx"), parts.read("g_idx"), len(scales)) if parts.has("g_idx") else None
        zeros = self._zero_points(parts, bits, shape[0])
        stored = StoredIntegers(
            bits=bits,
            group_size=group_size,
            shape=shape,
            load_words=lambda: np.ascontiguousarray(parts.words("qweight").T),
            scales=np.ascontiguousarray(scales.T),
            zero_points=zeros,
            g_idx=g_idx,
        ).simplified()
        if self.symmetric and self.states_symmetry and stored.zero_points is not None:
            self._say_once(parts, f"not all are {stored.symmetric_zero}, though the config says sym: they are used as stored")
        return stored

    def _say_once(self, parts: Parts, what: str) -> None:
        """What is true of one module is true of many."""
        if what not in self._said:
            self._said.add(what)
            _log.warning("%s: %s", parts.where("qzeros"), what)

    def _zero_points(self, parts: Parts, bits: int, rows: int) -> np.ndarray:
        """uint8 (out_features, groups). In version 1 each field wraps around by itself: nothing is carried into the next."""
        fields = unpack_codes(parts.words("qzeros"), bits, rows)
        if self.version == 1:
            fields = fields + np.uint8(1) & np.uint8((1 << bits) - 1)
            if not fields.all():
                self._say_once(parts, "zero points of 0, which some writers of version 1 store wrongly, neighbours included")
        return np.ascontiguousarray(fields.T)


def _rules(settings: Settings) -> list[tuple[str, re.Pattern[str], dict[str, Any] | None]]:
    """(where, pattern, what it overrides or None for modules left alone) of `dynamic`, in order."""
    dynamic = settings.value("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise FormatError(f"{settings.where}: 'dynamic' must be an object of pattern → overrides, found {quoted(dynamic)}")
    rules = []
    for text, overrides in dynamic.items():
        where = f"{settings.where}: rule {quoted(text)}"
        if not isinstance(overrides, dict):
            raise FormatError(f"{where} must hold an object of overrides, found {quoted(overrides)}")
        pattern = checked_pattern(where, text[2:] if text.startswith(("-:", "+:")) else text)
        rules.append((where, pattern, None if text.startswith("-:") else overrides))
    return rules

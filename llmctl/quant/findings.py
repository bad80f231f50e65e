"""What a check of a model file has to say: one fault or oddity, and where it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """level: an error makes the file unfit; a warning is something no sound model is expected to have.

    check: the part of the verification that found it. tensor: its stored name, None for what is no tensor's. message: without
    the name of the file or tensor.
    """

    level: Level
    check: str
    message: str
    tensor: str | None = None

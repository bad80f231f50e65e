"""What a KV cache can be kept in: plain numbers, or blocks of 32 along a head as GGUF files have them.

A cache type is one of KV_TYPES for keys and values alike, or names one for each side: k=q8_0,v=q4_0. Four bits are kept after a
Hadamard rotation of every head, which spreads its outliers; nobody sees it but the pages.
"""

from __future__ import annotations

from llmctl.errors import UsageError
from llmctl.kernels.formats.spec import FORMATS

_PLAIN = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1}
BLOCK_TYPES = {"q8_0": FORMATS["Q8_0"], "q5_1": FORMATS["Q5_1"], "q4_0": FORMATS["Q4_0"]}
KV_TYPES = (*_PLAIN, *BLOCK_TYPES)


def parse_kv_type(text: str) -> str:
    """A cache type as it is written everywhere: lower case, and one name where both sides have the same. Errors: UsageError."""
    name = text.strip().lower()
    if name in KV_TYPES:
        return name
    sides = dict(part.strip().partition("=")[::2] for part in name.split(","))
    if set(sides) != {"k", "v"} or name.count(",") != 1 or not set(sides.values()) <= set(KV_TYPES):
        raise UsageError(
            f"--kv-type {text}: there is no such cache type; expected {', '.join(KV_TYPES)}, or one for each side: k=q8_0,v=q4_0"
        )
    return join_sides(sides["k"], sides["v"])


def parse_kv_types(text: str) -> list[str]:
    """Several of them in a list, which may hold pairs of sides. Errors: UsageError."""
    parts, types = text.split(","), []
    while parts:
        first = parts.pop(0)
        is_side = "=" in first and parts and "=" in parts[0]
        types.append(parse_kv_type(f"{first},{parts.pop(0)}" if is_side else first))
    return types


def sides_of(kv_type: str) -> tuple[str, str]:
    """The types of keys and of values."""
    if "=" not in kv_type:
        return kv_type, kv_type
    keys, values = kv_type.split(",")
    return keys.removeprefix("k="), values.removeprefix("v=")


def join_sides(keys: str, values: str) -> str:
    """The name of a cache with these sides."""
    return keys if keys == values else f"k={keys},v={values}"


def row_bytes(elements: int, side: str) -> int | None:
    """Bytes of one head's vector of `elements` numbers in one side's type; None where the type's blocks do not divide it."""
    if side in _PLAIN:
        return elements * _PLAIN[side]
    blocks, rest = divmod(elements, BLOCK_TYPES[side].elements_per_block)
    return None if rest else blocks * BLOCK_TYPES[side].bytes_per_block


def rotation(side: str, *sizes: int) -> int:
    """How many numbers of a head are rotated together: 32, or the largest power of two that divides every size; 0 for none."""
    if side != "q4_0":
        return 0
    common = 0
    for size in sizes:
        common |= size
    return min(common & -common, BLOCK_TYPES[side].elements_per_block)

"""What every stored tensor type is: names, ids, block sizes. Data only; imports neither numpy nor torch.

Ids and sizes are those of the GGUF format description. A *format* is how the elements of one row are stored: a plain
number (`elements_per_block` = 1) or a block of elements sharing scales. Rows are always a whole number of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.errors import FormatError, UnsupportedError


@dataclass(frozen=True)
class Format:
    """One stored tensor type.

    elements_per_block: elements that share one block along the row (1 for plain numbers).
    bytes_per_block: bytes of one block.
    """

    name: str
    gguf_id: int
    elements_per_block: int
    bytes_per_block: int

    @property
    def is_plain(self) -> bool:
        """True for plain numbers, false for quantized blocks."""
        return self.elements_per_block == 1

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element."""
        return 8 * self.bytes_per_block / self.elements_per_block

    def row_bytes(self, row_length: int) -> int:
        """Bytes of a row of `row_length` elements; FormatError if it is not a whole number of blocks."""
        blocks, rest = divmod(row_length, self.elements_per_block)
        if rest:
            raise FormatError(
                f"{self.name} needs rows that are a multiple of {self.elements_per_block} elements, got {row_length}"
            )
        return blocks * self.bytes_per_block


_TABLE = [
    Format("F32", 0, 1, 4),
    Format("F16", 1, 1, 2),
    Format("Q4_0", 2, 32, 18),
    Format("Q4_1", 3, 32, 20),
    Format("Q5_0", 6, 32, 22),
    Format("Q5_1", 7, 32, 24),
    Format("Q8_0", 8, 32, 34),
    Format("Q2_K", 10, 256, 84),
    Format("Q3_K", 11, 256, 110),
    Format("Q4_K", 12, 256, 144),
    Format("Q5_K", 13, 256, 176),
    Format("Q6_K", 14, 256, 210),
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ4_NL", 20, 32, 18),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("IQ4_XS", 23, 256, 136),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8),
    Format("IQ1_M", 29, 256, 56),
    Format("BF16", 30, 1, 2),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("MXFP4", 39, 32, 17),
    Format("NVFP4", 40, 64, 36),
]

FORMATS: dict[str, Format] = {f.name: f for f in _TABLE}
_BY_GGUF_ID: dict[int, Format] = {f.gguf_id: f for f in _TABLE}

# Known ids that are refused: never a stored weight, withdrawn by llama.cpp, or not specified for files.
_REFUSED = {
    4: "Q4_2 (withdrawn)",
    5: "Q4_3 (withdrawn)",
    9: "Q8_1 (activations only)",
    15: "Q8_K (activations only)",
    31: "Q4_0_4_4 (withdrawn repack)",
    32: "Q4_0_4_8 (withdrawn repack)",
    33: "Q4_0_8_8 (withdrawn repack)",
    36: "IQ4_NL_4_4 (withdrawn repack)",
    37: "IQ4_NL_4_8 (withdrawn repack)",
    38: "IQ4_NL_8_8 (withdrawn repack)",
    41: "Q1_0",
    42: "Q2_0",
}


def format_by_gguf_id(gguf_id: int) -> Format:
    """The format with this GGUF type id; UnsupportedError naming the type if it is one we refuse or do not know."""
    if found := _BY_GGUF_ID.get(gguf_id):
        return found
    what = _REFUSED.get(gguf_id, "unknown")
    raise UnsupportedError(f"tensor type {gguf_id} ({what}) cannot be read as a stored weight")


def format_by_name(name: str) -> Format:
    """The format with this name, case-insensitive; UnsupportedError listing the known names otherwise."""
    if found := FORMATS.get(name.upper()):
        return found
    raise UnsupportedError(f"unknown tensor type {name!r}; known: {', '.join(FORMATS)}")

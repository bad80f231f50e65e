"""The bytes of one block of every quantized format, as packed numpy record types.

A record type reads like the format's description: `blocks.view(LAYOUTS["Q4_0"])["qs"]` is the codes of every block,
without a copy. All numbers are little endian; there is no padding. Field names are those of the GGUF descriptions:
d = scale, m or dmin = offset (or its scale), qs = codes or their low bits, qh = high bits, e = exponent.
"""

from __future__ import annotations

import numpy as np

# IQ2_XXS: four grid indices, then four 7-bit sign indices and a 4-bit scale in one word.
_IQ2_XXS_GROUP = np.dtype([("grid", "u1", 4), ("signs", "<u4")])

LAYOUTS: dict[str, np.dtype] = {
    "Q4_0": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)]),
    "Q8_0": np.dtype([("d", "<f2"), ("qs", "i1", 32)]),
    "Q2_K": np.dtype([("scales", "u1", 16), ("qs", "u1", (2, 32)), ("d", "<f2"), ("dmin", "<f2")]),
    "Q3_K": np.dtype([("qh", "u1", 32), ("qs", "u1", (2, 32)), ("scales", "u1", 12), ("d", "<f2")]),
    "Q4_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", (4, 32))]),
    "Q5_K": np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", (4, 32))]),
    "Q6_K": np.dtype([("ql", "u1", (2, 64)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", "<f2")]),
    "IQ2_XXS": np.dtype([("d", "<f2"), ("groups", _IQ2_XXS_GROUP, 8)]),
    "IQ2_XS": np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)]),
    "IQ2_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]),
    "IQ3_XXS": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)]),
    "IQ3_S": np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]),
    "IQ1_S": np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)]),
    "IQ1_M": np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]),
    "IQ4_NL": np.dtype([("d", "<f2"), ("qs", "u1", 16)]),
    "IQ4_XS": np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", (8, 16))]),
    "TQ1_0": np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")]),
    "TQ2_0": np.dtype([("qs", "u1", (2, 32)), ("d", "<f2")]),
    "MXFP4": np.dtype([("e", "u1"), ("qs", "u1", 16)]),
    "NVFP4": np.dtype([("d", "u1", 4), ("qs", "u1", (4, 8))]),
}

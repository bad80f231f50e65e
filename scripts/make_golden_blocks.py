"""Make tests/kernels/formats/golden_blocks.json: what llama.cpp encodes the awkward matrices of the tests to, as hashes.

    python scripts/make_golden_blocks.py /path/to/libggml-base.so > tests/kernels/formats/golden_blocks.json

The library is that of any build of llama.cpp for plain x86-64 (GGML_NATIVE concerns other libraries of it).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "kernels"))

from awkward import IMPORTANCES, awkward, importance

from llmctl.kernels.formats.codecs import ENCODERS
from llmctl.kernels.formats.spec import FORMATS


def encode(library: ctypes.CDLL, name: str, array: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Blocks of float32 (rows, K) by ggml_quantize_chunk."""
    rows, columns = array.shape
    blocks = np.empty((rows, FORMATS[name].row_bytes(columns)), np.uint8)
    pointer = None if weights is None else weights.ctypes.data_as(ctypes.c_void_p)
    library.ggml_quantize_chunk(
        ctypes.c_int(FORMATS[name].gguf_id),
        array.ctypes.data_as(ctypes.c_void_p),
        blocks.ctypes.data_as(ctypes.c_void_p),
        *(ctypes.c_int64(value) for value in (0, rows, columns)),
        pointer,
    )
    return blocks


def main() -> None:
    library = ctypes.CDLL(sys.argv[1])
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    array = np.ascontiguousarray(awkward())
    golden = {
        name: {
            kind: [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in encode(library, name, array, importance(kind))]
            for kind in IMPORTANCES
        }
        for name in ENCODERS
    }
    json.dump(golden, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

"""What people call the type of a whole file (Q4_K_M): GGUF's general.file_type by number, else the type most weights have."""

from __future__ import annotations

from collections import Counter

from llmctl.runtime.checkpoint.checkpoint import Checkpoint

# llama.h, enum llama_ftype; numbers that were withdrawn are left out.
FILE_TYPES = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M"), 7)),
    **dict(enumerate(("Q5_K_S", "Q5_K_M", "Q6_K", "IQ2_XXS", "IQ2_XS", "Q2_K_S", "IQ3_XS", "IQ3_XXS", "IQ1_S"), 16)),
    **dict(enumerate(("IQ4_NL", "IQ3_S", "IQ3_M", "IQ2_S", "IQ2_M", "IQ4_XS", "IQ1_M", "BF16"), 25)),
    **dict(enumerate(("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"), 36)),
}


def file_type(checkpoint: Checkpoint) -> str:
    """The name of the file's type. A file without tensors or with a number unknown here is named by its weights, or F32."""
    stated = getattr(checkpoint, "metadata", {}).get("general.file_type")
    if isinstance(stated, int) and stated in FILE_TYPES:
        return FILE_TYPES[stated]
    counts: Counter[str] = Counter()
    for weight in checkpoint.weight_sizes():
        counts[weight.form] += weight.num_elements
    return counts.most_common(1)[0][0] if counts else "F32"

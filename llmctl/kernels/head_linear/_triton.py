"""head_linear in Triton: as linear, a launch for all heads."""

from __future__ import annotations

import torch

from llmctl.kernels.linear._triton import activations_of, dequantized, in_stored_order, matmul, matvec, takes_matvec
from llmctl.kernels.triton_lib.launch import empty
from llmctl.kernels.triton_lib.tiles import MAX_MATMUL_ROWS
from llmctl.kernels.triton_lib.weights import TritonWeight


def head_linear(x: torch.Tensor, weight: TritonWeight) -> torch.Tensor:
    """x [T, num_heads, in_features], weight (num_heads, out_features, in_features) → [T, num_heads, out_features]."""
    tokens, heads, columns = x.shape
    if not tokens:
        return empty((0, heads, weight.shape[1]), x.dtype, x.device)
    x = in_stored_order(x, weight)
    if tokens > MAX_MATMUL_ROWS:
        return (x.transpose(0, 1) @ dequantized(weight, x.dtype)).transpose(0, 1)
    rows = x.reshape(tokens * heads, columns)
    if takes_matvec(weight, tokens):
        y = matvec(activations_of(rows, weight), weight, tokens, heads, is_batched=True)
    else:
        y = matmul(rows, weight, tokens, heads, is_batched=True)
    return y.view(tokens, heads, -1)

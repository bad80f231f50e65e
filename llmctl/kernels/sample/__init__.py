"""argmax(logits) -> id        top_k(logits, k) -> (ids, values)

logits  [V]  float32 on the host, V ≥ 1, contiguous
id           int; the largest logit, the smallest id where several are equal; −1 if any logit is NaN
ids     [n]  int64; the k largest logits, largest first, equal ones by id; n ≤ min(k, V), k ≥ 1
values  [n]  float32; their logits

A logit of −inf is no candidate, so n is smaller where fewer than k are above it; where none is, id 0 stands alone. Both
arrays are empty if any logit is NaN.

The native pair reads the logits once; without the compiled extension numpy's serves.
"""

from __future__ import annotations

try:
    from llmctl.kernels.native._native import argmax, top_k
except ImportError:
    from llmctl.kernels.sample._numpy import argmax, top_k

__all__ = ["argmax", "top_k"]

"""argmax(logits) -> id        top_k(logits, k) -> (ids, values)        keep_allowed(logits, allowed)

logits  [V]  float32 on the host, V ≥ 1, contiguous
id           int; the largest logit, the smallest id where several are equal; −1 if any logit is NaN
ids     [n]  int64; the k largest logits, largest first, equal ones by id; n ≤ min(k, V), k ≥ 1
values  [n]  float32; their logits

allowed [⌈V / 32⌉]  uint32; a logit whose bit is 0 becomes −inf, in place: logit i has bit i % 32 of word i // 32

A logit of −inf is no candidate, so n is smaller where fewer than k are above it; where none is, id 0 stands alone. Both
arrays are empty if any logit is NaN.

On a device, without a word to the host: sample(logits, temperatures, seeds, steps, limits=None) -> ids draws a token a row, and
verify(logits, drafted, odds, temperatures, seeds, steps) -> (ids, counts) keeps or rejects drafted ones; shapes in _triton.py,
the same in torch in _reference.py.

The native ones read the logits once; without the compiled extension numpy's serves.
"""

from __future__ import annotations

try:
    from llmctl.kernels.native._native import argmax, keep_allowed, top_k
except ImportError:
    from llmctl.kernels.sample._numpy import argmax, keep_allowed, top_k

__all__ = ["argmax", "keep_allowed", "top_k"]

"""The Triton backend: kernels on a GPU, or under triton's interpreter on the CPU (TRITON_INTERPRET=1).

Arrays are torch tensors, as in the reference, whose plumbing it shares, or results that are put off (`_triton_deferred.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmctl.errors import OutOfMemoryError, UnsupportedError
from llmctl.kernels import _triton_elementwise as elementwise
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels._triton_deferred import NormedHeads, Rounded, Rows, Sum, Turned, go_together, now
from llmctl.kernels._triton_graphs import Steps
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._triton import attention
from llmctl.kernels.attention_votes._triton import attention_votes
from llmctl.kernels.embedding._triton import embedding
from llmctl.kernels.head_linear._triton import head_linear
from llmctl.kernels.layer_norm._triton import layer_norm
from llmctl.kernels.linear._triton import TritonWeight, linear, prepare_weight
from llmctl.kernels.moe._triton import expert_counts, moe
from llmctl.kernels.rms_norm._triton import add_rms_norm, rms_norm, rounded_rms_norm
from llmctl.kernels.rotary._triton import HeadNorms, rotary_store
from llmctl.kernels.store_kv import _triton_pages as pages_of
from llmctl.kernels.store_kv._triton import store_kv
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.swiglu._triton import activation, gated_activation, rounded_gated_activation
from llmctl.kernels.triton_lib.activations import SUB_BLOCK
from llmctl.kernels.triton_lib.launch import interpreting, usual_device
from llmctl.kernels.triton_lib.tiles import MAX_MATVEC_ROWS

if TYPE_CHECKING:
    from llmctl.kernels.formats.packed_int import PackedIntTensor
    from llmctl.kernels.formats.quant_tensor import QuantTensor


class TritonOps(ReferenceOps):
    """`Ops` over torch tensors and Triton kernels. activations: "int8" (per 32 numbers, where few tokens meet quantized weights)
    or "float". device: None for the one that kernels run on."""

    name = "triton"

    def __init__(
        self, device: str | None = None, dtype: str = "bfloat16", threads: int | None = None, activations: str = "int8"
    ) -> None:
        device = device or usual_device()
        if interpreting() != (device == "cpu"):
            raise UnsupportedError(
                f"Triton kernels run on {usual_device()} here, not on {device} (TRITON_INTERPRET=1: interpreted, on the CPU)"
            )
        super().__init__(device, dtype, threads)
        self.activations = activations
        self._has_codes = False
        self._turned: tuple[Turned | None, Turned | None] = (None, None)

    def prepare_weight(self, weight: np.ndarray | QuantTensor | PackedIntTensor) -> TritonWeight:
        try:
            prepared = prepare_weight(weight, self.device, self._torch_dtype, self.activations)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"no memory on {self.device} for a weight of {' x '.join(map(str, weight.shape))}: fewer --gpu-layers need less"
            ) from error
        self._has_codes |= prepared.form is not None
        return prepared

    def kv_pages(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_type: str, latent: int = 0
    ) -> TritonPages:
        return TritonPages.make(num_blocks, block_size, num_kv_heads, head_dim, kv_type, self.device, latent)

    copy_page = staticmethod(pages_of.copy_page)
    page_layout = staticmethod(pages_of.page_layout)
    read_page = staticmethod(pages_of.read_page)
    write_page = staticmethod(pages_of.write_page)

    def move_tokens(self, pages: TritonPages, sources: np.ndarray, targets: np.ndarray) -> None:
        pages_of.move_tokens(pages, self._upload(sources), self._upload(targets))

    def attention_votes(
        self, queries: np.ndarray, pages: TritonPages, block_table: np.ndarray, length: int, scale: float, *choices: Any
    ) -> np.ndarray:
        as_attended = self._upload(queries).to(self._torch_dtype)
        return attention_votes(as_attended, pages, self._upload(block_table), length, scale, *choices).cpu().numpy()

    def compile(
        self, forward: Callable[[BatchDescription, torch.Tensor], Rows], rotary_halves: list[int]
    ) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        def run(batch: BatchDescription, rows: torch.Tensor) -> torch.Tensor:
            if batch.hidden is not None:
                batch = replace(batch, hidden=batch.hidden.to(self._torch_dtype))
            return now(forward(batch, rows)).float()

        return Steps(run, self.device, self._upload).run

    @staticmethod
    def add(x: Rows, y: Rows) -> Sum:
        return Sum(now(x), now(y))

    def rms_norm(self, x: Rows, weight: torch.Tensor, eps: float) -> Rows:
        if isinstance(x, torch.Tensor) and x.ndim == 3:
            return NormedHeads(x, weight, eps)
        is_sum = isinstance(x, Sum) and x.value is None
        first, second = (x.x, x.y) if is_sum else (now(x), None)
        if self._rounds(first):
            total, y, rows = rounded_rms_norm(first, second, weight, eps)
            y = Rounded(y, rows)
        else:
            total, y = (first, rms_norm(first, weight, eps)) if second is None else add_rms_norm(first, second, weight, eps)
        if is_sum:
            x.value = total
        return y

    def _rounds(self, x: torch.Tensor) -> bool:
        """Whether products of these rows [T, K] may be of integers."""
        fits = x.ndim == 2 and 0 < len(x) <= MAX_MATVEC_ROWS and x.shape[1] % SUB_BLOCK == 0
        return fits and self._has_codes and self.activations == "int8"

    @staticmethod
    def layer_norm(x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return layer_norm(now(x), weight, bias, eps)

    def rotary(self, x: torch.Tensor | NormedHeads, cos: torch.Tensor, sin: torch.Tensor) -> Turned:
        turned = Turned(x, cos, sin)
        self._turned = (self._turned[1], turned)
        return turned

    def store_kv(self, keys: Rows, values: Rows | None, pages: TritonPages, batch: BatchDescription) -> None:
        queries, last = self._turned
        self._turned = (None, None)
        if values is None or queries is None or last is not keys or not go_together(queries, keys):
            store_kv(now(keys), None if values is None else now(values), pages, batch.slot_mapping)
            return
        norms = None
        if queries.norm is not None and keys.norm is not None:
            norms = HeadNorms(queries.norm.weight, keys.norm.weight, keys.norm.eps)
        sides = (queries.bare, keys.bare, now(values))
        queries.value = rotary_store(*sides, (keys.cos, keys.sin), pages, batch.slot_mapping, norms)

    @staticmethod
    def attention(queries: Rows, pages: TritonPages, batch: BatchDescription, scale: float, *choices: Any) -> torch.Tensor:
        return attention(now(queries), pages, batch, scale, *choices)

    @staticmethod
    def activation(x: Rows, name: str) -> torch.Tensor:
        return activation(now(x), name)

    def gated_activation(self, gate: torch.Tensor, up: torch.Tensor, activation: str) -> Rows:
        if self._rounds(gate):
            return Rounded(*rounded_gated_activation(gate, up, activation))
        return gated_activation(gate, up, activation)

    @staticmethod
    def growth(x: Rows, positions: torch.Tensor, rate: float, length: int) -> torch.Tensor:
        return elementwise.growth(now(x), positions, rate, length)

    @staticmethod
    def softcap(x: Rows, cap: float) -> torch.Tensor:
        return elementwise.softcap(now(x), cap)

    @staticmethod
    def gated(x: Rows, gate: torch.Tensor) -> torch.Tensor:
        return elementwise.gated(now(x), gate)

    @staticmethod
    def linear(x: Rows, weight: TritonWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(now(x), weight, bias, x.rows if isinstance(x, Rounded) else None)

    @staticmethod
    def embedding(token_ids: torch.Tensor, table: TritonWeight, scale: float = 1.0) -> torch.Tensor:
        return embedding(token_ids, table, scale)

    @staticmethod
    def head_linear(x: Rows, weight: TritonWeight) -> torch.Tensor:
        return head_linear(now(x), weight)

    @staticmethod
    def moe(x: Rows, router_logits: torch.Tensor, *choices: Any) -> torch.Tensor:
        return moe(now(x), router_logits, *choices)

    expert_counts = staticmethod(expert_counts)

    @staticmethod
    def scale(x: Rows, factor: float) -> torch.Tensor:
        return now(x) * factor

    @staticmethod
    def take_rows(x: Rows, rows: torch.Tensor) -> torch.Tensor:
        return now(x)[rows]

    @staticmethod
    def reshape(x: Rows, shape: tuple[int, ...]) -> torch.Tensor:
        return now(x).reshape(shape)

    @staticmethod
    def join_heads(x: Rows, y: Rows) -> torch.Tensor:
        return torch.cat([now(x), now(y)], dim=-1)

"""The Triton backend: kernels on a GPU, or under triton's interpreter on the CPU (TRITON_INTERPRET=1).

Arrays are torch tensors, as in the reference, whose plumbing it shares. A sum is put off until it is known who
reads it: a norm writes it in the same kernel (`_Sum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from llmctl.errors import UnsupportedError
from llmctl.kernels import _triton_elementwise as elementwise
from llmctl.kernels._reference import ReferenceOps
from llmctl.kernels._triton_graphs import Steps
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._triton import attention
from llmctl.kernels.layer_norm._triton import layer_norm
from llmctl.kernels.linear._triton import TritonWeight, dequantized, linear, prepare_weight
from llmctl.kernels.rms_norm._triton import add_rms_norm, rms_norm
from llmctl.kernels.store_kv import _triton_pages as pages_of
from llmctl.kernels.store_kv._triton import store_kv
from llmctl.kernels.store_kv._triton_pages import TritonPages
from llmctl.kernels.swiglu._triton import activation, gated_activation
from llmctl.kernels.triton_lib.launch import interpreting, usual_device

if TYPE_CHECKING:
    from llmctl.kernels.formats.packed_int import PackedIntTensor
    from llmctl.kernels.formats.quant_tensor import QuantTensor


@dataclass(eq=False)
class _Sum:
    """x + y, both [T, H], not computed yet. value: once it is."""

    x: torch.Tensor
    y: torch.Tensor
    value: torch.Tensor | None = None

    def now(self) -> torch.Tensor:
        """The numbers."""
        if self.value is None:
            self.value = self.x + self.y
        return self.value


Rows = torch.Tensor | _Sum


def _now(x: Rows) -> torch.Tensor:
    return x.now() if isinstance(x, _Sum) else x


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

    def prepare_weight(self, weight: np.ndarray | QuantTensor | PackedIntTensor) -> TritonWeight:
        return prepare_weight(weight, self.device, self._torch_dtype, self.activations)

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

    def compile(
        self, forward: Callable[[BatchDescription, torch.Tensor], Rows], rotary_halves: list[int]
    ) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        return Steps(lambda *step: _now(forward(*step)).float(), self.device, self._upload).run

    @staticmethod
    def add(x: Rows, y: Rows) -> _Sum:
        return _Sum(_now(x), _now(y))

    @staticmethod
    def rms_norm(x: Rows, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not isinstance(x, _Sum) or x.value is not None:
            return rms_norm(_now(x), weight, eps)
        x.value, y = add_rms_norm(x.x, x.y, weight, eps)
        return y

    @staticmethod
    def layer_norm(x: Rows, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return layer_norm(_now(x), weight, bias, eps)

    @staticmethod
    def store_kv(keys: torch.Tensor, values: torch.Tensor | None, pages: TritonPages, batch: BatchDescription) -> None:
        store_kv(keys, values, pages, batch.slot_mapping)

    attention = staticmethod(attention)
    activation = staticmethod(activation)
    gated_activation = staticmethod(gated_activation)
    growth = staticmethod(elementwise.growth)
    softcap = staticmethod(elementwise.softcap)

    @staticmethod
    def gated(x: Rows, gate: torch.Tensor) -> torch.Tensor:
        return elementwise.gated(_now(x), gate)

    @staticmethod
    def linear(x: Rows, weight: TritonWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(_now(x), weight, bias)

    @staticmethod
    def embedding(token_ids: torch.Tensor, table: TritonWeight, scale: float = 1.0) -> torch.Tensor:
        return ReferenceOps.embedding(token_ids, dequantized(table, torch.float32).T, scale)

    @staticmethod
    def moe(x: Rows, *choices: Any) -> torch.Tensor:
        return ReferenceOps.moe(_now(x), *choices)

    @staticmethod
    def scale(x: Rows, factor: float) -> torch.Tensor:
        return _now(x) * factor

    @staticmethod
    def take_rows(x: Rows, rows: torch.Tensor) -> torch.Tensor:
        return _now(x)[rows]

    @staticmethod
    def reshape(x: Rows, shape: tuple[int, ...]) -> torch.Tensor:
        return _now(x).reshape(shape)

"""The reference backend: every op in plain torch, on CPU or CUDA. The definition of right; speed is not its concern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmctl.errors import UnsupportedError
from llmctl.kernels.attention import BatchDescription
from llmctl.kernels.attention._reference import attention, slots_of
from llmctl.kernels.attention_votes._reference import attention_votes
from llmctl.kernels.embedding._reference import embedding
from llmctl.kernels.formats.codecs import dequantize
from llmctl.kernels.formats.packed_int import PackedIntTensor
from llmctl.kernels.formats.quant_tensor import QuantTensor
from llmctl.kernels.head_linear._reference import head_linear
from llmctl.kernels.kv_types import sides_of
from llmctl.kernels.layer_norm._reference import layer_norm
from llmctl.kernels.linear._reference import linear
from llmctl.kernels.moe import Experts
from llmctl.kernels.moe._reference import moe
from llmctl.kernels.rms_norm._reference import rms_norm
from llmctl.kernels.rotary._reference import rotary, rotary_angles
from llmctl.kernels.store_kv._reference import Side, store_kv
from llmctl.kernels.store_kv._reference_pages import make_side
from llmctl.kernels.swiglu._reference import activation, gated_activation

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


@dataclass(frozen=True)
class ReferencePages:
    """One layer's pages. values: of latent pages a part of the keys."""

    block_size: int
    keys: Side
    values: Side
    is_latent: bool = False


class ReferenceOps:
    """`Ops` over torch tensors. Weights are dequantized once, when they are prepared."""

    name, is_row_invariant = "reference", False

    def __init__(self, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> None:
        self.device, self.dtype = device, dtype
        self._torch_dtype = _DTYPES[dtype]
        self._check_device()
        if threads is not None:
            torch.set_num_threads(threads)
        self.threads = torch.get_num_threads()

    def _check_device(self) -> None:
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise UnsupportedError(f"device {self.device} was asked for, but torch {torch.__version__} sees no CUDA device")

    def prepare_weight(self, weight: np.ndarray | QuantTensor | PackedIntTensor) -> torch.Tensor:
        return self._upload(dequantize(weight)).to(self._torch_dtype)

    def prepare_vector(self, vector: np.ndarray | QuantTensor, dtype: str | None = None) -> torch.Tensor:
        return self._upload(dequantize(vector)).to(_DTYPES[dtype or self.dtype])

    @staticmethod
    def read_vector(vector: torch.Tensor) -> np.ndarray:
        return vector.float().cpu().numpy()

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        if not array.flags.writeable:  # mapped from a read-only file
            array = array.copy()
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def kv_pages(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, kv_type: str, latent: int = 0
    ) -> ReferencePages:
        shape = (num_blocks * block_size, num_kv_heads, head_dim)
        sides = sides_of(kv_type)
        if latent:
            keys = make_side(shape, sides[0], self.device, latent)
            return ReferencePages(block_size, keys, keys.first(latent), is_latent=True)
        return ReferencePages(block_size, *(make_side(shape, side, self.device) for side in sides))

    @staticmethod
    def copy_page(pages: ReferencePages, source: int, target: int) -> None:
        size = pages.block_size
        for side in {id(side): side for side in (pages.keys, pages.values)}.values():
            side.copy(slice(source * size, (source + 1) * size), slice(target * size, (target + 1) * size))

    @staticmethod
    def page_layout(kv_type: str) -> None:
        return None

    @staticmethod
    def read_page(pages: ReferencePages, page: int) -> bytes:
        raise AssertionError("pages without a layout stay where they are")

    @staticmethod
    def write_page(pages: ReferencePages, page: int, data: bytes) -> None:
        raise AssertionError("pages without a layout stay where they are")

    def move_tokens(self, pages: ReferencePages, sources: np.ndarray, targets: np.ndarray) -> None:
        to = self._upload(targets)
        for head, slots in enumerate(sources):  # in one go: all are read before any is written
            for side in (pages.keys,) if pages.is_latent else (pages.keys, pages.values):
                side.move(head, self._upload(slots), to)

    def read_keys(self, pages: ReferencePages, slots: np.ndarray) -> np.ndarray:
        return pages.keys.read(self._upload(slots)).cpu().numpy()

    def attention_votes(
        self,
        queries: np.ndarray,
        pages: ReferencePages,
        block_table: np.ndarray,
        length: int,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> np.ndarray:
        tokens = torch.arange(length, device=self.device)
        keys = pages.keys.read(slots_of(self._upload(block_table), tokens, pages.block_size))
        return attention_votes(self._upload(queries), keys, scale, softcap, sinks).cpu().numpy()

    def compile(
        self, forward: Callable[[BatchDescription, torch.Tensor], torch.Tensor], rotary_halves: list[int]
    ) -> Callable[[BatchDescription, np.ndarray], np.ndarray]:
        def run(batch: BatchDescription, rows: np.ndarray) -> np.ndarray:
            return forward(batch.convert(self._upload), self._upload(rows)).float().cpu().numpy()

        return run

    def interrupt(self) -> None:
        pass  # torch cannot be stopped

    linear = staticmethod(linear)
    head_linear = staticmethod(head_linear)
    embedding = staticmethod(embedding)
    rms_norm = staticmethod(rms_norm)
    layer_norm = staticmethod(layer_norm)
    rotary_angles = staticmethod(rotary_angles)
    rotary = staticmethod(rotary)
    activation = staticmethod(activation)
    gated_activation = staticmethod(gated_activation)
    moe = staticmethod(moe)

    @staticmethod
    def expert_counts(experts: Experts) -> np.ndarray:
        return experts.counts

    @staticmethod
    def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate)

    @staticmethod
    def store_kv(keys: torch.Tensor, values: torch.Tensor | None, pages: ReferencePages, batch: BatchDescription) -> None:
        store_kv(keys, values, pages.keys, pages.values, batch.slot_mapping)

    @staticmethod
    def attention(
        queries: torch.Tensor, pages: ReferencePages, batch: BatchDescription, scale: float, *choices: Any
    ) -> torch.Tensor:
        return attention(queries, pages.keys, pages.values, batch, scale, *choices)

    @staticmethod
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    @staticmethod
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    @staticmethod
    def growth(x: torch.Tensor, positions: torch.Tensor, rate: float, length: int) -> torch.Tensor:
        factors = 1 + rate * torch.log1p((positions // length).float())
        return (x * factors.view(-1, *[1] * (x.ndim - 1))).to(x.dtype)

    @staticmethod
    def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    @staticmethod
    def reshape(x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return x.reshape(shape)

    @staticmethod
    def join_heads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y], dim=-1)

    @staticmethod
    def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x[rows]

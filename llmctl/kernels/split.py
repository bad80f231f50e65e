"""Two backends under one model: the first layers on one, the others on the other."""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.kernels.ops import Ops


@dataclass(frozen=True)
class SplitOps:
    """What is asked of a backend as a whole, of two. The first `num_host` layers are the host's: `ops_of_layer`."""

    host: Ops
    device_ops: Ops
    num_host: int
    is_row_invariant: bool = False

    @property
    def name(self) -> str:
        """Both, in the order of layers."""
        return f"{self.host.name}+{self.device_ops.name}"

    @property
    def device(self) -> str:
        """Both, in the order of layers."""
        return f"{self.host.device}+{self.device_ops.device}"

    @property
    def dtype(self) -> str:
        """Of the second, which makes the logits."""
        return self.device_ops.dtype

    @property
    def threads(self) -> int:
        """Of the host."""
        return self.host.threads

    @staticmethod
    def page_layout(kv_type: str) -> None:
        """Pages of two layouts stay where they are."""
        return

    def interrupt(self) -> None:
        """As `Ops.interrupt`."""
        self.host.interrupt()
        self.device_ops.interrupt()


def ops_of_layer(ops: Ops | SplitOps, index: int) -> Ops:
    """The backend that has a layer's weights and pages."""
    if isinstance(ops, SplitOps):
        return ops.host if index < ops.num_host else ops.device_ops
    return ops

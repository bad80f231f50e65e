"""What torch sees of CUDA. Imports torch: call it only when asked to look this deep."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CudaDevice:
    """A device torch can compute on; memory in bytes, `compute_capability` as 9.0."""

    index: int
    name: str
    compute_capability: str
    memory: int


def free_memory() -> tuple[int, int]:
    """Bytes free and in all on the current CUDA device; what torch holds unused counts as free."""
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated(), total


def cuda_devices() -> list[CudaDevice]:
    """The CUDA devices torch can use, none where there is no driver or torch is a CPU build."""
    if not torch.cuda.is_available():
        return []
    found = [(i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())]
    return [CudaDevice(i, p.name, f"{p.major}.{p.minor}", p.total_memory) for i, p in found]

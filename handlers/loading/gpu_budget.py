"""The memory of a GPU that one process may allocate, where several replicas share the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

_CONTEXT_BYTES = 512 << 20  # of a process's CUDA context and libraries, which no allocator counts


@dataclass(frozen=True)
class GpuBudget:
    """The part of a device's memory for one process: the same number limits torch, ONNX Runtime and vLLM.

    ``share`` is ``num_gpus``, above 0 and below 1; ``total`` has the device's bytes.
    """

    share: float
    total: int

    @property
    def limit(self) -> int:
        """The bytes that allocators may take: the share without the CUDA context, at least half of it."""
        share = int(self.share * self.total)
        return max(share // 2, share - _CONTEXT_BYTES)

    @property
    def fraction(self) -> float:
        """The limit as a part of the device, rounded down; vLLM's ``gpu_memory_utilization``."""
        return math.floor(1e4 * self.limit / self.total) / 1e4

    def remaining(self, allocated: int) -> int:
        """Return the bytes that are left beside those that torch has reserved in this process."""
        return max(0, self.limit - allocated)


def compute_budget(num_gpus: float, total: int) -> GpuBudget | None:
    """Return the budget of a process with ``num_gpus``; None where it has whole devices or none."""
    return GpuBudget(num_gpus, total) if 0 < num_gpus < 1 else None

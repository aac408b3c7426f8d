"""The memory of a process that hosts many versions, and the budget that bounds it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes in memory and on the device."""

    host: int = 0
    device: int = 0

    def __sub__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(self.host - other.host, self.device - other.device)

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(self.host + other.host, self.device + other.device)

    def exceeds(self, budget: MemoryUse) -> bool:
        """Return whether one of the two is larger; a budget of 0 is none."""
        return any(0 < most < used for used, most in ((self.host, budget.host), (self.device, budget.device)))


def measure() -> MemoryUse:
    """Return the present use of this process. Source: proc(5), statm; it takes 10 µs."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1])
    return MemoryUse(resident * _PAGE_BYTES, _device_bytes())


def _device_bytes() -> int:
    """Return the bytes that torch has allocated on the device of this process."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() if torch is not None and torch.cuda.is_initialized() else 0


def claim_device(share: float) -> int:
    """Limit this process to a share of its device, and return these bytes; 0 without a device."""
    import torch  # late: a process on a CPU needs none here

    from handlers.loading import device

    if not torch.cuda.is_available():
        return 0
    if share < 1:
        device.limit_gpu_memory(0, share)
    return int(torch.cuda.get_device_properties(0).total_memory * share)


def release_device_memory() -> None:
    """Return the free memory of torch's allocator to the device."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

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


def device_capacity() -> int:
    """Return the bytes of the device of this process; 0 without one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(0).total_memory)


def release_device_memory() -> None:
    """Return the free memory of torch's allocator to the device."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()

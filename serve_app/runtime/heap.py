"""The C library's heap: what one batch frees stays in the process for the next one.

By itself glibc gives the end of a thread's heap back to the system as soon as a few megabytes of it are free, several
times a batch where a model's intermediate tensors are that large. Each page of the next ones is then a page fault, and
comes out of no cache. Sources: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt
_KEPT = 256 << 20  # bytes that may lie free at the end of the process's first heap; a thread's are smaller
_IN_HEAP = 32 << 20  # bytes of the largest block that is not mapped by itself: glibc takes no more
_HEAP = 64 << 20  # bytes of a thread's heap, of which it may have several: an empty one stays, too
# Whoever sets one of these has settled it for all processes of the server.
_SETTLED = "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"


def keep() -> None:
    """Give back what loading a model has left, and keep what its batches leave from now on.

    The author's thread keeps as much as its largest batch took, as PyTorch does with a GPU's memory; only single blocks
    of more than 32 MiB, where no free room is as large, go back.
    It holds for all threads of the process. Nothing happens with another C library than glibc, or where the
    environment says how the heap is to be managed.
    """
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(name in os.environ for name in _SETTLED):
        return
    try:
        libc = ctypes.CDLL(None)
        give_back, set_parameter = libc.malloc_trim, libc.mallopt
    except (OSError, AttributeError):
        return
    give_back(0)
    for parameter, size in ((_MMAP_THRESHOLD, _IN_HEAP), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _HEAP)):
        set_parameter(parameter, size)

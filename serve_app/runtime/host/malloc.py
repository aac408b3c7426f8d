"""Tuning of glibc's malloc: memory freed by one batch stays in a busy process for the next one.

By default glibc returns the end of a thread's heap to the system as soon as a few megabytes of it are free. A
model with large intermediate tensors triggers that several times a batch. Each page of the next ones is then
a page fault, and in no cache. Sources: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt
_TRIM_BYTES = 256 << 20  # free bytes at the end of the process's first heap; a thread's heaps are smaller
_MMAP_BYTES = 32 << 20  # bytes of the largest block that is not mapped by itself: glibc takes no more
_TOP_PAD_BYTES = 64 << 20  # bytes of a thread's heap, of which it may have several: an empty one stays, too
# An operator who sets one of these has configured malloc for all processes of the server.
_USER_SETTINGS = "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"


def tune() -> None:
    """Release the memory left by loading a model, and keep the memory freed by batches from now on.

    The handler thread keeps as much as its largest batch took, as PyTorch does with a GPU's memory. Only
    single blocks of more than 32 MiB are returned, where no free room is as large. The setting holds for all
    threads of the process. With another C library than glibc, or where the environment configures malloc,
    nothing happens.
    """
    if (libc := _libc()) is None:
        return
    malloc_trim, mallopt = libc.malloc_trim, libc.mallopt
    malloc_trim(0)
    for parameter, size in (
        (_MMAP_THRESHOLD, _MMAP_BYTES),
        (_TRIM_THRESHOLD, _TRIM_BYTES),
        (_TOP_PAD, _TOP_PAD_BYTES),
    ):
        mallopt(parameter, size)


def trim() -> None:
    """Return all free memory of the process to the system; an idle replica needs none of it.

    The next batch allocates it again. Where ``tune`` does nothing, neither does this.
    """
    if (libc := _libc()) is not None:
        libc.malloc_trim(0)


def _libc() -> Any:
    """Return the C library; None where it is not glibc, or the environment configures malloc."""
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name in os.environ for name in _USER_SETTINGS
    ):
        return None
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        _ = libc.malloc_trim, libc.mallopt
        return libc
    return None

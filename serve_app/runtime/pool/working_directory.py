"""Working directories of threads, so that each handler of a pool opens relative paths in its archive."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger("torchrelay.pool")

_CLONE_FS = 0x200  # of linux/sched.h


def enter_directory(directory: Path) -> bool:
    """Give the calling thread, and the threads that it starts, a working directory of their own.

    Return whether it has one: unshare(2) needs no privilege, but Docker's default seccomp profile refuses it.
    """
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None or unshare(_CLONE_FS) != 0:
        log.warning(
            "The system refuses threads a working directory (unshare: %s), so handlers of this pool cannot "
            "open relative paths; they find their files in context.system_properties['model_dir'].",
            os.strerror(ctypes.get_errno()),
        )
        return False
    os.chdir(directory)
    return True

"""Whether processes run, when they end, and their environment."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

CHECK_PERIOD = 0.2  # seconds between two looks at the processes of a server that starts or stops


def wait_for_end(pids: Iterable[int]) -> None:
    """Return once one of the processes has ended, which the kernel reports; elsewhere after a while."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(CHECK_PERIOD)
        return
    with contextlib.ExitStack() as stack, contextlib.suppress(ProcessLookupError):
        descriptors = []
        for pid in pids:
            descriptors.append(os.pidfd_open(pid))
            stack.callback(os.close, descriptors[-1])
        select.select(descriptors, [], [])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def environment(process: psutil.Process) -> str:
    # Read raw where that is possible: Ray's workers overwrite its start with their title, which psutil cannot
    # parse.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process.pid}/environ").read_bytes().decode(errors="replace")
    return str(process.environ())

"""A plugin of coverage that saves a process's data every two seconds: Ray ends its workers with SIGKILL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from coverage import Coverage

PERIOD_S = 2.0
_IMPORTED_IN = os.getpid()
_saving_in: set[int] = set()  # process ids


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Start the thread in a worker of Ray, and in a fork of the fork server, which itself must have none.

    A second thread in a process would end SQLite with a segmentation fault. Other processes save their data
    when they end.
    """
    arguments = " ".join(sys.orig_argv)
    is_worker = "default_worker" in arguments or ("fork_server" in arguments and os.getpid() != _IMPORTED_IN)
    if is_worker and os.getpid() not in _saving_in:
        _saving_in.add(os.getpid())
        threading.Thread(target=_save_repeatedly, name="coverage", daemon=True).start()


def _save_repeatedly() -> None:
    while True:
        time.sleep(PERIOD_S)
        with contextlib.suppress(Exception):  # the interpreter may be ending
            if running := Coverage.current():
                running.save()

"""A plugin of coverage that saves the data of a process every second: Ray ends its workers with SIGKILL."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any

from coverage import Coverage

PERIOD_S = 1.0
_IMPORTED_IN = os.getpid()


def coverage_init(registry: Any, options: dict[str, Any]) -> None:
    """Start the thread, which the fork server must not have: only its forks do."""
    is_fork_server = any("fork_server" in argument for argument in sys.orig_argv)
    if os.getpid() != _IMPORTED_IN or not is_fork_server:
        threading.Thread(target=_save_repeatedly, name="coverage", daemon=True).start()


def _save_repeatedly() -> None:
    while True:
        time.sleep(PERIOD_S)
        with contextlib.suppress(Exception):  # the interpreter may be ending
            if running := Coverage.current():
                running.save()

"""A setup hook of Ray's workers that gives their main thread to the handler.

Ray runs its loop of tasks in the main thread; that of a replica only passes calls on to an event loop in
another thread.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from serve_app.runtime.handler_thread import MAIN_THREAD

_EXIT_AFTER_S = 5.0  # of the handler's own end, once Ray has ended its loop


def install() -> None:
    """Replace Ray's main loop in this process."""
    from ray._private.worker import Worker

    Worker.main_loop = _main_loop


def _main_loop(worker: Any) -> None:
    """Run Ray's loop of tasks in a thread, and the handler in this one."""
    from ray._private.utils import set_sigterm_handler

    set_sigterm_handler(_terminate)
    MAIN_THREAD.offer()
    threading.Thread(target=_run_tasks, args=(worker,), name="ray-tasks", daemon=True).start()
    MAIN_THREAD.run_work()
    sys.exit(0)


def _terminate(*_: object) -> None:
    """End this process: an exception, as Ray raises one, could be caught by the handler's code."""
    os.write(2, b"The process received SIGTERM.\n")
    os._exit(1)


def _run_tasks(worker: Any) -> None:
    try:
        worker.core_worker.run_task_loop()
    finally:
        MAIN_THREAD.end()
        threading.Event().wait(_EXIT_AFTER_S)
        os._exit(0)  # the handler hangs

"""The handler thread, in which all of a model author's code runs: loading, warm-up and every batch."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from serve_app.telemetry import crash_reports

log = logging.getLogger("torchrelay.handler_thread")

IDLE_AFTER_S = 60.0


class HandlerThread(Executor):
    """An executor of one thread, in order.

    It is a daemon: a handler that hangs must not keep its process alive. ``on_idle`` is called in it, once,
    after ``idle_after`` seconds without a task.
    """

    def __init__(self, on_idle: Callable[[], object] | None = None, idle_after: float = IDLE_AFTER_S) -> None:
        self._on_idle = on_idle
        self._idle_after = idle_after
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="handler", daemon=True)
        self._thread.start()

    @property
    def ident(self) -> int:
        """The thread's identity, as ``threading.get_ident`` returns it there."""
        assert self._thread.ident is not None
        return self._thread.ident

    @property
    def stack(self) -> str:
        """The present stack of the thread, from the handler's first frame on."""
        frame = sys._current_frames().get(self.ident)
        return crash_reports.format_stack(frame) if frame else "(its thread has ended)\n"

    def post(self, task: Callable[..., None], *args: Any) -> None:
        """Run ``task`` without a future: the cheap way for the batcher."""
        self._tasks.put((task, args))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self._ended:
            raise RuntimeError("this thread has been closed")
        future: Future[Any] = Future()
        self.post(_run_into_future, future, fn, args, kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the thread after its earlier tasks have run."""
        if not self._ended:
            self._ended = True
            self._tasks.put(None)
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while (task := self._next_task()) is not None:
            try:
                task[0](*task[1])
            except BaseException:  # no error of a handler may end the thread
                log.exception("a task of the author's thread failed")
            del task  # an idle thread keeps no batch alive

    def _next_task(self) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        if self._on_idle is None:
            return self._tasks.get()
        try:
            return self._tasks.get(timeout=self._idle_after)
        except queue.Empty:
            self._on_idle()
            return self._tasks.get()


def _run_into_future(
    future: Future[Any], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = fn(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)

"""The handler thread, in which all of a model author's code runs: loading, warm-up and every batch."""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from serve_app.telemetry import crash_reports

log = logging.getLogger(__name__)

IDLE_AFTER_S = 60.0


class MainThread:
    """The main thread of this process, where it may run a handler's code.

    Python's event loops, signal handlers and ``threading.main_thread()`` belong to it, and TorchServe runs
    handlers there.
    """

    def __init__(self) -> None:
        self._offered: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._stop: Callable[[], None] | None = None  # of the work in progress
        self._lock = threading.Lock()

    def offer(self) -> None:
        """Let handler threads take the main thread, which is going to call ``run_work``."""
        self._offered = queue.SimpleQueue()

    def run_work(self) -> None:
        """Run the work of one handler thread after the other; return after ``end``."""
        assert self._offered is not None, "offer() comes first"
        while (work := self._offered.get()) is not None:
            work()
            self._stop = None

    def take(self, work: Callable[[], None], stop: Callable[[], None]) -> bool:
        """Let the main thread run ``work``; return False where it is not offered, or taken."""
        with self._lock:
            if self._offered is None or self._stop is not None:
                return False
            self._stop = stop
        self._offered.put(work)
        return True

    def end(self) -> None:
        """Stop the work in progress, and let ``run_work`` return."""
        if self._offered is not None:
            self._offered.put(None)
        if (stop := self._stop) is not None:
            stop()


MAIN_THREAD = MainThread()


class HandlerThread(Executor):
    """An executor of one thread, in order: the main thread where it is offered, else one of its own.

    It is a daemon: a handler that hangs must not keep its process alive. ``on_idle`` is called in it, once,
    after ``idle_after`` seconds without a task. ``own`` leaves the main thread to others.
    """

    def __init__(
        self,
        on_idle: Callable[[], object] | None = None,
        idle_after: float = IDLE_AFTER_S,
        own: bool = False,
    ) -> None:
        self._on_idle = on_idle
        self._idle_after = idle_after
        self._tasks: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = (
            queue.SimpleQueue()
        )
        self._ended = False
        self._stopped = threading.Event()
        self._thread = threading.main_thread()
        if own or not MAIN_THREAD.take(self._work, lambda: self._tasks.put(None)):
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
            self._stopped.wait()

    def _work(self) -> None:
        # A main thread has an event loop: `asyncio.get_event_loop()` returns it.
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        try:
            while (task := self._next_task()) is not None:
                try:
                    task[0](*task[1])
                except BaseException:  # no error of a handler may end the thread
                    log.exception("a task of the author's thread failed")
                del task  # an idle thread keeps no batch alive
        finally:
            asyncio.set_event_loop(None)
            loop.close()
            self._stopped.set()

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

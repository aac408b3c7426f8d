"""Cancellation of an operation at a chosen await, with threads whose progress at that moment is known."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class FinishedExecutor(ThreadPoolExecutor):
    """An executor whose functions have ended when their caller begins to wait for them.

    A caller that is cancelled then leaves a save behind that was stored.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        _run(future, function, args, options)
        return future


class QueuedExecutor(ThreadPoolExecutor):
    """An executor whose functions have not begun when their caller begins to wait for them."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def begin() -> None:
            if future.set_running_or_notify_cancel():
                _run(future, function, args, options)

        asyncio.get_running_loop().call_soon(begin)
        return future


def _run(future: Future[Any], function: Callable[..., Any], args: Any, options: Any) -> None:
    try:
        future.set_result(function(*args, **options))
    except BaseException as error:
        future.set_exception(error)


@types.coroutine
def cancel_at(
    number: int, work: Coroutine[Any, Any, Any], repeatedly: bool = False
) -> Generator[Any, Any, Any]:
    """Await ``work``, and cancel the current task when it waits for the ``number``-th time.

    ``repeatedly``: and each time after that.
    """
    step: Callable[[Any], Any] = work.send
    value: Any = None
    while True:
        try:
            awaited = step(value)
        except StopIteration as end:
            return end.value
        number -= 1
        if number == 0 or (repeatedly and number < 0):
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # is delivered as soon as this task waits
        try:
            step, value = work.send, (yield awaited)
        except BaseException as error:
            step, value = work.throw, error

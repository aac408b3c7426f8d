"""Backends: what executes requests, with a callback for each outcome.

A request that nothing waits for costs neither a task nor a future, which take 60 µs together. Where a
coroutine waits for an outcome, ``Backend.infer`` puts a future around the callback; where a backend has to
wait, ``TaskBackend`` puts a task behind it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseStream,
    Submit,
)
from serve_app.errors import RelayError, ReplicaDied

_tasks: set[asyncio.Task[Any]] = set()  # the event loop keeps only weak references


class Backend(ABC):
    """A component that executes requests: a batcher of this process, or replicas behind a connection."""

    __slots__ = ()

    @abstractmethod
    def submit(self, request: InferenceRequest, on_done: OnDone, /) -> Cancel:
        """Start a request, and return a function that withdraws it when its client disconnects.

        ``on_done`` receives the outcome once, possibly before this method returns, and nothing after the
        withdrawal. After it the withdrawal has no effect. Raises RelayError where the request is refused at
        once; ``on_done`` receives nothing then.
        """

    async def infer(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response to a request; a stream is returned with its first chunk. Raises RelayError."""
        return await infer(self.submit, request)

    async def infer_all(self, requests: Sequence[InferenceRequest]) -> list[Outcome]:
        """Return the response or the error of each request of one group."""
        return await infer_all(self.submit, requests)


class TaskBackend(Backend):
    """A backend that runs a coroutine function, in a task for each request."""

    __slots__ = ("_answer",)

    def __init__(
        self, answer: Callable[[InferenceRequest], Coroutine[Any, Any, InferenceResponse | ResponseStream]]
    ) -> None:
        self._answer = answer

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        return TaskRequest(self._answer(request), on_done).cancel


class TaskRequest:
    """A request that is answered by a coroutine in a task of its own."""

    __slots__ = ("_on_done", "task")

    def __init__(
        self, answer: Coroutine[Any, Any, InferenceResponse | ResponseStream], on_done: OnDone
    ) -> None:
        self._on_done: OnDone | None = on_done
        self.task = asyncio.get_running_loop().create_task(answer)
        _tasks.add(self.task)
        self.task.add_done_callback(self._on_task_done)

    def cancel(self) -> None:
        """Withdraw the request."""
        self._on_done = None
        self.task.cancel()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        _tasks.discard(task)
        on_done, self._on_done = self._on_done, None
        # A cancellation that nobody here has requested comes from Ray, whose replica ends.
        error = ReplicaDied("its request was cancelled") if task.cancelled() else task.exception()
        if isinstance(error, BaseException) and not isinstance(error, Exception):
            raise error
        outcome: Outcome = task.result() if error is None else error
        if on_done is not None:
            on_done(outcome)
        else:
            close_soon(outcome)


async def infer(submit: Submit, request: InferenceRequest) -> InferenceResponse | ResponseStream:
    """Return the response to a request; the caller's cancellation withdraws it. Raises RelayError."""
    future: asyncio.Future[InferenceResponse | ResponseStream] = asyncio.get_running_loop().create_future()
    cancel = submit(request, partial(_resolve, future))
    try:
        return await future
    except asyncio.CancelledError:
        cancel()
        if future.done() and not future.cancelled() and future.exception() is None:
            await close(future.result())  # it arrived as the caller was cancelled
        raise
    finally:
        del future, cancel  # the traceback of an error refers to this frame


async def infer_all(submit: Submit, requests: Sequence[InferenceRequest]) -> list[Outcome]:
    """Return the response or the error of each request of one group."""
    outcomes: list[Outcome] = [RelayError()] * len(requests)
    left = len(requests)
    all_done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(index: int, outcome: Outcome) -> None:
        nonlocal left
        outcomes[index] = outcome
        left -= 1
        if not left and not all_done.done():
            all_done.set_result(None)

    cancels: list[Cancel] = []
    for index, request in enumerate(requests):
        try:
            cancels.append(submit(request, partial(on_done, index)))
        except RelayError as error:
            on_done(index, error)
    try:
        if requests:
            await all_done
    except asyncio.CancelledError:
        for cancel in cancels:
            cancel()
        for outcome in outcomes:
            await close(outcome)
        raise
    return outcomes


async def close(outcome: Outcome) -> None:
    """Close the outcome of a request whose client has disconnected, where it is a stream."""
    if isinstance(outcome, ResponseStream):
        await outcome.aclose()


def close_soon(outcome: Outcome) -> None:
    """Close an outcome in a task, where it is a stream."""
    if isinstance(outcome, ResponseStream):
        task = asyncio.get_running_loop().create_task(outcome.aclose())
        _tasks.add(task)
        task.add_done_callback(_tasks.discard)


def _resolve(future: asyncio.Future[InferenceResponse | ResponseStream], outcome: Outcome) -> None:
    if future.done():  # the caller was cancelled in this turn of the event loop
        close_soon(outcome)
    elif isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

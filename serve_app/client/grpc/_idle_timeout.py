"""An idle timeout for streams: gRPC itself has a deadline for a whole call only."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator
from typing import Any

import grpc

from serve_app.client.grpc import errors

_END = object()


def iterate_with_timeout(call: Any, idle_timeout: float | None) -> Generator[Any, None, None]:
    """Yield the messages of ``call``.

    Raises DeadlineExceededError where the reader waits for a message for more than ``idle_timeout`` seconds.
    """
    if idle_timeout is None:
        yield from call
        return
    watchdog = _IdleWatchdog(call, idle_timeout)
    ended = threading.Event()
    threading.Thread(target=watchdog.watch, args=(ended,), daemon=True).start()
    try:
        while True:
            with watchdog:
                message = next(call, _END)
            if message is _END:
                return
            yield message
    except grpc.RpcError:
        if watchdog.expired:
            raise errors.idle_timeout_error(idle_timeout) from None
        raise
    finally:
        ended.set()


async def iterate_with_timeout_async(call: Any, idle_timeout: float | None) -> AsyncGenerator[Any, None]:
    """Yield the messages of a call of ``grpc.aio``, as ``iterate_with_timeout`` does."""
    if idle_timeout is None:
        async for message in call:
            yield message
        return
    watchdog = _IdleWatchdog(call, idle_timeout)
    watch = asyncio.create_task(watchdog.watch_async())
    messages = aiter(call)
    try:
        while True:
            with watchdog:
                message = await anext(messages, _END)
            if message is _END:
                return
            yield message
    except asyncio.CancelledError:  # gRPC raises it for a call that was cancelled by this process
        if watchdog.expired:
            raise errors.idle_timeout_error(idle_timeout) from None
        raise
    finally:
        watch.cancel()


class _IdleWatchdog:
    """A context manager that cancels ``call`` when one wait for a message exceeds ``idle_timeout`` s."""

    def __init__(self, call: Any, idle_timeout: float) -> None:
        self._call = call
        self._idle_timeout = idle_timeout
        self._waiting_since: float | None = None
        self.expired = False

    def __enter__(self) -> None:
        self._waiting_since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._waiting_since = None

    def watch(self, ended: threading.Event) -> None:
        while not self.expired and not ended.wait(self._remaining()):
            self._cancel_if_expired()

    async def watch_async(self) -> None:
        while not self.expired:
            await asyncio.sleep(self._remaining())
            self._cancel_if_expired()

    def _remaining(self) -> float:
        """Return the seconds until the current wait may expire."""
        since = self._waiting_since
        return (
            self._idle_timeout if since is None else max(0.0, since + self._idle_timeout - time.monotonic())
        )

    def _cancel_if_expired(self) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - since >= self._idle_timeout:
            self.expired = True
            self._call.cancel()

"""The messages of a stream, until nothing comes for too long: gRPC itself knows a deadline for all of a call alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc

from serve_app.client.grpc import errors

_END = object()


def heard(call: Any, seconds: float | None) -> Iterator[Any]:
    """The messages of ``call``; raises DeadlineExceeded where its reader waits for one for more than ``seconds``."""
    if seconds is None:
        yield from call
        return
    watch = _Watch(call, seconds)
    over = threading.Event()
    threading.Thread(target=watch.until, args=(over,), daemon=True).start()
    try:
        while True:
            with watch:
                message = next(call, _END)
            if message is _END:
                return
            yield message
    except grpc.RpcError:
        if watch.broken:
            raise errors.too_silent(seconds) from None
        raise
    finally:
        over.set()


async def heard_async(call: Any, seconds: float | None) -> AsyncIterator[Any]:
    """The same of a call of ``grpc.aio``."""
    if seconds is None:
        async for message in call:
            yield message
        return
    watch = _Watch(call, seconds)
    looking = asyncio.create_task(watch.look())
    messages = aiter(call)
    try:
        while True:
            with watch:
                message = await anext(messages, _END)
            if message is _END:
                return
            yield message
    except asyncio.CancelledError:  # what gRPC raises of a call that was cancelled here
        if watch.broken:
            raise errors.too_silent(seconds) from None
        raise
    finally:
        looking.cancel()


class _Watch:
    """Cancels ``call`` where what is done under it, waiting for a message, takes more than ``seconds``."""

    def __init__(self, call: Any, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._since: float | None = None  # when the wait began
        self.broken = False

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def until(self, over: threading.Event) -> None:
        while not self.broken and not over.wait(self._pause()):
            self._break()

    async def look(self) -> None:
        while not self.broken:
            await asyncio.sleep(self._pause())
            self._break()

    def _pause(self) -> float:
        """Seconds until it may be too long."""
        since = self._since
        return self._seconds if since is None else max(0.0, since + self._seconds - time.monotonic())

    def _break(self) -> None:
        since = self._since
        if since is not None and time.monotonic() - since >= self._seconds:
            self.broken = True
            self._call.cancel()

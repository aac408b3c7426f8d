"""The bytes that a port buffers for its peers: unfinished messages and undelivered responses."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
from collections.abc import Hashable
from typing import Protocol

from serve_app.http2.limits import Http2Limits
from serve_app.http2.timeout_queue import TimeoutQueue

_MIN_STALL = 1.0  # seconds without progress after which a buffer yields to others
_MIN_TRIM = 16 << 20  # bytes that were buffered
_TRIM_DELAY = 1.0  # seconds


class StalledPeer(Hashable, Protocol):
    """A stream, call or connection that waits for its peer."""

    @property
    def share(self) -> BufferShare: ...

    def expire(self) -> None:
        """End it, because its peer has made no progress."""

    def evict(self) -> None:
        """End it, because others need its room."""


class SuspendedCall(StalledPeer, Protocol):
    """A call whose peer may not send the rest of its message before there is room."""

    def extend_window(self) -> None:
        """Let the peer send the rest if the budget suffices now."""


class WaitingQueues:
    """What waits for peers on a port, each kind in a queue with its timeout."""

    def __init__(self, limits: Http2Limits) -> None:
        def queue(timeout: float) -> TimeoutQueue[StalledPeer]:
            return TimeoutQueue(timeout, lambda entry: entry.expire())

        self.connections = queue(limits.header_timeout)  # with an unfinished handshake or header block
        self.unfinished = queue(limits.message_timeout)  # calls without their complete message
        self.suspended: TimeoutQueue[SuspendedCall] = TimeoutQueue(
            limits.message_timeout, lambda call: call.evict()
        )
        self.idle_streams = queue(limits.stream_idle_timeout)  # calls between two messages
        self.undelivered = queue(limits.send_timeout)  # streams with a response

    def stop(self) -> None:
        """Cancel the timers."""
        for queue in (self.connections, self.unfinished, self.idle_streams, self.undelivered):
            queue.stop()
        self.suspended.stop()


class BufferBudget:
    """The limit of buffered bytes of all connections of a port."""

    def __init__(self, limit: int, queues: WaitingQueues) -> None:
        self.limit = limit
        self.used = 0
        self._stalled = (queues.unfinished, queues.undelivered)
        self._suspended = queues.suspended
        self._resuming = False
        self._peak = 0

    def evict_stalled(self, held: int) -> bool:
        """End the buffer longest without progress, for a connection that holds ``held`` bytes.

        Return False if there is none. A buffer of a connection that holds less stays.
        """
        for queue in self._stalled:
            buffer = queue.oldest(_MIN_STALL)
            if buffer is not None and buffer.share.held >= held:
                queue.discard(buffer)
                buffer.evict()
                return True
        return False

    def resume_calls(self) -> None:
        """Let suspended calls continue, once per turn of the event loop."""
        if not self._resuming:
            self._resuming = True
            asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        self._resuming = False
        for call in self._suspended:
            call.extend_window()

    def on_released(self) -> None:
        """Continue suspended calls; return the memory of many buffers to the system after a second.

        glibc keeps freed memory between live objects: 29 MB of unfinished header blocks.
        """
        if self._suspended:
            self.resume_calls()
        if self._peak > _MIN_TRIM and self.used < _MIN_TRIM // 16:
            self._peak = 0
            asyncio.get_running_loop().call_later(_TRIM_DELAY, self._trim)

    def _trim(self) -> None:
        if self.used < _MIN_TRIM // 16:
            with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
                ctypes.CDLL(None).malloc_trim(0)

    def count(self, size: int) -> None:
        self.used += size
        self._peak = max(self._peak, self.used)


class BufferShare:
    """The bytes that one connection holds of a budget.

    A connection may hold as many bytes as remain free: one alone half of the budget, each of three a quarter.
    So connections that hold much never exclude one that holds little.
    """

    __slots__ = ("_budget", "held")

    def __init__(self, budget: BufferBudget) -> None:
        self._budget = budget
        self.held = 0

    def reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes, at the expense of buffers without progress; return False without room."""
        budget = self._budget
        while self.held + size > budget.limit - budget.used:
            if not budget.evict_stalled(self.held):
                return False
        self.add(size)
        return True

    def reserve_ahead(self, size: int) -> bool:
        """Reserve ``size`` bytes that the peer may send; return False without room.

        Half of what a connection may hold remains for what its peer may send without permission.
        """
        budget = self._budget
        if 2 * (self.held + size) > budget.limit - budget.used:
            return False
        self.add(size)
        return True

    def reserve_response(self, size: int) -> bool:
        """Reserve ``size`` bytes of a response, which exists already; return False without room.

        One connection may use nearly the whole budget, because a client cannot control how many of its
        responses are ready at the same time.
        """
        budget = self._budget
        while budget.used + size > budget.limit - budget.limit // 8:
            if not budget.evict_stalled(0):
                return False
        self.add(size)
        return True

    def reserve_frame(self, size: int) -> bool:
        """Reserve ``size`` bytes of an unfinished frame; return False if the budget is used up."""
        if self._budget.used + size > self._budget.limit:
            return False
        self.add(size)
        return True

    def add(self, size: int) -> None:
        """Count ``size`` bytes that are in memory already."""
        self.held += size
        self._budget.count(size)

    def release(self, size: int) -> None:
        self.held -= size
        self._budget.used -= size
        self._budget.on_released()

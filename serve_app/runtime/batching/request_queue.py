"""Pending requests, and their queue by priority. They belong to the event loop.

A queue is first in, first out, with bounded overtaking by higher priorities.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from math import inf
from typing import Generic, Protocol, TypeVar

from serve_app.domain.request import (
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    Priority,
    ResponseStream,
    Timings,
)
from serve_app.errors import ClientTooSlow, RelayError

# Seconds for which later rows of a higher priority may overtake a row, so that no row waits for ever.
PRIORITY_AGING_S: dict[Priority, float] = {"high": 0.0, "normal": 0.5, "low": 3.0}


class QueuedItem(Protocol):
    """An item of a queue."""

    request: InferenceRequest
    arrived: float  # on one clock for all of a queue


R = TypeVar("R", bound=QueuedItem)


class RequestQueue(Generic[R]):
    """A queue that is first in, first out for each priority; the head with the smallest arrival + aging time
    is next.

    ``live`` counts the rows of clients. ``shadows`` are kept apart, and only ``take_shadows`` removes them.
    The queue itself has no limit.
    """

    __slots__ = ("_by_priority", "_normal", "live", "shadows")

    def __init__(self) -> None:
        self.live = 0
        self.shadows: deque[R] = deque()
        self._by_priority: dict[Priority, deque[R]] = {priority: deque() for priority in PRIORITY_AGING_S}
        self._normal = self._by_priority["normal"]

    def __iter__(self) -> Iterator[R]:
        """Iterate over live rows, the highest priority first."""
        return chain(*self._by_priority.values())

    def put(self, row: R) -> None:
        priority = row.request.priority
        if priority == "shadow":
            self.shadows.append(row)
        else:
            self._by_priority[priority].append(row)
            self.live += 1

    def put_back(self, row: R) -> None:
        """Return a row that was taken to the head of its queue."""
        if row.request.priority == "shadow":
            self.shadows.appendleft(row)
        else:
            self._by_priority[row.request.priority].appendleft(row)
            self.live += 1

    def peek(self) -> R:
        """Return the next row of a queue that is not empty."""
        return self._next()[0]

    def pop(self) -> R:
        """Remove and return the next row of a queue that is not empty."""
        row = self._next().popleft()
        self.live -= 1
        return row

    def take(self, max_rows: int) -> list[R]:
        """Remove and return the next live rows, at most ``max_rows``, all of one kind of request."""
        rows: list[R] = []
        queue = self._normal
        while self.live and len(rows) < max_rows:
            if len(queue) != self.live:
                queue = self._next()
            if rows and queue[0].request.kind != rows[0].request.kind:
                break
            rows.append(queue.popleft())
            self.live -= 1
        return rows

    def window(self, max_rows: int) -> list[R]:
        """Return the next row and those of its kind among the first ``max_rows``; the queue is not empty."""
        first = self.peek()
        kind = first.request.kind
        return [
            first,
            *(row for row in islice(self, max_rows) if row is not first and row.request.kind == kind),
        ]

    def take_shadows(self, max_rows: int) -> list[R]:
        """Remove and return shadows, as ``take`` does with live rows."""
        rows: list[R] = []
        shadows = self.shadows
        while (
            shadows and len(rows) < max_rows and (not rows or shadows[0].request.kind == rows[0].request.kind)
        ):
            rows.append(shadows.popleft())
        return rows

    def remove(self, row: R) -> bool:
        """Remove a row; return whether it was in the queue."""
        priority = row.request.priority
        try:
            (self.shadows if priority == "shadow" else self._by_priority[priority]).remove(row)
        except ValueError:
            return False
        self.live -= priority != "shadow"
        return True

    def newest_below(self, priority: Priority) -> R | None:
        """Return the newest row of the lowest priority, if that is below ``priority``."""
        for other in reversed(PRIORITY_AGING_S):
            if other == priority:
                break
            if queue := self._by_priority[other]:
                return queue[-1]
        return None

    def count_before(self, priority: Priority) -> int:
        """Return how many rows have at least this priority; aged rows of lower priority may overtake them."""
        if len(self._normal) == self.live and priority != "high":
            return self.live
        count = 0
        for other, queue in self._by_priority.items():
            count += len(queue)
            if other == priority:
                break
        return count

    def has_mixed_kinds(self) -> bool:
        """Return whether rows of several kinds wait, judged by the heads and tails of the queues."""
        normal = self._normal
        if len(normal) == self.live:
            return normal[0].request.kind != normal[-1].request.kind
        kind = self.peek().request.kind
        return any(
            q and (q[0].request.kind != kind or q[-1].request.kind != kind)
            for q in self._by_priority.values()
        )

    def oldest_arrival(self) -> float:
        """Return the arrival time of the oldest row of a queue that is not empty."""
        return min(queue[0].arrived for queue in self._by_priority.values() if queue)

    def clear(self) -> list[R]:
        """Remove and return every row, shadows too."""
        rows = [*self, *self.shadows]
        for queue in (*self._by_priority.values(), self.shadows):
            queue.clear()
        self.live = 0
        return rows

    def _next(self) -> deque[R]:
        """Return the queue whose head is next."""
        best = self._normal
        if len(best) != self.live:
            lowest = inf
            for priority, queue in self._by_priority.items():
                if queue and (rank := queue[0].arrived + PRIORITY_AGING_S[priority]) < lowest:
                    best, lowest = queue, rank
        return best


MAX_BUFFERED_BYTES = 64 * 1024 * 1024  # bytes of one response that are buffered for a slow client

# (the row's index in the batch, a chunk of its response)
Emit = Callable[[int, "bytes | InferenceResponse"], None]


def _ignore_disconnect() -> None:
    """Do nothing when a client disconnects."""


class StreamBuffer(AsyncIterator[bytes]):
    """A buffer of the chunks of a streamed response; ``on_disconnect`` is called when the client disconnects.

    A client that is more than ``max_buffered`` bytes behind gets ClientTooSlow, and counts as disconnected.
    """

    __slots__ = ("_buffered", "_chunks", "_ended", "_error", "_max_buffered", "_on_disconnect", "_waiter")

    def __init__(
        self, on_disconnect: Callable[[], None] = _ignore_disconnect, max_buffered: int = MAX_BUFFERED_BYTES
    ) -> None:
        self._on_disconnect = on_disconnect
        self._max_buffered = max_buffered
        self._buffered = 0  # bytes in the buffer
        self._chunks: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: RelayError | None = None

    @property
    def has_ended(self) -> bool:
        """Return whether it is complete, has failed, or has no reader any more."""
        return self._ended

    def append(self, chunk: bytes) -> None:
        if self._ended:
            return
        self._buffered += len(chunk)
        if self._buffered > self._max_buffered:
            self._chunks.clear()
            self.finish(ClientTooSlow(self._max_buffered))
            self._on_disconnect()
        else:
            self._chunks.append(chunk)
            self._wake()

    def finish(self, error: RelayError | None = None) -> None:
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> bytes:
        while not self._chunks:
            if self._ended:
                error, self._error = self._error, None
                raise error or StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        return chunk

    async def aclose(self) -> None:
        """Drop all chunks, because the client disconnected."""
        self.finish()
        self._chunks.clear()
        self._on_disconnect()


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request until ``on_done`` has its outcome; ``stream`` continues where that is a stream."""

    request: InferenceRequest
    on_done: OnDone | None  # None once it was called, and when the client has disconnected
    arrived: float
    stream: StreamBuffer | None = None
    expiry: asyncio.TimerHandle | None = None  # the timer of the deadline

    @property
    def is_done(self) -> bool:
        """Return whether no client waits for the outcome; a stream may continue."""
        return self.on_done is None

    @property
    def has_left(self) -> bool:
        """Return whether nobody reads the outcome or the rest of its stream. Any thread may read it."""
        return self.on_done is None and (self.stream is None or self.stream.has_ended)

    def add_chunk(
        self, chunk: bytes | InferenceResponse, on_disconnect: Callable[[], None] = _ignore_disconnect
    ) -> None:
        """Add a chunk; the first is an InferenceResponse with the status and headers of the stream."""
        if isinstance(chunk, InferenceResponse):
            if self.on_done is None:
                return
            head, chunk = chunk, chunk.body
            self.stream = StreamBuffer(on_disconnect)
            self.complete(ResponseStream(_stream_head(head), self.stream))
        if self.stream is not None:
            self.stream.append(chunk)

    def resolve(self, response: InferenceResponse | RelayError) -> None:
        """Complete the request with its response or its last chunk.

        An error is copied: an exception raised in several tasks would collect the tracebacks of all of them.
        """
        if self.expiry is not None:
            self.expiry.cancel()
        if self.stream is not None:
            if isinstance(response, InferenceResponse):
                self.stream.append(response.body)
                self.stream.finish()
            else:
                self.stream.finish(_copy_error(response))
        elif self.on_done is not None:
            self.complete(response if isinstance(response, InferenceResponse) else _copy_error(response))

    def complete(self, outcome: Outcome) -> None:
        """Pass the outcome to the waiting client."""
        on_done, self.on_done = (
            self.on_done,
            None,
        )  # no reference stays: a request is freed without collection
        assert on_done is not None
        on_done(outcome)


def with_timings(reply: InferenceResponse, timings: Timings) -> InferenceResponse:
    # dataclasses.replace takes twice as long, and this runs for every row.
    return InferenceResponse(
        reply.body, reply.content_type, reply.status, reply.phrase, reply.headers, reply.version, timings
    )


def _stream_head(first: InferenceResponse) -> InferenceResponse:
    """Return the head of a stream whose first chunk is ``first.body``."""
    return InferenceResponse(
        b"", first.content_type, first.status, first.phrase, first.headers, first.version, first.timings
    )


def _copy_error(error: RelayError) -> RelayError:
    own = type(error)(*error.args)
    own.__dict__.update(error.__dict__)
    return own

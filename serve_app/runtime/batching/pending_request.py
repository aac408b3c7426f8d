"""Pending requests: one response, an error, or a stream of chunks. They belong to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from serve_app.domain.request import (
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseStream,
    Timings,
)
from serve_app.errors import ClientTooSlow, RelayError

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

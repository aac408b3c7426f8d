"""A WebSocket for predictions: requests one after the other over one connection, with streamed responses."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed

from serve_app.client import errors
from serve_app.client._ws_transport import AsyncConnection, Connection

_GRACE = 1.0  # seconds for the server's own timeout response to arrive
_END_PREFIX = '{"end":'
_Failures = (ConnectionClosed, TimeoutError, asyncio.TimeoutError)


@dataclass(frozen=True)
class StreamEnd:
    """The server's final message of a response; ``chunks`` is the number of its chunks.

    ``version``, ``arm`` and ``request_id`` are those of a ``Prediction``.
    """

    status: int
    version: str
    arm: str
    request_id: str
    chunks: int


class _ResponseQueue:
    """The expected responses in the order of their requests, independent of how messages are received."""

    def __init__(self, idle_timeout: float | None, timeout: float | None) -> None:
        self.end: StreamEnd | None = None
        self._idle_timeout = idle_timeout  # seconds in which a message must arrive
        self._timeout = timeout  # seconds for a whole response
        self._deadline: float | None = None
        self._requests = 0
        self._responses = 0
        self._chunks = 0  # of the current response

    def add_request(self) -> None:
        self._requests += 1

    def receive_timeout(self) -> float | None:
        """Return the seconds in which the next message must arrive."""
        if self._requests == self._responses:
            raise RuntimeError("No response is pending: send a request, then read its response.")
        if self._timeout is None:
            return self._idle_timeout
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout
        remaining = max(0.0, self._deadline - time.monotonic())
        return (remaining if self._idle_timeout is None else min(self._idle_timeout, remaining)) + _GRACE

    def parse_message(self, message: str | bytes) -> bytes | None:
        """Return the chunk in a message; None at the end of a response.

        Raises ServerError where the response ends in an error.
        """
        if isinstance(message, bytes):
            self._chunks += 1
            return message
        end = self._parse_end(message)
        if end is None:
            self._chunks += 1
            return message.encode()
        self._responses += 1
        self._chunks, self._deadline = 0, None
        self.end = StreamEnd(
            end["status"], end["version"], end.get("arm", ""), end["request_id"], end["chunks"]
        )
        if "error" in end or not 200 <= self.end.status < 300:
            raise errors.from_stream_end(end)
        return None

    def convert_failure(self, failure: Exception) -> Exception:
        """Return the error to raise where no message was received."""
        if not isinstance(failure, ConnectionClosed):
            return httpx.ReadTimeout("No message was received in time.")
        close = failure.rcvd
        if close is not None and (error := errors.from_close_code(close.code, close.reason)) is not None:
            return error
        return httpx.RemoteProtocolError(f"The connection ended before the responses had: {failure}")

    def _parse_end(self, message: str) -> dict[str, Any] | None:
        """Return the final message of a response.

        A chunk of a model may look like one, but it does not hold the number of chunks before it.
        """
        if not message.startswith(_END_PREFIX):
            return None
        try:
            end: dict[str, Any] = json.loads(message)["end"]
            return end if "request_id" in end and end["chunks"] == self._chunks else None
        except (ValueError, KeyError, TypeError):
            return None


class _BaseSocket:
    """A connection whose requests are answered in order; up to 16 may wait for the one before them."""

    def __init__(self, idle_timeout: float | None, timeout: float | None) -> None:
        self._responses = _ResponseQueue(idle_timeout, timeout)

    @property
    def end(self) -> StreamEnd | None:
        """The final message of the last response; None before the first."""
        return self._responses.end


class Socket(_BaseSocket):
    """An open connection to a model: ``send`` sends a request, a ``for`` statement reads the next response.

    A ``for`` statement that is left early is continued by the next one. One thread may send while another
    reads. A response that ends in an error raises a ServerError after its chunks; the next response can be
    read. A message that is too large raises RequestTooLargeError and closes the connection.
    httpx.RemoteProtocolError: the connection ended before the response; httpx.ReadTimeout: the client's
    ``timeout``, or that of the response, has passed.
    """

    def __init__(self, connection: Connection, idle_timeout: float | None, timeout: float | None) -> None:
        super().__init__(idle_timeout, timeout)
        self._connection = connection

    def send(self, body: bytes | str) -> None:
        """Send a request; without a content type, text that begins like a JSON object or list is JSON."""
        self._responses.add_request()
        try:
            self._connection.send(body)
        except _Failures as failure:
            raise self._responses.convert_failure(failure) from failure

    def __iter__(self) -> Socket:
        return self

    def __next__(self) -> bytes:
        try:
            message = self._connection.recv(self._responses.receive_timeout())
        except _Failures as failure:
            raise self._responses.convert_failure(failure) from failure
        chunk = self._responses.parse_message(message)
        if chunk is None:
            raise StopIteration
        return chunk


class AsyncSocket(_BaseSocket):
    """A ``Socket`` for asyncio: ``await send(...)``, and ``async for``."""

    def __init__(
        self, connection: AsyncConnection, idle_timeout: float | None, timeout: float | None
    ) -> None:
        super().__init__(idle_timeout, timeout)
        self._connection = connection

    async def send(self, body: bytes | str) -> None:
        """Send a request, as ``Socket.send`` does."""
        self._responses.add_request()
        try:
            await self._connection.send(body)
        except _Failures as failure:
            raise self._responses.convert_failure(failure) from failure

    def __aiter__(self) -> AsyncSocket:
        return self

    async def __anext__(self) -> bytes:
        timeout = self._responses.receive_timeout()
        try:
            message = await asyncio.wait_for(self._connection.recv(), timeout)
        except _Failures as failure:
            raise self._responses.convert_failure(failure) from failure
        chunk = self._responses.parse_message(message)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

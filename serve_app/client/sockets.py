"""A WebSocket of predictions: requests one after the other over one connection, and the pieces of their answers."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import httpx
from websockets.exceptions import ConnectionClosed

from serve_app.client import errors
from serve_app.client.upgrade import AsyncLine, Line

_GRACE = 1.0  # seconds for the answer that the time is over to arrive
_END = '{"end":'
_Failures = (ConnectionClosed, TimeoutError, asyncio.TimeoutError)


@dataclass(frozen=True)
class End:
    """What the server said of an answer when it had ended: its ``pieces`` are how many there were.

    ``version``, ``arm`` and ``request_id`` are as a ``Prediction`` has them.
    """

    status: int
    version: str
    arm: str
    request_id: str
    pieces: int


class _Answers:
    """The answers to what was sent, in its order, apart from how they are waited for."""

    def __init__(self, silence: float | None, within: float | None) -> None:
        self.end: End | None = None
        self._silence = silence  # seconds in which something must come
        self._within = within  # seconds for all of an answer
        self._until: float | None = None
        self._asked = 0
        self._ended = 0
        self._pieces = 0  # of the one under way

    def asked(self) -> None:
        self._asked += 1

    def wait(self) -> float | None:
        """Seconds for the next message."""
        if self._asked == self._ended:
            raise RuntimeError("Nothing was asked that has not been answered: send a request, then read its answer.")
        if self._within is None:
            return self._silence
        if self._until is None:
            self._until = time.monotonic() + self._within
        left = max(0.0, self._until - time.monotonic())
        return (left if self._silence is None else min(self._silence, left)) + _GRACE

    def take(self, message: str | bytes) -> bytes | None:
        """The piece that a message is; None at the end of an answer. Raises ServerError where it went wrong."""
        if isinstance(message, bytes):
            self._pieces += 1
            return message
        said = self._ending(message)
        if said is None:
            self._pieces += 1
            return message.encode()
        self._ended += 1
        self._pieces, self._until = 0, None
        self.end = End(said["status"], said["version"], said.get("arm", ""), said["request_id"], said["pieces"])
        if "error" in said or not 200 <= self.end.status < 300:
            raise errors.ended(said)
        return None

    def failed(self, failure: Exception) -> Exception:
        """What is raised where no message came."""
        if not isinstance(failure, ConnectionClosed):
            return httpx.ReadTimeout("No message came in time.")
        close = failure.rcvd
        if close is not None and (error := errors.closed(close.code, close.reason)) is not None:
            return error
        return httpx.RemoteProtocolError(f"The connection ended before the answers had: {failure}")

    def _ending(self, message: str) -> dict | None:
        """What an end says; a model's piece may look like one, but does not count what came before it."""
        if not message.startswith(_END):
            return None
        try:
            said = json.loads(message)["end"]
            return said if "request_id" in said and said["pieces"] == self._pieces else None
        except (ValueError, KeyError, TypeError):
            return None


class _Socket:
    """Requests are answered in the order in which they were sent; up to 16 may wait for the one before them."""

    def __init__(self, silence: float | None, within: float | None) -> None:
        self._answers = _Answers(silence, within)

    @property
    def end(self) -> End | None:
        """What was said of the answer that ended last; None before the first."""
        return self._answers.end


class Socket(_Socket):
    """An open connection to a model: ``send`` asks, and a ``for`` statement reads the pieces of the next answer.

    A ``for`` that is left before its end is gone on with by the next one. One thread may send while another reads.
    Where an answer ends in an error, a ServerError is raised behind its pieces, and the next can be read. A message
    that is too large raises TooLarge and ends the connection. httpx.RemoteProtocolError: it ended before the answer;
    httpx.ReadTimeout: the client's ``timeout``, or the answer's own time, is over.
    """

    def __init__(self, line: Line, silence: float | None, within: float | None) -> None:
        super().__init__(silence, within)
        self._line = line

    def send(self, body: bytes | str) -> None:
        """Ask. Where no content type was said, text that begins as a JSON object or list does is JSON."""
        self._answers.asked()
        try:
            self._line.send(body)
        except _Failures as failure:
            raise self._answers.failed(failure) from failure

    def __iter__(self) -> Socket:
        return self

    def __next__(self) -> bytes:
        try:
            message = self._line.recv(self._answers.wait())
        except _Failures as failure:
            raise self._answers.failed(failure) from failure
        piece = self._answers.take(message)
        if piece is None:
            raise StopIteration
        return piece


class AsyncSocket(_Socket):
    """The same for asyncio: ``await send(...)``, and ``async for``."""

    def __init__(self, line: AsyncLine, silence: float | None, within: float | None) -> None:
        super().__init__(silence, within)
        self._line = line

    async def send(self, body: bytes | str) -> None:
        """Ask, as ``Socket.send`` does."""
        self._answers.asked()
        try:
            await self._line.send(body)
        except _Failures as failure:
            raise self._answers.failed(failure) from failure

    def __aiter__(self) -> AsyncSocket:
        return self

    async def __anext__(self) -> bytes:
        wait = self._answers.wait()
        try:
            message = await asyncio.wait_for(self._line.recv(), wait)
        except _Failures as failure:
            raise self._answers.failed(failure) from failure
        piece = self._answers.take(message)
        if piece is None:
            raise StopAsyncIteration
        return piece

"""The frames of the Unix-socket transport: messages of one turn of the event loop, and their fields.

A frame is four bytes of length and a pickled list of messages, each with the number of its row. Requests and
responses are tuples of their fields, which pickle faster than objects. Pickle is trusted here: the sockets
lie in a directory that only this user can enter.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable
from typing import Any

from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, Timings
from serve_app.runtime.host import malloc

_LARGE_MESSAGE = 1 << 18  # bytes
_MIN_TRIM = 16 << 20  # bytes that waited for the peer
_TRIM_DELAY = 1.0  # seconds

Message = tuple[int, Any]

log = logging.getLogger(__name__)


class FrameConnection:
    """A connection that sends the messages of one turn of the event loop as one frame.

    ``replace_unsendable`` receives the row of a message that cannot be encoded, and returns the message that
    is sent in its place, if any.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        replace_unsendable: Callable[[int], Message | None] = lambda row: None,
    ) -> None:
        self.replace_unsendable = replace_unsendable
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._outgoing: list[Message] = []
        self._trim_timer: asyncio.TimerHandle | None = None

    def send(self, message: Message, size: int = 0) -> None:
        """Send a message, of ``size`` bytes where it may be large, with the others of this turn."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(message)
        if size > _LARGE_MESSAGE:  # its frame ends with it: a frame is copied as a whole on both sides
            self._flush()

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if not messages or self._writer.is_closing():
            return
        try:
            body = _encode(messages)
        except Exception:  # of one message; the others must arrive
            body = _encode([m for message in messages if (m := self._check(message)) is not None])
        head = len(body).to_bytes(4, "big")
        if len(body) <= _LARGE_MESSAGE:
            self._writer.write(head + body)
            return
        self._writer.write(head)
        self._writer.write(body)
        if self._trim_timer is None and self._writer.transport.get_write_buffer_size() > _MIN_TRIM:
            self._trim_timer = self._loop.call_later(_TRIM_DELAY, self._trim)

    def _check(self, message: Message) -> Message | None:
        """Return a message that can be encoded, or what replaces it."""
        try:
            _encode([message])
        except Exception:
            log.exception("A message between processes could not be encoded: a fault of this server")
            return self.replace_unsendable(message[0])
        return message

    def _trim(self) -> None:
        """Return the memory of a backlog to the system, once it is sent."""
        self._trim_timer = None
        if self._writer.transport.get_write_buffer_size() <= _MIN_TRIM:
            malloc.trim()
        elif not self._writer.is_closing():
            self._trim_timer = self._loop.call_later(_TRIM_DELAY, self._trim)

    async def receive(self) -> list[Message]:
        """Return the next frame's messages. Raises EOFError when the peer is gone."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        self._writer.close()


def _encode(messages: list[Message]) -> bytes:
    return pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)


def encode_request(request: InferenceRequest) -> tuple[Any, ...]:
    """Return the fields of a request, for ``decode_request``."""
    inputs = [(part.name, part.value, part.content_type) for part in request.inputs]
    return (
        request.model, request.version, inputs, request.headers, request.kind, request.request_id,
        request.deadline, request.priority,
    )  # fmt: skip


def decode_request(fields: tuple[Any, ...]) -> InferenceRequest:
    model, version, inputs, *others = fields
    return InferenceRequest(model, version, tuple(InputPart(*part) for part in inputs), *others)


def encode_response(response: InferenceResponse) -> tuple[Any, ...]:
    """Return the fields of a response, for ``decode_response``."""
    timings = response.timings
    return (
        response.body, response.content_type, response.status, response.phrase, response.headers,
        response.version, (timings.queue, timings.inference, timings.batch_size), response.arm,
        response.non_finite,
    )  # fmt: skip


def decode_response(fields: tuple[Any, ...]) -> InferenceResponse:
    body, content_type, status, phrase, headers, version, timings, arm, non_finite = fields
    return InferenceResponse(
        body, content_type, status, phrase, headers, version, Timings(*timings), arm, non_finite
    )

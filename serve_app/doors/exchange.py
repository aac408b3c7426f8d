"""One HTTP request and its answer, on the bare ASGI interface.

This is the hot path of every HTTP door: one object a request, header bytes made beforehand, and as
many awaits as ASGI asks for. Each answer carries the headers that TorchServe puts on each of its own.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from random import getrandbits
from typing import Any

from serve_app.errors import BadRequest, OfStep, RelayError, TooLarge, reason
from serve_app.settings import InferenceSettings
from serve_app.types import Grant, Priority, Reply, ReplyStream

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

EVERY_ANSWER = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)
JSON = (b"content-type", b"application/json")
# What a handler may not set: the headers above, and what frames the body or the connection.
_OURS = {name for name, _ in EVERY_ANSWER} | {
    b"x-request-id",
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"x-model-version",
    b"x-torchrelay-arm",
    b"x-torchrelay-step",
}
TIMEOUT = "x-request-timeout-seconds"
PRIORITY = "x-request-priority"
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BODILESS = (204, 304)
_SLOW = 0.05  # seconds after which it is worth to look whether the caller is still there


class CallerLeft(Exception):
    """The client closed its connection before it had sent its whole request."""


class Exchange:
    """``segments`` are the parts of the client's path, decoded once, without trailing slashes.

    ``headers`` are the request's, lower-cased by ASGI; of a repeated one the last. ``status`` is the
    answer's, 0 until it has begun. ``model`` and ``version`` are what answered, for the access log.
    ``grant`` is what its key allows (see auth.py); None where none is wanted.
    """

    __slots__ = (
        "_always",
        "_receive",
        "_send",
        "grant",
        "headers",
        "method",
        "model",
        "path",
        "request_id",
        "scope",
        "segments",
        "status",
        "version",
    )

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, always: tuple[tuple[bytes, bytes], ...] = EVERY_ANSWER
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.segments = self.path.rstrip("/").split("/")[1:]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.request_id = uuid4()
        self.status = 0
        self.model = self.version = ""
        self.grant: Grant | None = None
        self._always = always  # headers of every answer
        self._receive = receive
        self._send = send

    def say(self, name: bytes, value: bytes) -> None:
        """A header of the answer, whoever gives it."""
        self._always = (*self._always, (name, value))

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises TooLarge as soon as it is known to be over ``limit`` bytes, and CallerLeft."""
        announced = self.headers.get("content-length")
        if announced is not None and announced.isdecimal() and int(announced) > limit:
            raise TooLarge(limit)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise CallerLeft()
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise TooLarge(limit)
            if not message.get("more_body", False):
                return b"".join((*pieces, piece)) if pieces else piece
            pieces.append(piece)

    def watch(self) -> asyncio.TimerHandle:
        """Cancel this request's task when the caller leaves; the handle ends the watch.

        Most requests are answered before anybody could look: a timer costs a fraction of a task, so the
        watching begins with the answers that take longer. The body must have been read.
        """
        loop = asyncio.get_running_loop()
        return loop.call_later(_SLOW, self._begin_watch, asyncio.current_task(loop))

    def _begin_watch(self, request: asyncio.Task[Any]) -> None:
        async def wait_for_leaving() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            request.cancel()

        watcher = asyncio.get_running_loop().create_task(wait_for_leaving())
        request.add_done_callback(lambda _: watcher.cancel())

    async def silence(self, seconds: float) -> None:
        """Say nothing for so long; a caller that leaves ends it, as ``watch`` ends any answer."""
        watch = self.watch()
        await asyncio.sleep(seconds)
        watch.cancel()

    async def reply(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer in one piece."""
        if status in _BODILESS:
            body = b""
        else:
            headers.append((b"content-length", b"%d" % len(body)))
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, status: int, headers: Headers, stream: ReplyStream) -> None:
        """Answer in pieces, each sent as it comes and as one chunk of the body.

        However this ends, the stream is closed. When it ends by an error, the body has no end, so that no
        client takes what it got for the whole: an ASGI server drops the connection when its app raises.
        """
        try:
            await self._start(status, headers)
            async for piece in stream:
                await self._send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            await stream.aclose()

    def yield_to(self, author: Headers) -> None:
        """What the handler set itself is not sent a second time."""
        names = {name for name, _ in author}
        self._always = tuple(header for header in self._always if header[0] not in names)

    async def _start(self, status: int, headers: Headers) -> None:
        headers.append((b"x-request-id", self.request_id.encode()))
        headers.extend(self._always)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status


def every_answer(settings: InferenceSettings) -> tuple[tuple[bytes, bytes], ...]:
    """The headers of every answer on every port: TorchServe's, and those of CORS where the settings name them."""
    cors = (
        (b"access-control-allow-origin", settings.cors_allowed_origin),
        (b"access-control-allow-methods", settings.cors_allowed_methods),
        (b"access-control-allow-headers", settings.cors_allowed_headers),
    )
    return EVERY_ANSWER + tuple((name, field_value(value)) for name, value in cors if value)


def uuid4() -> str:
    """A random UUID as text, without the system call that the standard library's costs.

    It tells requests apart and nothing else: it is no secret.
    """
    digits = f"{getrandbits(128):032x}"
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{_VARIANT[digits[16]]}{digits[17:20]}-{digits[20:]}"


_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}


def author_headers(content_type: str | None, headers: Iterable[tuple[str, str]]) -> Headers:
    """What a handler set, as header bytes that any server can send.

    What the doors set themselves and names that HTTP has no room for are left out; line ends become
    spaces. A Content-Type among the headers wins over ``content_type``.
    """
    sent: Headers = []
    for name, value in headers:
        key = name.lower().encode("latin-1", "replace")
        if key in _OURS or not _TOKEN.fullmatch(key):
            continue
        if key == b"content-type":
            content_type = None
        sent.append((key, field_value(value)))
    if content_type:
        sent.insert(0, (b"content-type", field_value(content_type)))
    return sent


def reply_headers(reply: Reply, typed: bool = True) -> Headers:
    """What the handler set, the timings, which version answered, and in which arm of a trial.

    Not ``typed``: the content type is the door's to say.
    """
    content_type = reply.content_type if typed else None
    sent = author_headers(content_type, reply.headers) if content_type or reply.headers else []
    times = reply.timings
    if times.batch_size:
        said = "queue;dur=%.3f, inference;dur=%.3f, batch;desc=%d"
        sent.append(
            (b"server-timing", (said % (times.queue * 1000, times.inference * 1000, times.batch_size)).encode())
        )
    sent.append(by_version(reply.version))
    if reply.arm:
        sent.append(by_arm(reply.arm))
    return sent


def refusal_headers(error: Exception) -> Headers:
    """What every dialect tells beside its words: why in one word, when to come again, which version, arm and step."""
    sent = [(b"x-torchrelay-reason", reason(error).encode())]
    if isinstance(error, RelayError):
        if error.retry_after is not None:
            sent.append((b"retry-after", b"%d" % error.retry_after))
        if error.version:
            sent.append(by_version(error.version))
        if error.arm:
            sent.append(by_arm(error.arm))
        if isinstance(error, OfStep):
            sent.append((b"x-torchrelay-step", field_value(error.step)))  # the steps before it have run
    return sent


def field_value(text: str) -> bytes:
    """``text`` as a header's value: Latin-1, on one line."""
    return text.encode("latin-1", "replace").translate(_ON_ONE_LINE).strip()


def deadline(headers: Mapping[str, str]) -> float | None:
    """When the caller stops waiting; 0 seconds are without end, as Ray Serve has it for this header."""
    seconds = headers.get(TIMEOUT)
    if seconds is None:
        return None
    try:
        limit = float(seconds)
    except ValueError:
        limit = -1.0
    if not 0 <= limit < math.inf:
        raise BadRequest(f"Header {TIMEOUT} must be a number of seconds, 0 for no limit; got {seconds!r}.")
    return time.time() + limit if limit else None


def priority(headers: Mapping[str, str]) -> Priority:
    """How urgent it is."""
    word = headers.get(PRIORITY, "normal")
    if word == "high" or word == "normal" or word == "low":
        return word
    raise BadRequest(f"Header {PRIORITY} must be high, normal or low; got {word!r}.")


@lru_cache(maxsize=1024)
def by_version(version: str) -> tuple[bytes, bytes]:
    """The header that says which version answered."""
    return b"x-model-version", field_value(version)


def by_arm(arm: str) -> tuple[bytes, bytes]:
    """The header that says which trial counted the call, and in which of its arms."""
    return b"x-torchrelay-arm", field_value(arm)


_ON_ONE_LINE = bytes(0x20 if byte < 0x20 or byte == 0x7F else byte for byte in range(256))

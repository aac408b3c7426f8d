"""One HTTP request and its response, on the bare ASGI interface.

This is the hot path of every HTTP protocol: one object per request, header bytes that are encoded beforehand,
and as many awaits as ASGI needs. Each response carries the headers that TorchServe puts on each of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from functools import lru_cache
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from serve_app.domain.access import KeyGrant
from serve_app.domain.limits import MAX_DEADLINE_S
from serve_app.domain.request import InferenceResponse, Priority, ResponseStream
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest, RelayError, RequestTooLarge, WorkflowStepError, get_reason
from serve_app.net.request_origin import NO_PROXIES, TrustedProxies
from serve_app.settings import InferenceSettings

_log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

DEFAULT_HEADERS = (
    (b"pragma", b"no-cache"),
    (b"cache-control", b"no-cache; no-store, must-revalidate, private"),
    (b"expires", b"Thu, 01 Jan 1970 00:00:00 UTC"),
)
JSON = (b"content-type", b"application/json")
# TorchServe's predictions accept each of them. TRACE, CONNECT and unknown methods are refused on every route.
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"))
# A handler may not set these: the default headers, and headers that frame the body or the connection.
_RESERVED_HEADERS = {name for name, _ in DEFAULT_HEADERS} | {
    b"x-request-id",
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"x-model-version",
    b"x-torchrelay-arm",
    b"x-torchrelay-step",
}
TIMEOUT_HEADER = "x-request-timeout-seconds"
PRIORITY_HEADER = "x-request-priority"
InferenceHeaders = TypedDict(
    "InferenceHeaders",
    {
        "x-request-timeout-seconds": Annotated[
            float,
            documented("The timeout, 0 for none; late requests have status 504.", minimum=0, maximum=86400),
        ],
        "x-request-priority": Annotated[
            Literal["high", "normal", "low"], documented("The priority in the queue.")
        ],
    },
)
_PRIORITIES: dict[str, Priority] = {"high": "high", "normal": "normal", "low": "low"}
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
BODYLESS_STATUSES = (204, 304)
_DISCONNECT_CHECK_DELAY_S = 0.05  # most requests are answered earlier, and need no check


async def _no_asgi(*message: Any) -> Any:
    """Fail: the exchange has no ASGI task."""
    raise RuntimeError("this exchange is answered by a callback")


class ClientDisconnected(Exception):
    """The client closed its connection before it had sent its whole request."""


class ParsedHead:
    """The head of a request, which is parsed once for all requests that have the same bytes as head."""

    __slots__ = ("content_length", "forwarded", "headers", "method", "path", "scope", "segments")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.segments = self.path.rstrip("/").split("/")[1:]
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.content_length = parse_decimal(self.headers.get("content-length", "0"))
        self.forwarded: tuple[str, ...] = ()  # the values of X-Forwarded-For, in their order
        if "x-forwarded-for" in self.headers:
            self.forwarded = tuple(
                value.decode("latin-1") for name, value in scope["headers"] if name == b"x-forwarded-for"
            )


class DisconnectCheck:
    """The check whether a client has disconnected.

    It does not start after a ``with`` block; one that has started ends with the request's task.
    """

    __slots__ = ("_timer",)

    def __init__(self, timer: asyncio.TimerHandle) -> None:
        self._timer = timer

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class HttpExchange:
    """One HTTP request and the response to it.

    ``segments`` are the parts of the client's path, decoded once, without trailing slashes.
    ``headers`` are the request's, lower-cased by ASGI; a repeated header has its last value.
    ``status`` is the response's, 0 until the response has started. ``model`` and ``version`` name the model
    that answered, for the access log. ``grant`` holds the rights of the request's key (see auth.py); it is
    None where no key is required. ``span`` is that of a traced request. ``on_body`` is called when the whole
    body has arrived, and may raise.
    """

    __slots__ = (
        "_default_headers",
        "_forwarded",
        "_proxies",
        "_receive",
        "_send",
        "grant",
        "headers",
        "method",
        "model",
        "on_body",
        "parsed",
        "path",
        "request_id",
        "scope",
        "segments",
        "span",
        "status",
        "version",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive = _no_asgi,
        send: Send = _no_asgi,
        default_headers: tuple[tuple[bytes, bytes], ...] = DEFAULT_HEADERS,
        proxies: TrustedProxies = NO_PROXIES,
        head: ParsedHead | None = None,
    ) -> None:
        self.scope = scope
        if head is None:
            head = ParsedHead(scope)
            self.headers = head.headers
        else:
            self.headers = head.headers.copy()
        self.method, self.path, self.segments = head.method, head.path, head.segments
        self._forwarded = head.forwarded
        self.request_id = uuid4()
        self.status = 0
        self.model = self.version = ""
        self.grant: KeyGrant | None = None
        self.on_body: Callable[[], None] | None = None
        self.parsed: Any = None  # the protocol's own form of the request
        self.span: Any = None  # of a traced request
        self._default_headers = default_headers
        self._proxies = proxies
        self._receive = receive
        self._send = send

    @property
    def client(self) -> str:
        """The client's address and port for the logs, "-" if they are unknown; the port 0 behind a proxy."""
        host, port = self.scope.get("client") or ("", 0)
        if self._forwarded and (client := self._proxies.resolve(host, self._forwarded)) != host:
            return f"{client}:0"
        return f"{host}:{port}" if host else "-"

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the response, whichever route sends it."""
        self._default_headers = (*self._default_headers, (name, value))

    def remove_cors_headers(self) -> None:
        """Send the response without the headers that let pages of other sites read it."""
        self._default_headers = tuple(
            header for header in self._default_headers if not header[0].startswith(b"access-control-")
        )

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body.

        Raises RequestTooLarge as soon as it is known to be over ``limit`` bytes, and ClientDisconnected.
        """
        if exceeds(self.headers.get("content-length"), limit):
            raise RequestTooLarge(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected()
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise RequestTooLarge(limit)
            if not message.get("more_body", False):
                if self.on_body is not None:
                    self.on_body()
                return b"".join((*chunks, chunk)) if chunks else chunk
            chunks.append(chunk)

    def cancel_on_disconnect(self) -> DisconnectCheck:
        """Cancel this request's task when the client disconnects; the result is for a ``with`` block.

        A timer costs a fraction of a task, and most requests are answered within 50 ms: only requests that
        take longer start a task that waits for the disconnect. The body must have been read.
        """
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        assert task is not None
        return DisconnectCheck(loop.call_later(_DISCONNECT_CHECK_DELAY_S, self._start_disconnect_check, task))

    def _start_disconnect_check(self, request: asyncio.Task[Any]) -> None:
        async def wait_for_disconnect() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            request.cancel()

        watcher = asyncio.get_running_loop().create_task(wait_for_disconnect())
        request.add_done_callback(lambda _: watcher.cancel())

    async def hold_open(self, seconds: float) -> None:
        """Send nothing for ``seconds``; a disconnect of the client cancels the wait."""
        with self.cancel_on_disconnect():
            await asyncio.sleep(seconds)

    async def send_response(self, status: int, headers: Headers, body: bytes) -> None:
        """Send the response with its whole body."""
        body = self.complete_headers(status, headers, body)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status
        await self._send({"type": "http.response.body", "body": body})

    def complete_headers(self, status: int, headers: Headers, body: bytes) -> bytes:
        """Add the headers that every response has, and return the body that a response of this status has."""
        if status in BODYLESS_STATUSES:
            body = b""
        else:
            headers.append((b"content-length", b"%d" % len(body)))
        self._add_default_headers(headers)
        return body

    def log_fault(self, error: Exception) -> None:
        """Log an error of this server, with its traceback."""
        message = "%s %r (request %s) failed: a fault of this server"
        _log.error(message, self.method, self.path, self.request_id, exc_info=error)

    def encode_headers(self, status: int, headers: Headers, body: bytes) -> bytes:
        """Return the lines of ``headers`` and of those that ``complete_headers`` would add."""
        lines = b"".join([b"%s: %s\r\n" % header for header in headers])
        if status not in BODYLESS_STATUSES:
            lines += b"content-length: %d\r\n" % len(body)
        id = self.request_id.encode()
        return b"%sx-request-id: %s\r\n%s" % (lines, id, _encode_lines(self._default_headers))

    def attach(self, receive: Receive, send: Send) -> None:
        """Continue in an ASGI task, with its functions."""
        self._receive, self._send = receive, send

    async def send_stream(self, status: int, headers: Headers, stream: ResponseStream) -> None:
        """Send the response as it is produced: each chunk of the stream is one chunk of the body.

        The stream is closed in any case. After an error the body has no end, so that no client takes the
        partial body for the whole: an ASGI server drops the connection when its application raises.
        """
        try:
            await self._start(status, headers)
            async for chunk in stream:
                await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self._send({"type": "http.response.body", "body": b""})
        finally:
            await stream.aclose()

    def override_defaults(self, headers: Headers) -> None:
        """Drop the default headers that ``headers`` set, so that none is sent twice."""
        names = {name for name, _ in headers}
        self._default_headers = tuple(header for header in self._default_headers if header[0] not in names)

    async def _start(self, status: int, headers: Headers) -> None:
        self._add_default_headers(headers)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.status = status

    def _add_default_headers(self, headers: Headers) -> None:
        headers.append((b"x-request-id", self.request_id.encode()))
        headers.extend(self._default_headers)


@lru_cache(maxsize=64)
def _encode_lines(headers: tuple[tuple[bytes, bytes], ...]) -> bytes:
    return b"".join(b"%s: %s\r\n" % header for header in headers)


def build_default_headers(settings: InferenceSettings) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers of every response of the inference port: TorchServe's, and CORS by the settings."""
    cors = (
        (b"access-control-allow-origin", settings.cors_allowed_origin),
        (b"access-control-allow-methods", settings.cors_allowed_methods),
        (b"access-control-allow-headers", settings.cors_allowed_headers),
    )
    return DEFAULT_HEADERS + tuple((name, encode_header_value(value)) for name, value in cors if value)


def uuid4() -> str:
    """Return a random UUID as text, from the kernel's generator.

    A request id guards what it names, such as an async prediction, so it must not be guessed from others.
    """
    try:
        return _IDS.pop()
    except IndexError:
        _IDS.extend(_generate_ids(_ID_BATCH))
        return _IDS.pop()


def _generate_ids(count: int) -> list[str]:
    """Return new ids from one system call: 0.4 µs each, against 1.9 µs of ``uuid.uuid4``."""
    digits = os.urandom(16 * count).hex()
    return [
        f"{d[:8]}-{d[8:12]}-4{d[13:16]}-{_VARIANT[d[16]]}{d[17:20]}-{d[20:]}"
        for d in (digits[i : i + 32] for i in range(0, 32 * count, 32))
    ]


_VARIANT = {digit: "89ab"[int(digit, 16) & 3] for digit in "0123456789abcdef"}
_ID_BATCH = 64  # ids, which take 25 µs: a larger batch is a longer pause of the event loop
_IDS: list[str] = []
os.register_at_fork(after_in_child=_IDS.clear)  # or two processes would have the same ids


def encode_handler_headers(content_type: str | None, headers: Iterable[tuple[str, str]]) -> Headers:
    """Return the headers that a handler set, as header bytes that any server can send.

    Reserved headers and names that HTTP does not allow are left out; line ends become spaces.
    A Content-Type among the headers wins over ``content_type``.
    """
    encoded: Headers = []
    for name, value in headers:
        key = name.lower().encode("latin-1", "replace")
        if key in _RESERVED_HEADERS or not _TOKEN.fullmatch(key):
            continue
        if key == b"content-type":
            content_type = None
        encoded.append((key, encode_header_value(value)))
    if content_type:
        encoded.insert(0, (b"content-type", encode_header_value(content_type)))
    return encoded


def clamp_status(code: int) -> int:
    """Return ``code``, or 500 where an HTTP response cannot have it."""
    return code if 200 <= code < 600 else 500


def build_response_headers(response: InferenceResponse, with_content_type: bool = True) -> Headers:
    """Return the handler's headers, the timings, the version and the arm of an experiment or rollout.

    Without ``with_content_type`` the protocol sets the content type itself.
    """
    content_type = response.content_type if with_content_type else None
    headers = (
        encode_handler_headers(content_type, response.headers) if content_type or response.headers else []
    )
    timings = response.timings
    if timings.batch_size:
        queue, inference = timings.queue * 1000, timings.inference * 1000
        value = f"queue;dur={queue:.3f}, inference;dur={inference:.3f}, batch;desc={timings.batch_size:d}"
        headers.append((b"server-timing", value.encode()))
    headers += version_headers(response)
    return headers


def build_error_headers(error: Exception) -> Headers:
    """Return the headers of an error response: the reason, Retry-After, the version, the arm and the step.

    They are the same in every protocol.
    """
    headers = [(b"x-torchrelay-reason", get_reason(error).encode())]
    if isinstance(error, RelayError):
        if error.retry_after is not None:
            headers.append((b"retry-after", b"%d" % error.retry_after))
        if error.selected_version:
            headers.append(version_header(error.selected_version))
        if error.arm:
            headers.append(arm_header(error.arm))
        if isinstance(error, WorkflowStepError):  # the steps before this one have run
            headers.append((b"x-torchrelay-step", encode_header_value(error.step)))
    return headers


def encode_header_value(text: str) -> bytes:
    """Return ``text`` as the value of a header: Latin-1, on one line."""
    return text.encode("latin-1", "replace").translate(_CONTROL_CHARACTERS_TO_SPACES).strip()


def parse_deadline(headers: Mapping[str, str]) -> float | None:
    """Return the Unix time at which the client stops waiting; None without a limit.

    0 seconds mean no limit, as Ray Serve reads this header. Raises BadRequest.
    """
    seconds = headers.get(TIMEOUT_HEADER)
    if seconds is None:
        return None
    try:
        timeout = float(seconds)
    except ValueError:
        timeout = -1.0
    if not 0 <= timeout <= MAX_DEADLINE_S:
        most = f" up to {MAX_DEADLINE_S:.0f}" if MAX_DEADLINE_S < timeout < math.inf else ""
        raise BadRequest(
            f"Header {TIMEOUT_HEADER} must be a number of seconds{most}, 0 for no limit; got {seconds!r}."
        )
    return time.time() + timeout if timeout else None


def parse_priority(headers: Mapping[str, str]) -> Priority:
    """Return the priority that the headers set. Raises BadRequest."""
    value = headers.get(PRIORITY_HEADER, "normal")
    priority = _PRIORITIES.get(value)
    if priority is None:
        raise BadRequest(f"Header {PRIORITY_HEADER} must be high, normal or low; got {value!r}.")
    return priority


@lru_cache(maxsize=1024)
def version_header(version: str) -> tuple[bytes, bytes]:
    """Return the header that names the version which answered."""
    return b"x-model-version", encode_header_value(version)


def version_headers(response: InferenceResponse) -> Headers:
    """Return the headers that name the version which answered, and its arm of an experiment or rollout."""
    headers = [version_header(response.version)]
    if response.arm:
        headers.append(arm_header(response.arm))
    return headers


def arm_header(arm: str) -> tuple[bytes, bytes]:
    """Return the header that names the experiment or rollout that counted the request, and its arm."""
    return b"x-torchrelay-arm", encode_header_value(arm)


_CONTROL_CHARACTERS_TO_SPACES = bytes(0x20 if byte < 0x20 or byte == 0x7F else byte for byte in range(256))


# Python refuses to parse more than 4,300 digits, leading zeros included.
_DECIMAL = re.compile(r"0*(\d{1,18})", re.ASCII)


def parse_decimal(text: str) -> int | None:
    """Return the number that decimal digits write; None for other text and for more than 18 digits."""
    match = _DECIMAL.fullmatch(text)
    return int(match[1]) if match is not None else None


def parse_limit(text: str, maximum: int) -> int:
    """Return the query parameter ``limit``. Raises BadRequest where it is not from 1 to ``maximum``."""
    limit = parse_decimal(text)
    if limit is None or not 1 <= limit <= maximum:
        raise BadRequest(f"limit is {text[:80]!r}; it must be an integer from 1 to {maximum}.")
    return limit


def exceeds(content_length: str | None, limit: int) -> bool:
    """Return whether a Content-Length header announces more than ``limit`` bytes."""
    if content_length is None or not content_length.isdecimal():
        return False
    size = parse_decimal(content_length)
    return size is None or size > limit

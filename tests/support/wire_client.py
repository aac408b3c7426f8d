"""A client that sends requests to uvicorn's protocol on a recorded connection, and returns raw responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from serve_app.protocols.http.server import http_protocol
from serve_app.protocols.http.server.http_protocol import HttpProtocol
from tests.support.protocol_fakes import RecordedResponse

# Values that differ between two equal requests.
_VARIABLE = re.compile(
    rb"(?im)^(x-request-id|date): [^\r]*|(?<=dur=)[\d.]+|[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f-]{17}"
)


class RecordingTransport(asyncio.Transport):
    """A connection that records what is written, and reads nothing."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 8080)})
        self.written = bytearray()
        self.writes: list[bytes] = []
        self.is_closed = False
        self.unread = 0  # bytes in the write buffer
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))
        self.written += data

    def writelines(self, chunks: Any) -> None:
        self.write(b"".join(chunks))

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return self.unread

    def pause_reading(self) -> None:
        """Record nothing: the test decides when data arrives."""

    resume_reading = pause_reading


@contextmanager
def use_callbacks(app: Any, enabled: bool = True) -> Iterator[None]:
    """Let the HTTP ports of this process answer by ``app.callback_app``, or by tasks only."""
    http_protocol.set_callback_app(app.callback_app if enabled else None)
    try:
        yield
    finally:
        http_protocol.set_callback_app(None)


def connect(app: Any, transport: RecordingTransport) -> HttpProtocol:
    """Return the server's end of a new connection; call it on the event loop."""
    config = uvicorn.Config(
        app, http=HttpProtocol, lifespan="off", log_config=None, proxy_headers=False, access_log=False
    )
    config.load()
    protocol = HttpProtocol(config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol


def encode_request(method: str, target: str, body: bytes | list[bytes], headers: dict[str, str]) -> bytes:
    """Return a request's bytes; a list of bodies is sent as that many chunks."""
    lines = [f"{method} {target} HTTP/1.1".encode()]
    lines += [f"{name}: {value}".encode("latin-1") for name, value in headers.items()]
    if isinstance(body, list):
        chunks = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in body if chunk) + b"0\r\n\r\n"
        return b"\r\n".join((*lines, b"transfer-encoding: chunked", b"", chunks))
    if "content-length" not in {name.lower() for name in headers} and (body or method == "POST"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join((*lines, b"", body))


async def exchange(app: Any, request: bytes, method: str) -> bytes:
    """Return the bytes of the response to one request."""
    transport = RecordingTransport()
    protocol = connect(app, transport)
    protocol.data_received(request)
    await wait_until(lambda: transport.is_closed or parse_response(bytes(transport.written), method))
    await wait_until(lambda: not protocol.tasks)  # what a task does after its response
    protocol.connection_lost(None)
    return bytes(transport.written)


async def wait_until(condition: Callable[[], Any], timeout: float = 60.0) -> None:
    """Wait for a condition. Raises TimeoutError."""

    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(wait(), timeout)


def parse_response(data: bytes, method: str) -> RecordedResponse | None:
    """Return a whole response, without uvicorn's own headers; None where more has to come."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    first, *lines = head.split(b"\r\n")
    headers = [tuple(line.split(b": ", 1)) for line in lines]
    response = RecordedResponse(int(first.split(b" ")[1]))
    response.headers = [
        h for h in headers if h[0] not in (b"date", b"server") and h != (b"transfer-encoding", b"chunked")
    ]
    values = dict(headers)
    if method == "HEAD" or response.status in (204, 304):
        response.chunks = [b""]
    elif values.get(b"transfer-encoding") == b"chunked":
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            response.chunks.append(rest[: int(size, 16)])
            rest = rest[int(size, 16) + 2 :]
        if response.chunks[-1:] != [b""]:
            return None
    elif len(rest) < int(values[b"content-length"]):
        return None
    else:
        response.chunks = [rest]
    response.ended = True
    return response


def mask(response: bytes) -> bytes:
    """Return a response without the values that differ between two equal requests."""
    return _VARIABLE.sub(b"*", response)

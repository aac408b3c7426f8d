"""The uvicorn protocol that writes a whole response with one system call.

uvicorn writes the head of a response and its body separately, and uvloop writes at once. That makes two
system calls per response, each of which wakes the reader: HAProxy, on every request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_BUFFERED_BYTES = 1 << 16  # larger writes are sent at once, and not copied


def install() -> None:
    """Make servers that this process starts from now on use this protocol."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{HttpProtocol.__name__}"


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol over a transport that buffers writes until a response is complete."""

    transport: Any

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(CoalescingTransport(transport, self.loop))

    def on_response_complete(self) -> None:
        self.transport.flush()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        coalescing = self.transport
        self.transport = coalescing.unwrap()
        super().handle_websocket_upgrade()
        self.transport = coalescing


class CoalescingTransport:
    """A transport that buffers writes until ``flush``, or until the event loop has run what is ready."""

    __slots__ = ("_chunks", "_flush_handle", "_loop", "_size", "_transport", "get_extra_info", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self._flush_handle: asyncio.Handle | None = None
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._flush_handle is None:
            # The head of a stream is sent although its first chunk may take long.
            self._flush_handle = self._loop.call_soon(self.flush)
        self._chunks.append(data)
        self._size += len(data)
        if self._size > _MAX_BUFFERED_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the buffered data."""
        if self._flush_handle is None:
            return
        self._flush_handle.cancel()
        chunks, self._chunks, self._flush_handle = self._chunks, [], None
        if self.is_closing():  # the peer has disconnected meanwhile
            pass
        elif self._size > _MAX_BUFFERED_BYTES:
            self._transport.writelines(chunks)
        else:
            self._transport.write(b"".join(chunks))
        self._size = 0

    def close(self) -> None:
        """Write the buffered data, then close the connection."""
        self.flush()
        self._transport.close()

    def unwrap(self) -> asyncio.Transport:
        """Write the buffered data and return the transport itself, for users that write whole messages."""
        self.flush()
        return self._transport

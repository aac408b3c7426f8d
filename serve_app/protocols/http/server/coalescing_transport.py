"""A transport that sends the head of a response and its body with one system call."""

from __future__ import annotations

import asyncio
from typing import Any

_MAX_BUFFERED_BYTES = 1 << 16  # larger writes are sent at once, and not copied


class CoalescingTransport:
    """A transport that buffers writes until ``flush``, or until the event loop has run what is ready."""

    __slots__ = (
        "_chunks",
        "_flush_handle",
        "_loop",
        "_size",
        "_transport",
        "get_extra_info",
        "is_closing",
        "written",
    )

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._chunks: list[bytes] = []
        self._size = 0
        self.written = 0  # bytes that were passed to the transport
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

    def write_response(self, head: bytes, body: bytes) -> None:
        """Write a whole response at once."""
        self.flush()
        size = len(head) + len(body)
        self.written += size
        if size > _MAX_BUFFERED_BYTES:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head + body)

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
        self.written += self._size
        self._size = 0

    def close(self) -> None:
        """Write the buffered data, then close the connection."""
        self.flush()
        self._transport.close()

    def unwrap(self) -> asyncio.Transport:
        """Write the buffered data and return the transport itself, for users that write whole messages."""
        self.flush()
        return self._transport

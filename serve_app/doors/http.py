"""The server's end of HTTP: an answer leaves whole.

uvicorn writes the head of an answer and its body apart, and uvloop writes at once: two system calls an answer, each of
which wakes who reads it, which is HAProxy on every call.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MOST = 1 << 16  # bytes that wait for what follows: more leave at once, and uncopied


def install() -> None:
    """Servers that this process starts from now on speak this protocol."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{Protocol.__name__}"


class Protocol(HttpToolsProtocol):
    """uvicorn's, whose transport gathers what is written, at most until an answer is complete."""

    transport: Any

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Gathering(transport, self.loop))  # type: ignore[arg-type]

    def on_response_complete(self) -> None:
        self.transport.leave()
        super().on_response_complete()

    def handle_websocket_upgrade(self) -> None:
        gathering = self.transport
        self.transport = gathering.ungathered()
        super().handle_websocket_upgrade()
        self.transport = gathering


class Gathering:
    """A transport whose writes leave together, when it is told to or when the event loop has run what is ready."""

    __slots__ = ("_loop", "_pieces", "_size", "_soon", "_transport", "get_extra_info", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._size = 0
        self._soon: asyncio.Handle | None = None
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._soon is None:
            self._soon = self._loop.call_soon(self.leave)  # a stream's head, whose first piece may be long in coming
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _MOST:
            self.leave()

    def leave(self) -> None:
        """Write what has been gathered."""
        if self._soon is None:
            return
        self._soon.cancel()
        pieces, self._pieces, self._soon = self._pieces, [], None
        if self.is_closing():  # the peer has left meanwhile
            pass
        elif self._size > _MOST:
            self._transport.writelines(pieces)
        else:
            self._transport.write(b"".join(pieces))
        self._size = 0

    def close(self) -> None:
        """After what was written."""
        self.leave()
        self._transport.close()

    def ungathered(self) -> asyncio.Transport:
        """The transport itself, for who writes each message whole."""
        self.leave()
        return self._transport

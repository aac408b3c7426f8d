"""Pings for silent HTTP/2 peers (RFC 9113 §6.7)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_app.http2.frame_writer import FrameWriter
from serve_app.http2.frames import PING, encode_frame

_PING_DATA = b"are you?"  # eight bytes


class Keepalive:
    """A timer that pings a silent peer after ``interval`` seconds and aborts after as many more.

    ``handshake_complete``: silence before the peer's SETTINGS aborts the connection without a ping.
    ``data_received`` is set by the connection when the peer sends something. ``on_interval`` is called each
    time that the connection stays.
    """

    def __init__(self, interval: float, writer: FrameWriter, on_interval: Callable[[], None]) -> None:
        self._interval = interval
        self._writer = writer
        self._on_interval = on_interval
        self.handshake_complete = False
        self.data_received = False
        self._pinged = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._check)

    def stop(self) -> None:
        """Cancel the timer and drop the callback, which would keep the connection until a collection."""
        if self._timer is not None:
            self._timer.cancel()
        del self._on_interval

    def _check(self) -> None:
        # A peer that does not read is not read either, so its silence means nothing.
        silent = not self.data_received and not self._writer.paused
        expired = self._pinged or not self.handshake_complete
        if self._transport.is_closing() or (silent and expired):
            self._transport.abort()
            return
        self._pinged = silent
        if silent:
            self._writer.write(encode_frame(PING, 0, 0, _PING_DATA))
        self.data_received = False
        self._on_interval()
        self.start(self._transport)

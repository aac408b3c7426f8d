"""The uvicorn WebSocket protocol with our own limit of a message's size.

Ray Serve starts its HTTP servers (uvicorn) itself and has no setting for that limit, so they would close a
connection at uvicorn's 16 MiB, with uvicorn's reason. A server looks up its protocol in a table; ``install``
puts this protocol there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn.config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from serve_app.errors import RequestTooLarge
from serve_app.protocols.http.server.unix_listener import LOCAL_PEER

_IDLE_BEFORE_CLOSE_S = 0.2  # seconds without a byte, after which the client has stopped sending
_MAX_UNREAD_BYTES = 1 << 20  # of answers, above which the client's pings are not answered
_STOP_CLOSE_TIMEOUT_S = 1.0  # in which the client of a stopping server must answer its close frame
_MAX_FRAGMENTS = 1024  # of a message, which are then joined: empty ones have no size that the limit counts
ON_STOP = "torchrelay.on_stop"  # an extension of the ASGI scope
_max_message_size: int | None = None  # bytes; None: uvicorn's own limit


def install() -> None:
    """Make servers that this process starts from now on use this protocol."""
    uvicorn.config.WS_PROTOCOLS["auto"] = f"{__name__}:{WebSocketProtocol.__name__}"


def set_max_message_size(limit: int) -> None:
    """Accept messages of up to ``limit`` bytes on connections that open from now on."""
    global _max_message_size
    _max_message_size = limit


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's protocol that rejects a large message from its header, and names the setting.

    An application that passes a callback to ``scope["extensions"]["torchrelay.on_stop"]`` ends its connection
    itself when the server stops: after the requests in progress. Other connections are closed at once, as
    uvicorn does, with code 1012.
    """

    client: tuple[str, int] | None
    close_timer: asyncio.TimerHandle | None
    frames: list[bytes]

    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._on_stop: Callable[[], None] | None = None
        self._close_by = 0.0  # the loop's time at which a failed connection is closed at the latest
        if _max_message_size is not None:
            self.conn.max_message_size = _max_message_size
            self.conn.fail = self._with_our_reason(self.conn.fail, _max_message_size)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.client is None:
            self.client = LOCAL_PEER

    def shutdown(self) -> None:
        """End the connection because the server stops; a handshake in progress is refused with 503."""
        if not self.handshake_complete and self.initial_response is None:
            response = self.conn.reject(503, "The server stops. Connect again.\n")
            response.headers["Retry-After"] = "1"
            self.conn.send_response(response)
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        elif self._on_stop is not None and not self.close_sent:
            self.stop_keepalive()
            self.close_timeout = _STOP_CLOSE_TIMEOUT_S
            self._on_stop()
        elif self.handshake_complete:
            super().shutdown()

    async def run_asgi(self) -> None:
        self.scope["extensions"][ON_STOP] = StopRegistration(self)
        await super().run_asgi()

    def set_on_stop(self, on_stop: Callable[[], None]) -> None:
        self._on_stop = on_stop

    def data_received(self, data: bytes) -> None:
        if self._close_by:
            self._schedule_close()
        else:
            super().data_received(data)

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= _MAX_FRAGMENTS:
            self.frames = [b"".join(self.frames)]
        super().handle_cont(event)

    def handle_ping(self) -> None:
        """Answer a ping, unless the client does not read: it may omit answers (RFC 6455, 5.5.3)."""
        output = b"".join(self.conn.data_to_send())
        if self.transport.get_write_buffer_size() < _MAX_UNREAD_BYTES:
            self.transport.write(output)

    def handle_parser_exception(self) -> None:
        """Close the connection once the client stops sending.

        A connection that is closed earlier is reset, and the client does not see the reason.
        """
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self._close_by = self.loop.time() + self.close_timeout
        self._schedule_close()

    def _schedule_close(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        left = self._close_by - self.loop.time()
        delay = max(0.0, min(_IDLE_BEFORE_CLOSE_S, left))
        self.close_timer = self.loop.call_later(delay, self.transport.close)

    @staticmethod
    def _with_our_reason(fail: Callable[[int, str], None], limit: int) -> Callable[..., None]:
        def fail_with_reason(code: int, reason: str = "") -> None:
            fail(code, f"{RequestTooLarge(limit)}" if code == CloseCode.MESSAGE_TOO_BIG else reason)

        return fail_with_reason


class StopRegistration:
    """The function of the extension ON_STOP, which registers a callback with a connection.

    Ray Serve's own proxy pickles the scope of a WebSocket for the replica. There the function does nothing:
    the connection is the proxy's, which closes it at once when it stops.
    """

    def __init__(self, protocol: WebSocketProtocol | None = None) -> None:
        self._protocol = protocol

    def __call__(self, on_stop: Callable[[], None]) -> None:
        if self._protocol is not None:
            self._protocol.set_on_stop(on_stop)

    def __reduce__(self) -> tuple[type[StopRegistration], tuple[()]]:
        return StopRegistration, ()

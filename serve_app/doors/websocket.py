"""The server's end of a WebSocket, with a limit of its messages that is ours.

Ray Serve starts its HTTP servers (uvicorn) itself and offers no setting for that, so they would end a connection at
uvicorn's 16 MiB, in its words. Which protocol a server speaks it looks up in a table; ``install`` puts this one there.
"""

from __future__ import annotations

from typing import Any

import uvicorn.config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from serve_app.errors import TooLarge

_QUIET = 0.2  # seconds without a byte, after which a client is done
_limit: int | None = None  # bytes of a message; None: uvicorn's own


def install() -> None:
    """Servers that this process starts from now on speak this protocol."""
    uvicorn.config.WS_PROTOCOLS["auto"] = f"{__name__}:{Protocol.__name__}"


def bound(limit: int) -> None:
    """Connections from now on take messages of up to ``limit`` bytes."""
    global _limit
    _limit = limit


class Protocol(WebSocketsSansIOProtocol):
    """uvicorn's, that refuses what is too large before it is there, and says by which setting."""

    def __init__(self, config: Any, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self._until = 0.0  # when a connection that has failed is closed at the latest
        if _limit is not None:
            self.conn.max_message_size = _limit
            self.conn.fail = self._in_our_words(self.conn.fail, _limit)  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        if self._until:
            self._close_soon()
        else:
            super().data_received(data)

    def handle_parser_exception(self) -> None:
        """Close when the client sends no more: a connection that is closed before is reset, and the reason lost."""
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self._until = self.loop.time() + self.close_timeout
        self._close_soon()

    def _close_soon(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        left = self._until - self.loop.time()
        self.close_timer = self.loop.call_later(max(0.0, min(_QUIET, left)), self.transport.close)

    @staticmethod
    def _in_our_words(fail: Any, limit: int) -> Any:
        def fails(code: int, reason: str = "") -> None:
            fail(code, f"{TooLarge(limit)}" if code == CloseCode.MESSAGE_TOO_BIG else reason)

        return fails

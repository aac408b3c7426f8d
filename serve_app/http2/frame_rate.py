"""A rate limit for frames without progress of a call."""

from __future__ import annotations

from collections.abc import Callable

from serve_app.http2.frames import ENHANCE_YOUR_CALM, Http2ProtocolError

# Costs of frames. A call that is reset costs the server as much as ten frames that are only parsed.
RESET_COST = 10
SETTINGS_COST = 10
CREDIT = 4  # of a message that is sent: clients answer it with window updates and pings

BURST = 5_000
_INITIAL_BURST = 2_000  # of a new connection, so that a client gains little by reconnecting
_RATE = 2_000.0  # a second: 1 % of a core


class FrameRate:
    """A leaky bucket: ``level`` rises with frames without progress, and falls with time and credit.

    DATA of the peer earns no credit, so such frames count however they are mixed with others. The clock is
    read only when the bucket is full, so a frame costs one addition.
    """

    __slots__ = ("_checked_at", "_clock", "level")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._checked_at = clock()
        self.level = BURST - _INITIAL_BURST

    def add_credit(self) -> None:
        if self.level > CREDIT:
            self.level -= CREDIT

    def check(self) -> None:
        """Raise Http2ProtocolError if the level is too high."""
        if self.level > BURST:
            now = self._clock()
            self.level = max(0, self.level - int((now - self._checked_at) * _RATE))
            self._checked_at = now
            if self.level > BURST:
                message = f"more than {BURST} frames without progress of a call"
                raise Http2ProtocolError(ENHANCE_YOUR_CALM, message)

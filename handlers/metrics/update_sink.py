"""The sink of this process's metric updates. A process holds one model, so there is one sink."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handlers.metrics.metric import CachingMetric

# (metric, value, its dimensions' values, request id or ""); called in the thread of the update.
Sink = Callable[["CachingMetric", float, tuple[str, ...], str], None]

# The last updates of a process without a server: a handler in a script, or in a test.
updates: deque[tuple[CachingMetric, float, tuple[str, ...], str]] = deque(maxlen=1000)


def buffer_update(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Append an update to ``updates``; this is the sink until ``set_sink`` replaces it."""
    updates.append((metric, value, values, request_id))


def discard(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Ignore an update."""


_sink: Sink = buffer_update


def set_sink(sink: Sink) -> None:
    """Send every further update of this process to ``sink``, which must be fast and thread-safe."""
    global _sink
    _sink = sink


@contextlib.contextmanager
def suppress_updates() -> Iterator[None]:
    """Discard all updates until the end of the block."""
    sink = _sink
    set_sink(discard)
    try:
        yield
    finally:
        set_sink(sink)


def emit_update(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    _sink(metric, value, values, request_id)

"""Where this process's updates go. A process holds one model, so there is one outlet."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from handlers.metrics.metric import CachingMetric

# (metric, value, its dimensions' values, request id or ""); called in whatever thread the author updates from.
Sink = Callable[["CachingMetric", float, tuple[str, ...], str], None]

# The last updates of a process in which no server listens: a handler that is tried alone, or in a test.
updates: deque[tuple[CachingMetric, float, tuple[str, ...], str]] = deque(maxlen=1000)


def keep(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Into ``updates``: where everything goes until ``send_to`` says otherwise."""
    updates.append((metric, value, values, request_id))


def discard(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    """Nowhere."""


_sink: Sink = keep


def send_to(sink: Sink) -> None:
    """From now on every update of this process goes to ``sink``: quick, and callable from any thread."""
    global _sink
    _sink = sink


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """What is measured in here is measured for nobody."""
    sink = _sink
    send_to(discard)
    try:
        yield
    finally:
        send_to(sink)


def send(metric: CachingMetric, value: float, values: tuple[str, ...], request_id: str) -> None:
    _sink(metric, value, values, request_id)

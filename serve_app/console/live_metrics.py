"""The metrics of a server for the pages of one session, read while a page shows them."""

from __future__ import annotations

import asyncio
import time

from serve_app.client import AsyncClient
from serve_app.client.live_metrics import METRIC_NAMES, MetricsWindow
from serve_app.client.prometheus_text import parse

_SHARE_OF_TIME = 0.2  # the parser may take this part of the time


class LiveMetrics(MetricsWindow):
    """The metrics of one server for one client; ``refresh`` is called by every page that shows them."""

    def __init__(self, client: AsyncClient) -> None:
        super().__init__()
        self._client = client
        self._lock = asyncio.Lock()
        self._next = 0.0

    async def refresh(self, interval: float = 2.0) -> None:
        """Read the metrics page, unless another caller did less than ``interval`` seconds ago.

        Raises ServerError and TransportError.
        """
        async with self._lock:
            started = time.monotonic()
            if started < self._next:
                return
            page = await self._client.metrics(*METRIC_NAMES)
            fetched = time.monotonic()
            samples = await asyncio.to_thread(parse, page)
            self.add(samples)
            parsing = time.monotonic() - fetched
            self._next = started + max(interval * 0.9, parsing / _SHARE_OF_TIME)

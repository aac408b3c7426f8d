"""Publishing of the routing table to its readers by long poll.

Every gateway and replica holds one long poll here. A poll names the generation that its reader applies, so
the publisher knows when a change is applied everywhere, and answers with the difference from that generation
where it still has it. The same poll carries the reader's metric samples, so
that a scrape is as fresh as the response to a sample request.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from serve_app.domain.routing_table import RoutingTable, TableDelta
from serve_app.telemetry.metrics import MetricsReport
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

log = logging.getLogger(__name__)

Nudge = Literal["samples", "all samples"]  # a request for the changed values of the reader's metrics, or all

_KEPT_TABLES = 16  # earlier tables; they share the routes that have not changed
_LIVENESS_CHECK_S = 0.25  # seconds for which a slow reader is waited for before its process is looked up
_LOOK_UP_TIMEOUT_S = 1.0
_SILENT_CHECK_S = 10.0  # seconds between two look-ups of the processes that have fallen silent


@dataclass
class _TableReader:
    generation: int = 0
    last_seen: float = 0.0
    collection: int = 0  # the collection that it last sent samples for
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class TablePublisher:
    """The published table and its readers. Every method runs on the event loop of the process that owns it.

    ``poll_timeout`` is the duration of a poll without news, in seconds; a reader not seen for three of them
    is dropped: no change waits for it. ``on_publish`` passes the table to a reader in this process.
    """

    def __init__(
        self,
        metrics: MetricsAggregator,
        poll_timeout: float = 5.0,
        on_publish: Callable[[RoutingTable], None] = lambda table: None,
    ) -> None:
        self.table = RoutingTable()
        self._metrics = metrics
        self._poll_timeout = poll_timeout
        self._on_publish = on_publish
        self._readers: dict[str, _TableReader] = {}
        # Dropped readers, whose processes may still run, and whether they do and it is logged.
        self._silent: dict[str, bool] = {}
        self._silent_checked_at = float("-inf")  # on the monotonic clock
        self._earlier: dict[int, RoutingTable] = {}  # by generation, the oldest first
        self._deltas: dict[int, TableDelta] = {}  # to the present table, by the generation before
        self._pickled: tuple[int, bytes] = (0, b"")  # the generation of a whole table, and the table
        self._collection = 0
        self._reader_changed = asyncio.Event()

    async def poll(
        self, source: str, generation: int, samples: MetricsReport | None
    ) -> RoutingTable | TableDelta | Nudge | None:
        """Answer a long poll: the next table or its difference, a request for samples, or None.

        A poll without news ends after the timeout with a request for samples.
        """
        reader = self._readers.setdefault(source, _TableReader())
        reader.generation, reader.last_seen = generation, time.monotonic()
        if self._silent.pop(source, False):
            log.info("The process of replica %s polls again", source)
        if samples is not None:
            if not self._metrics.put(source, samples):
                return "all samples"
            reader.collection = self._collection
        self._reader_changed.set()
        if generation > self.table.generation:
            # The reader has a later table than ours: the clock was set back between two runs of this process.
            self.table = replace(self.table, generation=generation + 1)
        reader.wake.clear()
        if self.table.generation == generation and reader.collection == self._collection:
            try:
                await asyncio.wait_for(reader.wake.wait(), self._poll_timeout)
            except asyncio.TimeoutError:
                return "samples"
        reader.last_seen = time.monotonic()
        if self.table.generation != generation:
            return self._find_delta(generation) or self.table
        return "samples" if reader.collection != self._collection else None

    def expect_readers(self, sources: set[str]) -> None:
        """Wait for the readers of a predecessor, which will poll here, before a change counts as applied."""
        for source in sources:
            self._readers.setdefault(source, _TableReader(last_seen=time.monotonic()))

    def disconnect(self, source: str, samples: MetricsReport | None = None) -> None:
        """Remove a reader that ends or was found dead; its counts stay in the totals."""
        if samples is not None:
            self._metrics.put(source, samples)
        self._readers.pop(source, None)
        self._silent.pop(source, None)
        self._metrics.end(source)
        self._reader_changed.set()

    def publish(self, table: RoutingTable) -> None:
        """Replace the table; every waiting reader receives it at once."""
        self._earlier[self.table.generation] = self.table
        if len(self._earlier) > _KEPT_TABLES:
            del self._earlier[next(iter(self._earlier))]
        self._deltas.clear()
        self.table = table
        self._on_publish(table)
        for reader in self._readers.values():
            reader.wake.set()

    def pickle_table(self) -> bytes:
        """Return the present table for another process.

        That of 10,000 versions takes 0.15 s, so all readers of a generation get the same bytes.
        """
        if self._pickled[0] != self.table.generation:
            self._pickled = (self.table.generation, pickle.dumps(self.table, pickle.HIGHEST_PROTOCOL))
        return self._pickled[1]

    def _find_delta(self, generation: int) -> TableDelta | None:
        """Return the difference of the present table from that of a generation, where that is kept."""
        if generation not in self._deltas and generation in self._earlier and generation:
            self._deltas[generation] = TableDelta.between(self._earlier[generation], self.table)
        return self._deltas.get(generation)

    def next_generation(self) -> int:
        """Return a number above every earlier one, also before a restart: milliseconds since the epoch."""
        return max(self.table.generation + 1, time.time_ns() // 1_000_000)

    async def wait_until_applied(
        self, timeout: float, live_readers: Callable[[], Awaitable[set[str]]]
    ) -> list[str]:
        """Wait until every live reader has the published table; return the sources that still lack it.

        ``live_readers`` returns the sources that run; it is called only when a reader is slow, so that a
        killed reader delays no change.
        """
        generation = self.table.generation
        return await self._wait_for_readers(lambda r: r.generation >= generation, timeout, live_readers)

    async def collect_metrics(self, timeout: float, live_readers: Callable[[], Awaitable[set[str]]]) -> None:
        """Bring the samples of every live reader up to date."""
        self._collection += 1
        collection = self._collection
        for reader in self._readers.values():
            reader.wake.set()
        await self._wait_for_readers(lambda r: r.collection >= collection, timeout, live_readers)

    async def _wait_for_readers(
        self,
        is_done: Callable[[_TableReader], bool],
        timeout: float,
        live_readers: Callable[[], Awaitable[set[str]]],
    ) -> list[str]:
        deadline = time.monotonic() + timeout
        await self._end_silent(timeout, live_readers)
        while True:
            self._drop_silent()
            missing = [source for source, reader in self._readers.items() if not is_done(reader)]
            remaining = deadline - time.monotonic()
            if not missing or remaining <= 0:
                return missing
            self._reader_changed.clear()
            try:
                await asyncio.wait_for(self._reader_changed.wait(), min(_LIVENESS_CHECK_S, remaining))
            except asyncio.TimeoutError:
                if timeout < _LIVENESS_CHECK_S:
                    continue
                if (running := await _look_up(live_readers, remaining)) is not None:
                    for source in missing:
                        if source not in running:
                            self.disconnect(source)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - 3 * self._poll_timeout
        for source in [s for s, reader in self._readers.items() if reader.last_seen < limit]:
            del self._readers[source]
            self._silent[source] = False
            self._metrics.suspend(source)

    async def _end_silent(self, timeout: float, live_readers: Callable[[], Awaitable[set[str]]]) -> None:
        """Disconnect the silent readers whose processes have ended; others may report again."""
        now = time.monotonic()
        if not self._silent or timeout < _LIVENESS_CHECK_S or now < self._silent_checked_at + _SILENT_CHECK_S:
            return
        self._silent_checked_at = now
        silent = set(self._silent)  # one that falls silent during the look-up may have started since
        if (running := await _look_up(live_readers, min(timeout, _LOOK_UP_TIMEOUT_S))) is not None:
            for source in silent & self._silent.keys():
                if source not in running:
                    self.disconnect(source)
                elif not self._silent[source]:
                    self._silent[source] = True
                    log.warning(
                        "The process of replica %s runs, and has not polled for %.0f s: it is paused, "
                        "overloaded or cut off. Changes do not wait for it; it gets them when it polls again",
                        source,
                        3 * self._poll_timeout,
                    )


async def _look_up(live_readers: Callable[[], Awaitable[set[str]]], timeout: float) -> set[str] | None:
    """Return the sources that run; None where Ray Serve's controller is busy, or being replaced."""
    try:
        return await asyncio.wait_for(live_readers(), timeout)
    except asyncio.TimeoutError:
        return None
    except Exception as error:
        log.warning(
            "Ray Serve's controller could not list the running replicas; changes and scrapes wait for slow "
            "ones until their timeout: %s",
            error,
        )
        return None

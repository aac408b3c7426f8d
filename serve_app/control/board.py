"""The board on which the routing table hangs, and the readers in front of it.

Every gateway and replica holds one long poll here. A poll says which generation its reader has in
force, so the board knows when a change is in force everywhere. The same poll brings the reader's
metric samples, so that a scrape is as fresh as the answer to a nudge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from serve_app.telemetry.metrics import Report, Sum
from serve_app.types import Table

Nudge = Literal["samples"]


@dataclass
class _Reader:
    generation: int = 0
    seen: float = 0.0
    reported: int = 0  # the collection it last answered
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class Board:
    """One process owns it: every method runs on that process's event loop.

    ``patience`` is how long a poll is held, in seconds; a reader not seen for three of them is gone.
    """

    def __init__(
        self, total: Sum, patience: float = 5.0, on_hang: Callable[[Table], None] = lambda table: None
    ) -> None:
        self.table = Table()
        self._total = total
        self._patience = patience
        self._on_hang = on_hang  # a reader in this process
        self._readers: dict[str, _Reader] = {}
        self._collection = 0
        self._heard = asyncio.Event()

    async def poll(self, source: str, generation: int, samples: Report | None) -> Table | Nudge | None:
        """A reader's long poll: the next table, a wish for its samples, or None when nothing came in time."""
        reader = self._readers.setdefault(source, _Reader())
        reader.generation, reader.seen = generation, time.monotonic()
        if samples is not None:
            self._total.put(source, samples)
            reader.reported = self._collection
        self._tell()
        if generation > self.table.generation:
            # A reader that knows a later table than ours: the clock went back between two lives of ours.
            self.table = replace(self.table, generation=generation + 1)
        reader.wake.clear()
        if self.table.generation == generation and reader.reported == self._collection:
            try:
                await asyncio.wait_for(reader.wake.wait(), self._patience)
            except asyncio.TimeoutError:
                return "samples"
        reader.seen = time.monotonic()
        if self.table.generation != generation:
            return self.table
        return "samples" if reader.reported != self._collection else None

    def expect(self, sources: set[str]) -> None:
        """Readers of a predecessor's board, which will come back to this one: nothing is in force before they have."""
        for source in sources:
            self._readers.setdefault(source, _Reader(seen=time.monotonic()))

    def leave(self, source: str, samples: Report | None = None) -> None:
        """A reader ends, or was found dead: what it had counted stays counted."""
        if samples is not None:
            self._total.put(source, samples)
        self._readers.pop(source, None)
        self._total.end(source)
        self._tell()

    def hang(self, table: Table) -> None:
        """Put up a new table; every waiting reader gets it at once."""
        self.table = table
        self._on_hang(table)
        for reader in self._readers.values():
            reader.wake.set()

    def next_generation(self) -> int:
        """Higher than every one before it, also before a restart of ours: milliseconds since the epoch."""
        return max(self.table.generation + 1, time.time_ns() // 1_000_000)

    async def in_force(self, timeout: float, alive: Callable[[], Awaitable[set[str]]]) -> list[str]:
        """Wait until every live reader has the table that hangs here; the sources that still have not.

        ``alive`` tells which sources run; it is asked only when somebody is slow, so that a reader
        that was killed holds nobody up.
        """
        generation = self.table.generation
        return await self._until(lambda r: r.generation >= generation, timeout, alive)

    async def collect(self, timeout: float, alive: Callable[[], Awaitable[set[str]]]) -> None:
        """Bring the samples of every live reader up to date."""
        self._collection += 1
        wanted = self._collection
        for reader in self._readers.values():
            reader.wake.set()
        await self._until(lambda r: r.reported >= wanted, timeout, alive)

    async def _until(
        self, done: Callable[[_Reader], bool], timeout: float, alive: Callable[[], Awaitable[set[str]]]
    ) -> list[str]:
        deadline, patience = time.monotonic() + timeout, 0.25
        while True:
            self._drop_silent()
            missing = [source for source, reader in self._readers.items() if not done(reader)]
            left = deadline - time.monotonic()
            if not missing or left <= 0:
                return missing
            self._heard.clear()
            try:
                await asyncio.wait_for(self._heard.wait(), min(patience, left))
            except asyncio.TimeoutError:
                running = await alive()
                for source in missing:
                    if source not in running:
                        self.leave(source)

    def _drop_silent(self) -> None:
        limit = time.monotonic() - 3 * self._patience
        for source in [s for s, reader in self._readers.items() if reader.seen < limit]:
            self.leave(source)

    def _tell(self) -> None:
        self._heard.set()

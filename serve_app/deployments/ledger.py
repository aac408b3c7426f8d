"""What should run, as it is stored and as every process has it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from serve_app.control import registry as change
from serve_app.control.board import Board
from serve_app.control.database import Database
from serve_app.control.keys import Keys
from serve_app.control.registry import Registry
from serve_app.control.vitals import Vitals
from serve_app.errors import NotYet, Unavailable


class Ledger:
    """The registry, and the table made of it. ``writing`` is held by whoever changes it, from reading to committing.

    ``alive`` tells which processes read the table, ``on_change`` hears of each change, ``patience`` is in seconds,
    ``sequence_header`` names the sequence that a call belongs to.
    """

    def __init__(
        self,
        database: Database,
        registry: Registry,
        board: Board,
        vitals: Vitals,
        keys: Keys | None,
        alive: Callable[[], Awaitable[set[str]]],
        on_change: Callable[[], None],
        patience: float,
        sequence_header: str = "",
    ) -> None:
        self.registry = registry
        self.writing = asyncio.Lock()
        self.settled = False  # every version that start-up wanted is ready or has failed
        self._database = database
        self._board = board
        self._vitals = vitals
        self._keys = keys
        self._alive = alive
        self._on_change = on_change
        self._patience = patience
        self._sequence_header = sequence_header

    async def commit(self, after: Registry) -> None:
        """Store a change, put it in force (and wait until it is), and only then return.

        Raises Unavailable where it could not be stored, NotYet where a live reader lags behind it.
        """
        try:
            await asyncio.to_thread(self._database.save, self.registry, after)
        except Unavailable:
            # The connection may have gone after the commit: what is stored is what holds.
            self.registry = await asyncio.to_thread(self._database.load)
            self.publish()
            raise
        self.registry = after
        self.publish()
        self._on_change()
        await self.until_in_force()

    def publish(self) -> None:
        """Hang up the table of this moment, where it says anything new."""
        healthy = {spec.ref: self._vitals.healthy(spec) for spec in self.registry}
        now = self._board.table
        seen = self._vitals.statuses, healthy, now.generation, self.settled
        table = change.table(self.registry, *seen, self._sequence_header)
        table = replace(table, access=self._keys.access if self._keys is not None else None)
        if table != now or now.generation == 0:
            self._board.hang(replace(table, generation=self._board.next_generation()))

    async def until_in_force(self) -> None:
        """Wait until every live reader has the table that hangs. Raises NotYet."""
        late = await self._board.in_force(self._patience, self._alive)
        if late:
            raise NotYet(f"Stored, and not yet in force at {len(late)} of the replicas that run.")

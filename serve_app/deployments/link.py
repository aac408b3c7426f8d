"""A process's line to Management: tables come in; metric samples, and what calls came to, go out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from ray import serve

from serve_app.dataplane import TableReader
from serve_app.deployments.options import MANAGEMENT, SERVER
from serve_app.telemetry.metrics import Meters, Report
from serve_app.types import Table

log = logging.getLogger("torchrelay.link")

_RETRY = 0.2  # seconds between attempts while Management is being replaced
_PUSH = 0.5  # seconds between observations
_PATIENCE = 30  # seconds for Management to store them, before they are sent again
_FAREWELL = 2  # the same, for a process that ends


class Link:
    """Made on the event loop that it will run on."""

    def __init__(self, reader: TableReader, meters: Meters) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before samples are taken
        self.observed: dict[str, Callable[[], Any | None]] = {}  # what is new, by the name of whom it is for
        self._handle = serve.get_deployment_handle(MANAGEMENT, SERVER)
        self._source = serve.get_replica_context().replica_id.unique_id
        self._reader = reader
        self._meters = meters
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0  # of the last payloads that were taken
        self._unheard: dict[str, Any] = {}  # they, until Management has acknowledged them

    @property
    def management(self) -> Any:
        """The handle, for calls beside the poll."""
        return self._handle

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._poll()), loop.create_task(self._push())]

    async def first_table(self, timeout: float) -> None:
        """Wait until a table is here, so that the first call finds its model."""
        changed = self._reader.changed
        if self._reader.table.generation == 0:
            await asyncio.wait_for(changed.wait(), timeout)

    async def leave(self) -> None:
        """Say goodbye with the last samples and observations: what this process counted is not lost."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # Management is down: the goodbye below says it
            if not self._unheard or await self._deliver(_FAREWELL):
                self._take()
                await self._deliver(_FAREWELL)
        await self._handle.leave.remote(self._source, self._samples())

    def _samples(self) -> Report:
        self.refresh()
        return self._meters.report()

    async def _poll(self) -> None:
        samples: Report | None = self._samples()
        while True:
            try:
                answer = await self._handle.poll.remote(self._source, self._reader.table.generation, samples)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Management is down or being replaced: the last table goes on holding
                log.info("no answer from Management (%s); asking again", type(error).__name__)
                await asyncio.sleep(_RETRY)
                continue
            samples = self._samples() if answer == "samples" else None
            if isinstance(answer, Table):
                self._reader.put(answer)

    async def _push(self) -> None:
        while True:
            await asyncio.sleep(_RETRY if self._unheard else _PUSH)
            if not self._unheard:
                self._take()
            try:
                await self._deliver(_PATIENCE)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # as in _poll; what was counted waits
                log.info("Management has not stored observations (%s); sending them again", type(error).__name__)

    def _take(self) -> None:
        news = {name: new for name, take in self.observed.items() if (new := take()) is not None}
        if news:
            self._number += 1
            self._unheard = news

    async def _deliver(self, timeout: float) -> bool:
        """Send what was taken, under the same number until it is acknowledged: it counts once however often it came."""
        if self._unheard:
            answer = self._handle.observe.remote(self._source, self._number, self._unheard)
            if not await asyncio.wait_for(answer, timeout):
                return False
            self._unheard = {}
        return True

"""A process's line to Management: tables come in, metric samples go out."""

from __future__ import annotations

import asyncio
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


class Link:
    """Made on the event loop that it will run on."""

    def __init__(self, reader: TableReader, meters: Meters) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before samples are taken
        self._handle = serve.get_deployment_handle(MANAGEMENT, SERVER)
        self._source = serve.get_replica_context().replica_id.unique_id
        self._reader = reader
        self._meters = meters
        self._task: asyncio.Task[None] | None = None

    @property
    def management(self) -> Any:
        """The handle, for calls beside the poll."""
        return self._handle

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._poll())

    async def first_table(self, timeout: float) -> None:
        """Wait until a table is here, so that the first call finds its model."""
        changed = self._reader.changed
        if self._reader.table.generation == 0:
            await asyncio.wait_for(changed.wait(), timeout)

    async def leave(self) -> None:
        """Say goodbye with the last samples: what this process counted is not lost."""
        if self._task is not None:
            self._task.cancel()
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

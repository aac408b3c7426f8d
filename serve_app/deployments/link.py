"""A process's line to Management: tables come in; metric samples, and what calls came to, go out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
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


class Outbox:
    """What is new in this process, until it was acknowledged.

    It is sent again under the same number until then, so it counts once however often it came; nothing is taken
    meanwhile. ``send`` says whether it was acknowledged, or raises.
    """

    def __init__(self, send: Callable[[int, dict[str, Any]], Awaitable[bool]]) -> None:
        self.observed: dict[str, Callable[[], Any | None]] = {}  # what is new, by the name of whom it is for
        self._send = send
        self._number = 0  # of what was taken last
        self._taken: dict[str, Any] = {}  # until it is acknowledged

    async def push(self) -> None:
        while True:
            await asyncio.sleep(_RETRY if self._taken else _PUSH)
            try:
                await self.deliver(_PATIENCE)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # as in Link._poll
                log.info("Management has not counted observations (%s); sending them again", type(error).__name__)

    async def deliver(self, timeout: float) -> bool:
        """Send what was not acknowledged yet, else what is new; whether nothing is left of it.

        ``timeout`` is in seconds. Raises asyncio.TimeoutError, and as ``send`` does.
        """
        if not self._taken:
            self._taken = {name: news for name, take in self.observed.items() if (news := take()) is not None}
            self._number += bool(self._taken)
        if self._taken:
            if not await asyncio.wait_for(self._send(self._number, self._taken), timeout):
                return False
            self._taken = {}
        return True

    async def empty(self, timeout: float) -> None:
        """The last words of a process: what waits, and what is new. Raises as ``deliver`` does."""
        waited = bool(self._taken)
        if await self.deliver(timeout) and waited:
            await self.deliver(timeout)


class Link:
    """Made on the event loop that it will run on."""

    def __init__(self, reader: TableReader, meters: Meters) -> None:
        self.refresh: Callable[[], None] = lambda: None  # called before samples are taken
        self.greet: Callable[[], None] = lambda: None  # called when Management is there, and is there again
        self._outbox = Outbox(self._observe)
        self.observed = self._outbox.observed  # what Management is told every half second: by name, what is new
        self._handle = serve.get_deployment_handle(MANAGEMENT, SERVER)
        self._source = serve.get_replica_context().replica_id.unique_id
        self._reader = reader
        self._meters = meters
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def management(self) -> Any:
        """The handle, for calls beside the poll."""
        return self._handle

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._poll()), loop.create_task(self._outbox.push())]

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
            await self._outbox.empty(_FAREWELL)
        await self._handle.leave.remote(self._source, self._samples())

    def _samples(self) -> Report:
        self.refresh()
        return self._meters.report()

    async def _poll(self) -> None:
        samples: Report | None = self._samples()
        known = False  # to Management, since it last began
        while True:
            try:
                answer = await self._handle.poll.remote(self._source, self._reader.table.generation, samples)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Management is down or being replaced: the last table goes on holding
                log.info("no answer from Management (%s); asking again", type(error).__name__)
                known = False
                await asyncio.sleep(_RETRY)
                continue
            if not known:
                known = True
                self.greet()
            samples = self._samples() if answer == "samples" else None
            if isinstance(answer, Table):
                self._reader.put(answer)

    async def _observe(self, number: int, payloads: dict[str, Any]) -> bool:
        return bool(await self._handle.observe.remote(self._source, number, payloads))

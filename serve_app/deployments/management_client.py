"""Connection of a process to Management: routing tables come in, metric samples and reports go out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ray import serve

from serve_app.dataplane.access_limits import SHARE_PERIOD_S, KeyLimiter
from serve_app.dataplane.count_journal import CountJournal, abandoned_reports
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.dataplane.experiment_collector import replay
from serve_app.deployments.ray_internals.actor_classes import bound_actor_classes
from serve_app.domain.routing_table import TableDelta
from serve_app.protocols.http import json_web_tokens
from serve_app.telemetry.descriptors import DescriptorCheck
from serve_app.telemetry.metrics import Meters, MetricsReport

log = logging.getLogger(__name__)

SERVER = "torchrelay"  # the application that holds the gateway and Management; the mark in our user_config
MANAGEMENT = "Management"  # the deployment

ReportSources = dict[str, Callable[[], Any]]  # by a report's name: returns what is new, None for nothing

_RETRY_PERIOD_S = 0.2  # seconds between attempts while Management is being replaced
_PUSH_PERIOD_S = 0.5  # seconds between two reports
_SEND_TIMEOUT_S = 30  # seconds in which Management stores a report, before it is sent again
_SHARE_PAUSE_S = 0.02  # seconds between the first request of a key and its report
_SHUTDOWN_TIMEOUT_S = 2  # the same, for a process that ends


class ReportQueue:
    """A queue of reports that keeps each report until it was acknowledged.

    A report is sent again under the same number until then, so it counts once however often it arrives; no
    source is drained meanwhile. ``send`` gets the name of the reporting process, the number and the reports,
    and returns whether they were acknowledged, or raises.
    """

    def __init__(
        self, send: Callable[[str, int, dict[str, Any]], Awaitable[bool]], source: str, journals: Path
    ) -> None:
        self.sources: ReportSources = {}
        self._send = send
        self._source = source
        self.journal = CountJournal(journals, source)  # of the counts of experiments, named ``trials``
        self._number = 0  # number of the last report
        self._unacknowledged: dict[str, Any] = {}  # until Management acknowledges it

    async def push(self) -> None:
        recovered = False
        while True:
            await asyncio.sleep(_RETRY_PERIOD_S if self._unacknowledged else _PUSH_PERIOD_S)
            try:
                await self.send_pending(_SEND_TIMEOUT_S)
                recovered = recovered or await self.send_abandoned(_SEND_TIMEOUT_S)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # as in ManagementClient._poll, which reports it
                log.debug(
                    "Management has not counted observations (%s); sending them again", type(error).__name__
                )

    async def send_pending(self, timeout: float) -> bool:
        """Send the unacknowledged report, else the new one; return whether nothing is left of it.

        ``timeout`` is in seconds. Raises asyncio.TimeoutError, and the errors of ``send``.
        """
        if not self._unacknowledged:
            self._unacknowledged = {
                name: news for name, take in self.sources.items() if (news := take()) is not None
            }
            self._number += bool(self._unacknowledged)
            if "trials" in self._unacknowledged:
                self.journal.seal(self._number)
        if self._unacknowledged:
            sending = self._send(self._source, self._number, self._unacknowledged)
            if not await asyncio.wait_for(sending, timeout):
                return False
            self._unacknowledged = {}
            self.journal.discard(self._number)
        return True

    async def send_abandoned(self, timeout: float) -> bool:
        """Send the counts that processes of this machine left behind; return whether all are stored.

        Raises the same as ``send_pending``.
        """
        reports = await asyncio.to_thread(lambda: list(abandoned_reports(self.journal.directory)))
        for report in reports:
            sending = self._send(report.source, report.number, {"trials": replay(report.records)})
            if not await asyncio.wait_for(sending, timeout):
                return False
            report.file.unlink(missing_ok=True)
        return True

    async def drain(self, timeout: float) -> None:
        """Send the last reports of a process, pending and new ones. Raises the errors of ``send_pending``."""
        waited = bool(self._unacknowledged)
        if await self.send_pending(timeout) and waited:
            await self.send_pending(timeout)
        self.journal.close()


class ManagementClient:
    """A client of Management; it is created on the event loop that it runs on."""

    def __init__(self, reader: RoutingTableReader, meters: Meters, journals: Path) -> None:
        self.before_report: Callable[[], None] = lambda: None  # called before samples are taken
        self.on_connect: Callable[[], None] = lambda: None  # called whenever Management is connected
        self.key_limiter: KeyLimiter | None = None  # whose shares of limits Management computes
        self._source = serve.get_replica_context().replica_id.unique_id
        self.reports = ReportQueue(self._observe, self._source, journals)
        self.management = serve.get_deployment_handle(MANAGEMENT, SERVER)  # for calls beside the poll too
        self._reader = reader
        self._meters = meters
        self._descriptors = DescriptorCheck()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        bound_actor_classes()  # of the replicas that this process calls
        loop = asyncio.get_running_loop()
        loops = [self._poll(), self.reports.push()]
        if self.key_limiter is not None:
            loops.append(self._exchange_shares(self.key_limiter))
        self._tasks = [loop.create_task(one) for one in loops]

    async def wait_for_table(self, timeout: float) -> None:
        """Wait until a table has arrived, so that the first request finds its model."""
        changed = self._reader.changed
        if self._reader.table.generation == 0:
            await asyncio.wait_for(changed.wait(), timeout)

    async def disconnect(self) -> None:
        """Disconnect with the last samples and reports, so that no count of this process is lost."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):  # Management is down: the call below raises
            await self.reports.drain(_SHUTDOWN_TIMEOUT_S)
        await self.management.disconnect.remote(self._source, self._collect_samples())

    def _collect_samples(self, full: bool = True) -> MetricsReport:
        self.before_report()
        self._descriptors.run()
        if self.key_limiter is not None:
            self.key_limiter.report(self._meters)
        return self._meters.report(full)

    async def _poll(self) -> None:
        samples: MetricsReport | None = self._collect_samples()
        is_connected = False  # since Management started last
        has_reported = False  # that it does not answer, once until it does
        while True:
            try:
                answer = await self.management.poll.remote(
                    self._source, self._reader.table.generation, samples
                )
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Management is down or being replaced: the last table stays in use
                if not has_reported:
                    log.warning(
                        "Management does not respond (%s). Requests continue with the last routing table; "
                        "polls are repeated until it has started",
                        type(error).__name__,
                    )
                is_connected, has_reported = False, True
                await asyncio.sleep(_RETRY_PERIOD_S)
                continue
            try:
                if not is_connected:
                    self.on_connect()
                    is_connected = True
                if has_reported:
                    log.info("Management responds again")
                    has_reported = False
                samples = self._collect_samples(answer == "all samples") if isinstance(answer, str) else None
                if isinstance(answer, TableDelta):
                    self._reader.update(answer.apply(self._reader.table))
                elif isinstance(answer, bytes):
                    self._reader.update(pickle.loads(answer))
            except Exception:  # without this loop the process would keep its routing table for ever
                log.exception("An answer of Management could not be applied; requesting it again")
                samples = None
                await asyncio.sleep(_RETRY_PERIOD_S)

    async def _exchange_shares(self, limiter: KeyLimiter) -> None:
        """Report the demand of keys with limits while there is some; apply the shares.

        A token with an unknown key is reported, too.
        """
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(limiter.demand.wait(), SHARE_PERIOD_S if limiter.has_demand else 1.0)
            await asyncio.sleep(_SHARE_PAUSE_S)  # the first requests of a key are one report
            limiter.demand.clear()
            if json_web_tokens.take_unknown_key():
                self.management.refresh_jwk_set.remote()
            demands = limiter.collect_demand()
            if not demands:
                continue
            try:
                call = self.management.exchange_shares.remote(self._source, demands)
                limiter.apply_shares(await asyncio.wait_for(call, SHARE_PERIOD_S))
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Management is down: the equal shares apply once these expire
                log.debug("no shares of key limits from Management (%s)", type(error).__name__)
                await asyncio.sleep(_RETRY_PERIOD_S)

    async def _observe(self, source: str, number: int, payloads: dict[str, Any]) -> bool:
        return bool(await self.management.observe.remote(source, number, payloads))

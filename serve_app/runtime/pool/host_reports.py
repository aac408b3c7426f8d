"""Reports of a pool's host to Management: what it has loaded, and what its versions declare."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.pool import HostEvent, HostReport, LoadedVersion, rank_hosts
from serve_app.domain.routing_table import RoutingTable, VersionRoute
from serve_app.errors import RelayError, StartFailed
from serve_app.runtime.pool.leaks import Leak
from serve_app.runtime.pool.version_cache import VersionCache
from serve_app.runtime.runner import Runner

log = logging.getLogger(__name__)

_PERIOD_S = 2.0  # seconds between reports without a change
_PAUSE_S = 0.05  # seconds in which changes are collected for one report


class HostReporter:
    """The reporter of one host."""

    def __init__(self, pool: str, replica: str, cache: VersionCache[Any], management: Any) -> None:
        self._pool = pool
        self._replica = replica
        self._cache = cache
        self._management = management
        self._events: list[HostEvent] = []
        self._changed = asyncio.Event()
        self._offered: dict[ModelRef, str] = {}  # revisions whose declarations Management has
        self._busy: dict[ModelRef, float] = {}
        self._reported_at = time.monotonic()
        self._pinning: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references

    def report_soon(self) -> None:
        """Send a report: something has changed, or Management is a new process."""
        self._changed.set()

    def load_failed(self, spec: ModelSpec, error: StartFailed) -> None:
        """Report the error of a load."""
        self._events.append(HostEvent("load_failed", spec.ref, spec.revision, error.detail))
        self.report_soon()

    def leaked(self, spec: ModelSpec, leak: Leak) -> None:
        """Report a version that leaks memory."""
        self._events.append(HostEvent("leak", spec.ref, spec.revision, str(leak)))
        self.report_soon()

    def loaded(self, spec: ModelSpec, runner: Runner, memory: int) -> None:
        """Report what the handler of a version declares and uses, once for each revision."""
        if self._offered.get(spec.ref) != spec.revision:
            self._offered[spec.ref] = spec.revision
            self._management.offers.remote(
                spec.ref, spec.digest, runner.signature, runner.input_type, runner.schemas, memory
            )

    def retain(self, revisions: Mapping[ModelRef, str]) -> None:
        """Report the declarations of other revisions again when they are loaded: Management dropped them."""
        self._offered = {
            ref: revision for ref, revision in self._offered.items() if revisions.get(ref) == revision
        }

    def load_pinned(self, table: RoutingTable, pinned: Mapping[ModelRef, VersionRoute]) -> None:
        """Load the pinned versions that belong to this host and are not loaded."""
        hosts = table.pools.get(self._pool, ())
        for ref, route in pinned.items():
            if self._replica in rank_hosts(ref, hosts)[: route.pool_hosts] and not self._cache.find(
                ref, route.revision
            ):
                task = asyncio.ensure_future(self._load(ref, route.revision))
                self._pinning.add(task)
                task.add_done_callback(self._pinning.discard)

    async def _load(self, ref: ModelRef, revision: str) -> None:
        with contextlib.suppress(RelayError):  # it was reported
            await self._cache.get(ref, revision)

    async def run(self) -> None:
        """Send a report after each change, and periodically, until cancelled."""
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _PERIOD_S)
            await asyncio.sleep(_PAUSE_S)
            self._changed.clear()
            events, self._events = self._events, []
            try:
                report = HostReport(self._pool, self._describe_loaded(), tuple(events))
                await self._management.report_host.remote(self._replica, report)
            except asyncio.CancelledError:
                raise
            except Exception as error:  # Management is down or being replaced: it gets the next report
                log.info("no report to Management (%s)", type(error).__name__)
                self._events = events + self._events

    def _describe_loaded(self) -> dict[ModelRef, LoadedVersion]:
        now = time.monotonic()
        seconds, self._reported_at = max(now - self._reported_at, 1e-3), now
        loaded, busy = {}, {}
        for version in self._cache.loaded.values():
            ref = version.spec.ref
            busy[ref] = version.busy_seconds
            share = max(0.0, busy[ref] - self._busy.get(ref, 0.0)) / seconds
            loaded[ref] = LoadedVersion(version.revision, version.memory.host, share)
        self._busy = busy
        return loaded

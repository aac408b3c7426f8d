"""Loading of pooled versions at their registration, and their isolation after a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from serve_app.control.pools.tracker import PoolTracker, host_spec
from serve_app.control.registry import Registry
from serve_app.control.registry_changes import with_version
from serve_app.control.replica_health import HealthTracker
from serve_app.control.state import StateStore
from serve_app.domain.model import ModelRef, ModelSpec
from serve_app.domain.pool import HostEvent, HostReport, pool_ref, rank_hosts
from serve_app.errors import BadRequest, RelayError, StartFailed
from serve_app.settings import Settings
from serve_app.telemetry.crash_reports import CrashReport

log = logging.getLogger(__name__)

_BALANCE_PERIOD_S = 2.0
_SUSPICION_S = 600.0  # seconds within which a second death counts


class LoadInHost(Protocol):
    """A function that loads a version in one host of its pool."""

    async def __call__(self, pool: ModelRef, host: str, spec: ModelSpec, /) -> None:
        """Load it. Raises RelayError: the error of the load, and Unavailable where the host is lost."""


class PoolService:
    """The operations on pools. ``wait_for_round`` waits for the reconcile loop's next observation.

    ``on_isolated`` is called with a version that left its pool, and the reason.
    """

    def __init__(
        self,
        state: StateStore,
        tracker: PoolTracker,
        health: HealthTracker,
        load_in_host: LoadInHost,
        wait_for_round: Callable[[], Awaitable[None]],
        on_isolated: Callable[[ModelSpec, str], None],
        settings: Settings,
    ) -> None:
        self.tracker = tracker
        self._state = state
        self._health = health
        self._load_in_host = load_in_host
        self._wait_for_round = wait_for_round
        self._on_isolated = on_isolated
        self._settings = settings
        # When a host was killed while a version ran, by its application and digest.
        self._suspects: dict[tuple[str, str], float] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references

    def find_claiming_spec(self, spec: ModelSpec) -> ModelSpec:
        """Return the spec of the hosts of a version's pool, whose resources it claims.

        Raises BadRequest where the version wants more hosts than its pool has.
        """
        hosts = host_spec(spec.pool, self._settings)
        if spec.min_workers > hosts.min_workers:
            raise BadRequest(
                f"{spec.min_workers} workers are hosts of the pool {spec.pool}, which has "
                f"{hosts.min_workers}; raise pools.{spec.pool}.hosts in app.yaml or request fewer workers."
            )
        return hosts

    async def load(self, spec: ModelSpec, timeout: float, check: Callable[[], None] = lambda: None) -> int:
        """Load a version in as many hosts as it has workers, and return their number.

        ``timeout`` in seconds includes the start of the hosts. ``check`` raises where the version is no
        longer registered. Raises StartFailed.
        """
        deadline = time.monotonic() + timeout
        while len(hosts := self.tracker.hosts.get(spec.pool, ())) < spec.min_workers:
            if (failure := self._health.get_failure(pool_ref(spec.pool))) is not None:
                raise StartFailed(spec.name, spec.version, f"the pool {spec.pool}: {failure.detail}")
            if time.monotonic() > deadline:
                reason = f"no host of the pool {spec.pool} is ready after {timeout:.0f} s"
                status = self._health.statuses.get(pool_ref(spec.pool))
                waiting = f"; it waits for {status.waiting_for}" if status and status.waiting_for else ""
                raise StartFailed(spec.name, spec.version, reason + waiting)
            await self._wait_for_round()
            check()
        chosen = rank_hosts(spec.ref, hosts)[: spec.min_workers]
        loads = [self._load_in_host(pool_ref(spec.pool), host, spec) for host in chosen]
        try:
            await asyncio.wait_for(asyncio.gather(*loads), max(1.0, deadline - time.monotonic()))
        except StartFailed:
            raise
        except asyncio.TimeoutError:
            reason = f"not loaded within {timeout:.0f} s by its pool {spec.pool}"
            raise StartFailed(spec.name, spec.version, reason) from None
        except RelayError as error:
            raise StartFailed(spec.name, spec.version, str(error)) from None
        check()
        return len(chosen)

    async def load_later(self, specs: Iterable[ModelSpec]) -> None:
        """Load busy versions in their next hosts."""
        for spec in specs:
            hosts = rank_hosts(spec.ref, self.tracker.hosts.get(spec.pool, ()))
            for host in hosts[: self.tracker.wanted_hosts(spec)]:
                if host not in self.tracker.loaded_by(spec):
                    try:
                        await self._load_in_host(pool_ref(spec.pool), host, spec)
                    except RelayError as error:
                        log.warning("%s was not loaded in a further host: %s", spec.ref.app, error)

    async def run(self) -> None:
        """Give busy versions further hosts, until cancelled."""
        while True:
            await asyncio.sleep(_BALANCE_PERIOD_S)
            if len(self.tracker.hosts):
                await self.load_later(self.tracker.balance(list(self._state.registry)))

    def receive(self, host: str, report: HostReport) -> None:
        """Store a host's report, with the errors of loads and the versions that leak memory."""
        self.tracker.put(host, report)
        for event in report.events:
            if (spec := self._find(event)) is None:
                continue
            log.error("%s: %s", spec.ref.app, event.detail)
            self._health.record_note(spec.ref, event.detail)
            if event.kind == "leak":
                self._start(self._isolate([spec], event.detail))

    def on_crash(self, crash: CrashReport) -> None:
        """Give the version that crashed a host replicas of its own.

        A host that was killed names none: the versions that ran in it are suspects, and a suspect of two
        such deaths leaves the pool.
        """
        by_app = {spec.ref.app: spec for spec in self._state.registry if spec.is_pooled}
        if crash.culprit:
            culprits = [crash.culprit]
        else:
            running = [(app, by_app[app].digest) for app in crash.running if app in by_app]
            self._suspects = {
                suspect: when for suspect, when in self._suspects.items() if crash.when - when < _SUSPICION_S
            }
            culprits = [suspect[0] for suspect in running if suspect in self._suspects]
            self._suspects |= dict.fromkeys(running, crash.when)
        if specs := [by_app[app] for app in culprits if app in by_app]:
            self._start(self._isolate(specs, crash.cause))

    async def _isolate(self, specs: list[ModelSpec], reason: str) -> None:
        first_line = reason.partition("\n")[0]
        async with self._state.exclusive():
            before: Registry = self._state.registry
            after = before
            for spec in specs:
                after = isolate(after, spec, first_line)
            if after is before:
                return
            await self._state.commit_with_status(after)
        for spec in specs:
            log.error(
                "%s has replicas of its own from now on, outside its pool %s: %s",
                spec.ref.app,
                spec.pool,
                first_line,
            )
            self._health.record_note(spec.ref, reason)
            self._on_isolated(spec, first_line)

    def _find(self, event: HostEvent) -> ModelSpec | None:
        """Return the version of an event; None where it was removed or replaced meanwhile."""
        record = self._state.registry.models.get(event.ref.name)
        spec = record.versions.get(event.ref.version) if record is not None else None
        return spec if spec is not None and spec.is_pooled and spec.revision == event.revision else None

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def isolate(registry: Registry, spec: ModelSpec, reason: str) -> Registry:
    """Give a version replicas of its own, at least one, instead of its pool's hosts.

    The same registry is returned where the version was removed, replaced or isolated meanwhile.
    """
    record = registry.models.get(spec.name)
    current = record.versions.get(spec.version) if record is not None else None
    if current is None or not current.is_pooled or current.digest != spec.digest:
        return registry
    low = max(1, current.min_workers)
    return with_version(
        registry,
        # Its measured memory is what it added to a host; a process has the base as well.
        current.with_(isolated=reason, min_workers=low, max_workers=max(low, current.max_workers), memory=0),
    )

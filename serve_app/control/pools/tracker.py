"""The observed state of pools: their running hosts, what these have loaded, and the busiest versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import ObservedApp
from serve_app.domain.model import ModelRef, ModelSpec, ReplicaInfo
from serve_app.domain.pool import POOLS, HostReport, LoadedVersion, PoolSettings, pool_ref
from serve_app.settings import Settings

# Shares of the time in which a version's handler runs, in the mean of its hosts.
_HOT, _COLD = 0.5, 0.15
_BASE_BYTES = 256 << 20  # of a host without a loaded version


def host_spec(pool: str, settings: Settings) -> ModelSpec:
    """Return the spec of a pool's own application: a replica of it is a host."""
    options = settings.pools.get(pool, PoolSettings())
    return ModelSpec(
        name=POOLS,
        version=pool,
        url="",
        digest="",
        archive="",
        min_workers=options.hosts,
        max_workers=options.hosts,
        num_cpus=options.num_cpus,
        num_gpus=options.num_gpus,
        memory=(options.memory << 20) + _BASE_BYTES,
        max_ongoing_requests=100_000,  # each version has its own queue and its own limits
        config={"memory": options.memory},
    )


def host_states(specs: Iterable[ModelSpec], settings: Settings) -> dict[str, DesiredState]:
    """Return the applications of the pools that ``specs`` need, by name.

    One of them owns the route of predictions, so that its versions are reached without the gateway.
    """
    pools = sorted({spec.pool for spec in specs if spec.is_pooled})
    main = settings.runtime.pool if settings.runtime.pool in pools else next(iter(pools), "")
    return {
        pool_ref(pool).app: DesiredState(host_spec(pool, settings), "/predictions" if pool == main else None)
        for pool in pools
    }


class PoolTracker:
    """The hosts of all pools. ``on_change`` is called when what a host has loaded has changed."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.hosts: Mapping[str, tuple[str, ...]] = {}  # the running hosts of each pool
        self._on_change = on_change
        self._workers: dict[str, ReplicaInfo] = {}  # by host
        self._reports: dict[str, HostReport] = {}  # by host
        self._extra: dict[ModelRef, int] = {}  # hosts that a busy version has beyond its spec's
        # Of each pooled spec, by application: nearly all are the same in each round.
        self._states: dict[str, tuple[ModelSpec, DesiredState]] = {}
        self._unloaded: dict[str, tuple[ModelSpec, ObservedApp]] = {}
        self._loaded: dict[str, ObservedApp] = {}
        self._changed: set[ModelRef] = set()  # whose hosts have changed since ``take_changed``

    def put(self, host: str, report: HostReport) -> None:
        """Store a host's report."""
        known = self._reports.get(host)
        self._reports[host] = report
        before = _revisions(known) if known is not None else set()
        if changed := before ^ _revisions(report):
            self._changed |= {ref for ref, _ in changed}
            self._on_change()

    def take_changed(self) -> set[ModelRef]:
        """Return the versions that hosts have loaded or evicted since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def set_observed(self, observed: Mapping[str, ObservedApp]) -> None:
        """Store which hosts run."""
        pools = {app: current for app, current in observed.items() if app.startswith(f"{POOLS}--")}
        workers = {w.id: w for current in pools.values() for w in current.workers if w.ready}
        hosts = {
            app.removeprefix(f"{POOLS}--"): tuple(sorted(w.id for w in current.workers if w.ready))
            for app, current in pools.items()
        }
        if hosts != self.hosts:
            self.hosts = hosts
            self._unloaded.clear()
        self._workers = workers
        living = {w.id for current in pools.values() for w in current.workers}
        for host in self._reports.keys() - living:
            del self._reports[host]

    def loaded_by(self, spec: ModelSpec) -> dict[str, LoadedVersion]:
        """Return the running hosts that have loaded a version in its revision, and their reports of it."""
        return {
            host: loaded
            for host, report in self._reports.items()
            if host in self._workers
            and (loaded := report.loaded.get(spec.ref)) is not None
            and loaded.revision == spec.revision
        }

    def desired_states(self, specs: Iterable[ModelSpec]) -> dict[str, DesiredState]:
        """Return the states of the pooled versions, which have no application of their own, by name.

        Their number of loaded hosts is whatever requests and evictions make it.
        """
        states = {spec.ref.app: self.desired_state(spec) for spec in specs if spec.is_pooled}
        self._states = {app: self._states[app] for app in states}
        self._extra = {ref: extra for ref, extra in self._extra.items() if ref.app in states}
        return states

    def desired_state(self, spec: ModelSpec) -> DesiredState:
        """Return the state of one pooled version."""
        known = self._states.get(spec.ref.app)
        if known is None or known[0] is not spec:
            known = spec, DesiredState(spec.with_(min_workers=0, autoscaling=None), None)
            self._states[spec.ref.app] = known
        return known[1]

    def observe_all(self, specs: Iterable[ModelSpec]) -> dict[str, ObservedApp]:
        """Return all pooled versions as if they were applications, by name."""
        loaded = {ref for report in self._reports.values() for ref in report.loaded}
        before, self._unloaded = self._unloaded, {}
        loaded_before, self._loaded = self._loaded, {}
        observed = {}
        for spec in specs:
            if not spec.is_pooled:
                continue
            app = spec.ref.app
            if spec.ref in loaded:
                current = self.observe(spec)
                if current == loaded_before.get(app):  # the same object needs no update: see HealthTracker
                    current = loaded_before[app]
                self._loaded[app] = observed[app] = current
                continue
            known = before.get(app)
            if known is None or known[0] is not spec:
                known = spec, self.observe(spec)
            self._unloaded[app] = known
            observed[app] = known[1]
        return observed

    def observe(self, spec: ModelSpec) -> ObservedApp:
        """Return a pooled version as if it were an application: its replicas are the hosts that have it."""
        loaded = self.loaded_by(spec)
        workers = tuple(
            replace_memory(self._workers[host], version.memory) for host, version in sorted(loaded.items())
        )
        return ObservedApp(
            app=spec.ref.app,
            route=None,
            replicas=len(workers),
            config={"revision": spec.revision},
            attempt=0,
            status="RUNNING",
            message="",
            workers=workers,
            pool_hosts=self.wanted_hosts(spec),
        )

    def wanted_hosts(self, spec: ModelSpec) -> int:
        """Return the number of hosts that should have a version loaded."""
        return min(
            max(1, spec.min_workers) + self._extra.get(spec.ref, 0), len(self.hosts.get(spec.pool, ())) or 1
        )

    def balance(self, specs: Iterable[ModelSpec]) -> list[ModelSpec]:
        """Give busy versions a further host, and take it from quiet ones; return those that got one.

        ``maxWorkers`` bounds them where it is above ``minWorkers``; otherwise all hosts of the pool do.
        """
        grown = []
        before = dict(self._extra)
        for spec in specs:
            if not spec.is_pooled:
                continue
            loaded = self.loaded_by(spec).values()
            busy = sum(version.busy for version in loaded) / len(loaded) if loaded else 0.0
            count, extra = self.wanted_hosts(spec), self._extra.get(spec.ref, 0)
            most = len(self.hosts.get(spec.pool, ()))
            if spec.max_workers > spec.min_workers:
                most = min(most, spec.max_workers)
            if busy > _HOT and len(loaded) >= count and count < most:
                self._extra[spec.ref] = extra + 1
                grown.append(spec)
            elif busy < _COLD and extra:
                self._extra[spec.ref] = extra - 1
        self._extra = {ref: extra for ref, extra in self._extra.items() if extra}
        if self._extra != before:
            self._unloaded.clear()
        return grown


def _revisions(report: HostReport) -> set[tuple[ModelRef, str]]:
    return {(ref, version.revision) for ref, version in report.loaded.items()}


def replace_memory(worker: ReplicaInfo, memory: int) -> ReplicaInfo:
    """Return a host as the replica of one of its versions, with that version's memory."""
    return ReplicaInfo(
        worker.id, worker.pid, worker.started_at, worker.ready, memory, worker.gpu, worker.node
    )

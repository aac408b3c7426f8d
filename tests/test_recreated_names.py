"""A version or a key of an earlier one's name: nothing of the earlier archive or key applies to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.key_shares import KeyShares
from serve_app.control.persistence.database import Database
from serve_app.control.pools.service import PoolService
from serve_app.control.pools.tracker import PoolTracker
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.reconciler import Reconciler
from serve_app.control.registry import Registry, TableBuilder, desired_states, find_version
from serve_app.control.registry_changes import register
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.control.state import AcknowledgementPolicy, StateStore
from serve_app.control.table_publisher import TablePublisher
from serve_app.dataplane.access_limits import KeyLimiter
from serve_app.dataplane.data_plane import DataPlane, DataPlaneLimits, RoutingTableReader
from serve_app.deployments.serving_process.adapters import ReplicaAdapters
from serve_app.domain.access import ROLES, KeyGrant, KeyLimits
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.model import ModelRef, ModelSpec, ReplicaInfo
from serve_app.domain.pool import HostReport, LoadedVersion
from serve_app.domain.request import InferenceRequest, InputPart
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.signature import Signature, TensorSpec
from serve_app.domain.tensors import Tensor
from serve_app.errors import ModelLoading, RateLimited, StartFailed
from serve_app.runtime.pool.host_reports import HostReporter
from serve_app.runtime.pool.leaks import LeakDetector
from serve_app.runtime.pool.memory import MemoryUse
from serve_app.runtime.pool.version_cache import CacheLimits, VersionCache
from serve_app.settings import Settings
from serve_app.telemetry.crash_reports import CrashReport
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.metrics_aggregator import MetricsAggregator

REF = ModelRef("m", "1.0")


def spec(digest: str = "first", **fields: Any) -> ModelSpec:
    return ModelSpec("m", "1.0", "m.mar", digest, "", **fields)


def signature(width: int) -> Signature:
    return Signature((TensorSpec("x", "FP32", (-1, width)),))


def app(*ids: str, status: str = "RUNNING") -> ObservedApp:
    workers = tuple(ReplicaInfo(id, 1, 0.0, True) for id in ids)
    return ObservedApp(REF.app, None, len(ids), {}, 0, status, "", workers)


def find_traces(owner: Any, names: Collection[Any]) -> list[str]:
    """Return the attributes of an object that are collections with one of ``names``, also inside keys."""

    def has(value: Any) -> bool:
        return value in names or (isinstance(value, tuple) and any(map(has, value)))

    collections = {
        name: value for name, value in vars(owner).items() if isinstance(value, Mapping | set | frozenset)
    }
    return [name for name, value in collections.items() if any(map(has, value))]


NAMES = (REF, REF.app, ("m", "1.0"))


# Each returns an object that has known a version, after the version was removed.


def used_health() -> HealthTracker:
    health = HealthTracker()
    states = desired_states(register(Registry(), spec(min_workers=1, max_workers=1)))
    health.set_signature(spec(), signature(4), "text/plain", {"input": {}})
    health.update(states, {}, {})
    health.update(states, {REF.app: app("a")}, {REF.app: app("a")})
    health.update(states, {REF.app: app()}, {REF.app: app("a")})
    health.record_start_failure(spec(), StartFailed("m", "1.0", "no file"))
    health.start_delay(REF)
    health.reset_backoff(REF)
    health.update(states, {REF.app: app(status="DEPLOY_FAILED")}, {})
    assert set(find_traces(health, NAMES)) > {"statuses", "_declarations", "_start_seconds", "_crashes"}
    health.remove(REF)
    return health


def used_pool_tracker() -> PoolTracker:
    tracker = PoolTracker()
    pooled = spec(pool="p")
    hosts = tuple(ReplicaInfo(host, 7, 0.0, True) for host in ("h1", "h2"))
    tracker.set_observed({".pool--p": ObservedApp(".pool--p", None, 2, {}, 0, "RUNNING", "", hosts)})
    tracker.put("h1", HostReport("p", {REF: LoadedVersion(pooled.revision, 5, 0.9)}))
    tracker.desired_states([pooled])
    assert tracker.balance([pooled]) == [pooled]
    tracker.observe_all([pooled])
    assert set(find_traces(tracker, NAMES)) == {"_extra", "_states", "_loaded", "_changed"}
    tracker.put("h1", HostReport("p", {}))
    tracker.desired_states([])
    tracker.observe_all([])
    tracker.take_changed()
    return tracker


class HostedVersion:
    """A loaded version without a handler."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.revision, self.memory, self.last_used = spec, spec.revision, MemoryUse(), 0.0
        self.ongoing, self.busy_seconds = 0, 0.0

    async def close(self) -> None: ...


def build_cache(find_spec: Callable[[], ModelSpec]) -> VersionCache[HostedVersion]:
    async def load(spec: ModelSpec) -> HostedVersion:
        if spec.digest == "broken":
            raise StartFailed(spec.name, spec.version, "no file")
        return HostedVersion(spec)

    async def find(ref: ModelRef, revision: str) -> ModelSpec:
        return find_spec()

    return VersionCache(load, find, CacheLimits("p", MemoryUse(100)), measure=MemoryUse)


def used_version_cache() -> VersionCache[HostedVersion]:
    async def use() -> VersionCache[HostedVersion]:
        current = spec(pool="p")
        cache = build_cache(lambda: current)
        await cache.get(REF)
        cache.pinned = frozenset({REF})
        current = spec("broken", pool="p")
        with pytest.raises(StartFailed):
            await cache.get(REF, current.revision)
        assert find_traces(cache, NAMES)
        cache.pinned = frozenset()
        cache.retain({})
        await cache.close()
        return cache

    return asyncio.run(use())


def used_leak_detector() -> LeakDetector:
    detector = LeakDetector(MemoryUse(100), MemoryUse(0))
    detector.sample(MemoryUse(10), MemoryUse(0), {REF: 1.0})
    assert set(find_traces(detector, NAMES)) == {"_busy", "_growth"}
    detector.restart(MemoryUse(0), ())
    return detector


def used_data_plane() -> DataPlane:
    table = RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "loading", 0)})})
    plane = DataPlane(
        RoutingTableReader(table), Meters(), lambda ref, row: None, limits=DataPlaneLimits(0.01)
    )
    with pytest.raises(ModelLoading):
        asyncio.run(plane.infer(InferenceRequest("m")))
    return plane


@pytest.mark.parametrize(
    "use", [used_health, used_pool_tracker, used_version_cache, used_leak_detector, used_data_plane]
)
def test_no_collection_has_a_removed_version(use: Callable[[], Any]) -> None:
    assert find_traces(use(), NAMES) == []


def test_another_archive_of_the_name_is_not_checked_against_the_earlier_signature(tmp_path: Path) -> None:
    health, builder, woken = HealthTracker(), TableBuilder(), list[ModelRef]()
    settings = Settings(home=str(tmp_path))
    reconciler = Reconciler(lambda action: None, lambda desired: {}, lambda spec, before: None)
    loop = ReconcileLoop(reconciler, health, ArchiveIngestor(settings), Meters(), settings)

    def publish(registered: ModelSpec) -> VersionRoute:
        registry = register(Registry(), registered)
        health.update(desired_states(registry), {REF.app: app()}, {})
        table = builder.build(registry, health.statuses, {}, 1, True)
        reader.update(table)
        return table.models["m"].versions["1.0"]

    async def wake() -> None:
        tensor = Tensor("x", "FP32", (1, 8), bytes(32))
        part = InputPart(tensor.name, bytes(tensor.data), tensor.content_type)
        request = InferenceRequest("m", inputs=(part,), kind="tensors")
        with pytest.raises(ModelLoading):
            await plane.infer(request)

    reader = RoutingTableReader()
    limits = DataPlaneLimits(loading_timeout=0.01)
    plane = DataPlane(
        reader, Meters(), lambda ref, row: None, wake=lambda ref, row: woken.append(ref), limits=limits
    )
    first = spec(max_workers=1, startup_timeout=0)
    publish(first)
    health.set_signature(first, signature(4))
    assert publish(first).signature == signature(4)
    assert publish(first.with_(digest="replaced")).signature is None  # as start-up replaces an archive
    loop.on_change(register(Registry(), first), Registry())
    assert publish(first.with_(handler="other.py")).signature is None
    asyncio.run(wake())
    assert woken == [REF]


def test_a_host_with_the_earlier_revision_is_no_replica_of_the_next() -> None:
    changes: list[int] = []
    tracker = PoolTracker(lambda: changes.append(1))
    first, second = spec(pool="p"), spec("second", pool="p")
    host = ReplicaInfo("h1", 7, 0.0, True)
    tracker.set_observed({".pool--p": ObservedApp(".pool--p", None, 1, {}, 0, "RUNNING", "", (host,))})
    tracker.put("h1", HostReport("p", {REF: LoadedVersion(first.revision, 5, 0.0)}))
    assert (tracker.observe(first).running, tracker.observe(second).running) == (1, 0)
    tracker.take_changed()
    tracker.put("h1", HostReport("p", {REF: LoadedVersion(second.revision, 5, 0.0)}))
    assert (tracker.observe(second).running, tracker.take_changed(), len(changes)) == (1, {REF}, 2)


def test_the_failed_load_of_an_earlier_revision_is_not_returned() -> None:
    async def test() -> None:
        current = spec("broken", pool="p")
        cache = build_cache(lambda: current)
        with pytest.raises(StartFailed):
            await cache.get(REF, current.revision)
        current = spec(pool="p")
        cache.retain({REF: current.revision})
        assert (await cache.get(REF)).revision == current.revision

    asyncio.run(test())


def test_a_later_key_of_the_name_has_limits_of_its_own() -> None:
    shares, limiter = KeyShares(), KeyLimiter()
    limits = KeyLimits(requests_per_day=1, concurrency=1)
    for id in ("a@1", "a@2"):
        grant = KeyGrant(ROLES["infer"], name="a", limits=limits, id=id)
        assert limiter.admit(grant) is not None
        with pytest.raises(RateLimited, match="'a'"):
            limiter.admit(grant)
        limiter.apply_shares(granted := shares.exchange("gateway", limiter.collect_demand()))
        assert granted[id].day_requests == 1


class Offers:
    """Management as hosts reach it: a list of the offered digests."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.offers = self

    def remote(self, ref: ModelRef, digest: str, *others: Any) -> None:
        self.digests.append(digest)


class Declaring:
    """A runner with what its handler declares."""

    signature, input_type, schemas = None, "", None


def test_a_host_reports_the_declaration_of_a_version_that_is_registered_again() -> None:
    management = Offers()
    reporter = HostReporter("p", "h1", build_cache(spec), management)
    for revisions in ({REF: spec().revision}, {}):
        reporter.loaded(spec(), Declaring(), 5)  # type: ignore[arg-type]
        reporter.loaded(spec(), Declaring(), 5)  # type: ignore[arg-type]
        reporter.retain(revisions)
    assert management.digests == ["first"]
    reporter.loaded(spec(), Declaring(), 5)  # type: ignore[arg-type]
    assert management.digests == ["first", "first"]


def test_a_suspect_of_a_pool_is_an_archive(tmp_path: Path) -> None:
    async def test() -> None:
        async def find_readers() -> set[str]:
            return set()

        database = Database(f"sqlite:///{tmp_path / 'registry.db'}")
        health, publisher = HealthTracker(), TablePublisher(MetricsAggregator())
        policy = AcknowledgementPolicy(find_readers, 0.1)
        state = StateStore(database, Registry(), publisher, health, None, policy, lambda *_: None)
        service = PoolService(
            state,
            PoolTracker(),
            health,
            load_in_host=None,  # type: ignore[arg-type]
            wait_for_round=None,  # type: ignore[arg-type]
            on_isolated=lambda spec, reason: None,
            settings=Settings(home=str(tmp_path)),
        )
        death = CrashReport(".pool--p", "", "h1", False, 100.0, "killed", running=(REF.app,))
        for digest, isolated in (("first", ""), ("second", ""), ("second", "killed")):
            if not state.registry.models or find_version(state.registry, "m", "1.0").digest != digest:
                await state.commit(register(Registry(), spec(digest, pool="p")))
            service.on_crash(death)
            await asyncio.gather(*service._tasks)
            assert find_version(state.registry, "m", "1.0").isolated == isolated
        database.close()

    asyncio.run(test())


def test_an_adapter_that_is_added_again_is_awaited(tmp_path: Path) -> None:
    loads: list[str] = []
    gate = asyncio.Event()

    class Loader:
        async def load_adapter(self, name: str, folder: Any) -> None:
            folder.close()
            await gate.wait()
            loads.append(name)

        async def unload_adapter(self, name: str) -> None: ...

    async def open_folder(adapter: AdapterSpec) -> Path:
        return tmp_path

    async def test() -> None:
        adapters = ReplicaAdapters(Loader(), open_folder)  # type: ignore[arg-type]
        adapters.apply([AdapterSpec("a", "url", "first", "")])
        adapters.apply([])
        await asyncio.wait_for(adapters.wait_until_loaded(), 60)
        adapters.apply([AdapterSpec("a", "url", "second", "")])
        waiting = asyncio.ensure_future(adapters.wait_until_loaded())
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        await asyncio.wait_for(waiting, 60)
        assert loads == ["a"]

    asyncio.run(test())

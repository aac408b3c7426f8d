"""The observed state of pools, and the states that the reconcile loop should reach."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from serve_app.control.pools.service import isolate
from serve_app.control.pools.tracker import PoolTracker, host_states
from serve_app.control.registry import Registry, TableBuilder, desired_states
from serve_app.control.registry_changes import register
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.domain.model import ModelRef, ModelSpec, ReplicaInfo
from serve_app.domain.pool import HostReport, LoadedVersion, PoolSettings, rank_hosts
from serve_app.domain.routing_table import RoutingTable
from serve_app.settings import RuntimeSettings, Settings

A, B = ModelRef("a", "1.0"), ModelRef("b", "1.0")


def spec(name: str, pool: str = "p", **fields: object) -> ModelSpec:
    return ModelSpec(name, "1.0", "", f"digest-{name}", "", pool=pool, **fields)  # type: ignore[arg-type]


def registry(*specs: ModelSpec) -> Registry:
    return reduce(register, specs, Registry())


def pool_app(*hosts: str, ready: bool = True, pool: str = "p") -> dict[str, ObservedApp]:
    workers = tuple(ReplicaInfo(host, 7, 0.0, ready, 300, node="10.0.0.1") for host in hosts)
    app = f".pool--{pool}"
    return {app: ObservedApp(app, None, len(hosts), {}, 0, "RUNNING", "", workers)}


def loaded(busy: float = 0.0, of: ModelSpec | None = None) -> LoadedVersion:
    return LoadedVersion((of or spec("a")).revision, 5, busy)


def build(whole: Registry, tracker: PoolTracker) -> RoutingTable:
    health = HealthTracker()
    health.update(tracker.desired_states(whole), tracker.observe_all(whole), {})
    return TableBuilder().build(whole, health.statuses, {}, 1, True)


def test_pools_are_applications_and_their_versions_are_none() -> None:
    whole = registry(
        spec("a"), spec("b", pool="q", min_workers=1, max_workers=1), spec("c", "", min_workers=1)
    )
    settings = Settings(pools={"q": PoolSettings(memory=1024, hosts=3, num_gpus=0.5)})
    assert set(desired_states(whole)) == {"c--1.0"}
    states = host_states(whole, settings)
    assert {app: (s.min_replicas, s.route) for app, s in states.items()} == {
        ".pool--p": (1, "/predictions"),
        ".pool--q": (3, None),
    }
    assert states[".pool--q"].spec.num_gpus == 0.5
    assert states[".pool--q"].spec.claimed_memory == (1024 + 256) << 20
    main = host_states(whole, Settings(runtime=RuntimeSettings(pool="q")))
    assert main[".pool--q"].route == "/predictions"
    assert host_states(registry(spec("c", "")), settings) == {}


def test_a_version_has_the_hosts_that_have_loaded_it_as_replicas() -> None:
    whole, changes = registry(spec("a"), spec("b")), []
    tracker = PoolTracker(lambda: changes.append(1))
    tracker.set_observed(pool_app("h1", "h2"))
    tracker.put("h1", HostReport("p", {A: loaded()}))
    tracker.put("h1", HostReport("p", {A: loaded(0.3)}))  # the same versions
    assert len(changes) == 1
    table = build(whole, tracker)
    rows = table.models
    assert (rows["a"].versions["1.0"].phase, rows["a"].versions["1.0"].replica_ids) == ("ready", ("h1",))
    assert (rows["b"].versions["1.0"].phase, rows["b"].versions["1.0"].replicas) == ("idle", 0)
    assert not table.accepts_requests(rows["b"].versions["1.0"])
    assert replace(table, pools=tracker.hosts).accepts_requests(rows["b"].versions["1.0"])
    assert tracker.hosts == {"p": ("h1", "h2")}
    [worker] = tracker.observe(spec("a")).workers
    assert (worker.memory, worker.node) == (5, "10.0.0.1")


def test_a_lost_host_has_loaded_nothing() -> None:
    tracker = PoolTracker()
    tracker.set_observed(pool_app("h1"))
    tracker.put("h1", HostReport("p", {A: loaded()}))
    tracker.set_observed(pool_app("h1", ready=False))
    assert tracker.observe(spec("a")).workers == ()
    tracker.set_observed(pool_app("h2"))
    tracker.set_observed(pool_app("h1"))
    assert tracker.loaded_by(spec("a")) == {}


def test_a_busy_version_gets_further_hosts_and_a_quiet_one_loses_them() -> None:
    tracker = PoolTracker()
    hosts = ("h1", "h2", "h3")
    tracker.set_observed(pool_app(*hosts))
    busy, bounded = spec("a"), spec("b", min_workers=1, max_workers=2)

    def put(count: int, share: float) -> None:
        for ref in (A, B):
            for host in rank_hosts(ref, hosts):
                has = host in rank_hosts(ref, hosts)[:count]
                tracker.put(host, HostReport("p", {r: loaded(share, spec(r.name)) for r in (A, B) if has}))

    for host in hosts:
        tracker.put(host, HostReport("p", {A: loaded(0.9), B: loaded(0.9, bounded)}))
    assert tracker.balance([busy, bounded]) == [busy, bounded]
    assert tracker.balance([busy, bounded]) == [busy]  # the other has its maxWorkers
    assert tracker.balance([busy, bounded]) == []
    assert (tracker.wanted_hosts(busy), tracker.wanted_hosts(bounded)) == (3, 2)
    for host in hosts:
        tracker.put(host, HostReport("p", {A: loaded(0.3), B: loaded(0.0, bounded)}))
    assert tracker.balance([busy, bounded]) == []
    assert (tracker.wanted_hosts(busy), tracker.wanted_hosts(bounded)) == (3, 1)
    tracker.desired_states([bounded])  # the other is removed
    assert tracker.wanted_hosts(busy) == 1


def test_an_isolated_version_gets_replicas_of_its_own() -> None:
    whole = registry(spec("a", memory=5), spec("b"))
    after = isolate(whole, spec("a"), "it crashed")
    isolated = after.models["a"].versions["1.0"]
    assert (isolated.is_pooled, isolated.isolated, isolated.min_workers) == (False, "it crashed", 1)
    assert isolated.memory == 0
    assert set(desired_states(after)) == {"a--1.0"}
    assert set(PoolTracker().desired_states(after)) == {"b--1.0"}
    assert build(after, PoolTracker()).models["a"].versions["1.0"].pool == ""
    assert isolate(after, spec("a"), "again") is after
    assert isolate(whole, spec("a").with_(digest="replaced"), "it crashed") is whole
    assert isolate(whole, spec("z"), "it crashed") is whole


def test_a_hosts_share_of_keys_moves_only_with_lost_hosts() -> None:
    hosts = ["h1", "h2", "h3", "h4"]
    refs = [ModelRef(str(number), "1.0") for number in range(200)]
    before = {ref: rank_hosts(ref, hosts)[0] for ref in refs}
    after = {ref: rank_hosts(ref, hosts[:3])[0] for ref in refs}
    assert all(after[ref] == before[ref] for ref in refs if before[ref] != "h4")
    assert len(set(before.values())) == 4


def test_observations_are_the_same_objects_until_they_change() -> None:
    specs = [spec("a", min_workers=2), spec("b", min_workers=2)]
    tracker = PoolTracker()
    tracker.set_observed(pool_app("h1"))
    tracker.put("h1", HostReport("p", {A: loaded()}))
    first = tracker.observe_all(specs)
    tracker.put("h1", HostReport("p", {A: loaded(0.3)}))
    again = tracker.observe_all(specs)
    assert all(again[app] is first[app] for app in first) and len(first) == 2
    tracker.set_observed(pool_app("h1", "h2"))
    more = tracker.observe_all(specs)
    assert [one.pool_hosts for one in (*first.values(), *more.values())] == [1, 1, 2, 2]
    tracker.put("h1", HostReport("p", {}))
    evicted = tracker.observe_all(specs)
    assert [one.running for one in evicted.values()] == [0, 0]
    assert evicted[specs[1].ref.app] is more[specs[1].ref.app]

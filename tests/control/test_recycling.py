"""The replacement of replicas at their limits: one at a time, the new one first, or without a place last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.control import reconciler
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.recycling import (
    PLACEMENT_DELAY_S,
    SETTLING_S,
    SHORTAGE_DELAY_S,
    Replacement,
    ReplicaRecycler,
)
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.domain import recycling
from serve_app.domain.model import EventQuery, ModelRef, ModelSpec, ReplicaInfo
from serve_app.domain.recycling import Recycling
from serve_app.errors import BadRequest
from serve_app.settings import Settings
from serve_app.telemetry.metrics import Meters

SPEC = ModelSpec(
    "m", "1", "m.mar", "d" * 64, "", min_workers=2, max_workers=2, num_cpus=1, startup_timeout=60
)


def running(*replicas: str, starting: int | None = None, spec: ModelSpec = SPEC) -> ObservedApp:
    """Return an application with these ready replicas, and one that starts in the process ``starting``."""
    workers = [ReplicaInfo(replica, 7, 0.0, True) for replica in replicas]
    if starting is not None:
        workers.append(ReplicaInfo("new", starting, 0.0, False))
    return ObservedApp(spec.ref.app, None, spec.min_workers, {}, 0, "RUNNING", "", tuple(workers))


class Cluster:
    """A recycler with what the test observes of the cluster."""

    def __init__(self, *specs: ModelSpec) -> None:
        self.now = 1000.0
        self.events = EventLog()
        self.meters = Meters()
        self.problems: list[str] = []  # of limits
        self.recycler = ReplicaRecycler(
            lambda app, replica, drain_first: True,
            self.events,
            self.meters,
            lambda ref, problem: self.problems.append(problem),
            lambda: self.now,
            lambda: self.now,
        )
        self.desired = {spec.ref.app: DesiredState(spec, None) for spec in specs or (SPEC,)}

    def request(self, replica: str, ref: ModelRef = SPEC.ref, age: float = SETTLING_S) -> None:
        self.recycler.request(ref, replica, "memory", "it has 300 MiB", age)

    def plan(self, *apps: ObservedApp, without_place: tuple[ModelRef, ...] = ()) -> list[Replacement]:
        return self.recycler.plan(self.desired, {app.app: app for app in apps}, without_place)

    def stages(self) -> list[tuple[str, dict[str, Any]]]:
        events = self.events.list_events(EventQuery(), ("*",))
        return [(event.stage, dict(event.details)) for event in reversed(events)]


def test_replicas_are_replaced_one_after_the_other_with_their_reasons() -> None:
    cluster = Cluster()
    cluster.request("a")
    cluster.request("b")
    assert cluster.plan(running("a", "b")) == [Replacement(SPEC.ref, "a", False)]
    cluster.request("a")  # repeated, as its replica still runs
    for observed in (running("a", "b", starting=0), running("a", "b", "new"), running("b", "new")):
        began = cluster.plan(observed)
        cluster.request("b")
    assert began == [Replacement(SPEC.ref, "b", False)]
    assert cluster.stages() == [
        ("accepted", {"workers": 2}),
        ("recycling", {"replica": "a", "reason": "memory", "message": "it has 300 MiB"}),
        ("ready", {"workers": 2}),
        ("accepted", {"workers": 2}),
        ("recycling", {"replica": "b", "reason": "memory", "message": "it has 300 MiB"}),
    ]
    labels = (("model", "m"), ("reason", "memory"), ("version", "1"))
    assert cluster.meters.samples() == [("torchrelay_replicas_recycled_total", labels, 1.0)]


def test_a_version_that_is_not_steady_waits() -> None:
    cluster = Cluster()
    cluster.request("a")
    assert cluster.plan(running("a")) == []  # one of two
    assert cluster.plan(running("a", "b", starting=9)) == []
    assert cluster.plan(replace(running("a", "b"), status="DEPLOYING")) == []
    assert cluster.plan() == []
    assert not cluster.recycler.is_active


def test_without_a_place_the_old_replica_is_drained_once() -> None:
    cluster = Cluster()
    cluster.request("a")
    cluster.plan(running("a", "b"))
    waiting = running("a", "b", starting=0)
    assert cluster.recycler.find_waiting({"m--1": waiting}) == []  # it may just be starting
    cluster.now += PLACEMENT_DELAY_S
    assert cluster.recycler.find_waiting({"m--1": running("a", "b", starting=9)}) == []
    assert cluster.recycler.find_waiting({"m--1": waiting}) == [SPEC.ref]
    assert cluster.plan(waiting, without_place=(SPEC.ref,)) == [Replacement(SPEC.ref, "a", True)]
    assert cluster.recycler.find_waiting({"m--1": waiting}) == []
    assert cluster.plan(waiting, without_place=(SPEC.ref,)) == []
    assert cluster.plan(running("b", starting=9)) == [] and cluster.recycler.is_active
    assert cluster.plan(running("b", "new")) == [] and not cluster.recycler.is_active
    assert ("recycling", {"replica": "a", "drains_first": True}) in cluster.stages()


def test_a_version_beyond_the_cluster_drains_the_old_replica() -> None:
    cluster = Cluster(SPEC.with_(min_workers=3))
    short = replace(running("a", "b", starting=0), replicas=3, status="DEPLOYING")
    short = replace(short, workers=(*short.workers[:2], replace(short.workers[2], started_at=cluster.now)))
    cluster.request("a")
    assert cluster.plan(short) == []  # it may just be starting
    cluster.now += SHORTAGE_DELAY_S
    cluster.request("a")
    assert cluster.plan(short) == [Replacement(SPEC.ref, "a", True)]
    assert cluster.recycler.find_waiting({"m--1": short}) == []
    assert cluster.plan(replace(running("b", starting=0), replicas=3)) == [] and cluster.recycler.is_active
    assert cluster.plan(replace(running("b", "new"), replicas=3)) == [] and not cluster.recycler.is_active
    assert cluster.stages()[-1] == ("ready", {"workers": 2})


def test_a_new_replica_that_does_not_start_ends_the_attempt() -> None:
    cluster = Cluster()
    cluster.request("a")
    cluster.plan(running("a", "b"))
    cluster.now += 60 + 31
    assert cluster.plan(running("a", "b", starting=9)) == []
    assert not cluster.recycler.is_active
    stage, details = cluster.stages()[-1]
    assert (stage, details["reason"]) == ("failed", "start_failed")
    assert cluster.meters.samples() == []
    cluster.request("a")  # its replica repeats the request
    assert cluster.plan(running("a", "b")) == [Replacement(SPEC.ref, "a", False)]


def test_a_removed_version_ends_its_replacement() -> None:
    cluster = Cluster()
    cluster.request("a")
    cluster.plan(running("a", "b"))
    cluster.desired = {}
    assert cluster.plan(running("a", "b")) == []
    assert cluster.stages()[-1] == ("failed", {"reason": "removed", "message": "m 1 was removed."})


def test_few_versions_replace_a_replica_at_once() -> None:
    specs = [SPEC.with_(name=f"m{n}", min_workers=1) for n in range(6)]
    cluster = Cluster(*specs)
    for spec in specs:
        cluster.request(f"{spec.name}#0", spec.ref)
    observed = [running(f"{spec.name}#0", spec=spec) for spec in specs]
    assert [command.replica for command in cluster.plan(*observed)] == [f"m{n}#0" for n in range(4)]
    assert cluster.plan(*observed) == []


def test_a_request_that_is_not_repeated_expires() -> None:
    cluster = Cluster()
    cluster.request("a")
    cluster.plan(running("a"))
    cluster.now += 121
    assert cluster.plan(running("a", "b")) == []


def replace_at(cluster: Cluster, replica: str, successor: str, *ages: float) -> bool:
    """Request the replacement of the only replica at these ages; return whether the last replaces it."""
    for age in ages:
        cluster.request(replica, age=age)
        began = cluster.plan(running(replica, spec=cluster.desired["m--1"].spec))
        assert bool(began) is (age == ages[-1]), (age, began)
    cluster.plan(running(successor, spec=cluster.desired["m--1"].spec))
    return not cluster.recycler.is_active


def test_replicas_that_reach_their_memory_at_once_live_longer_each_time() -> None:
    cluster = Cluster(SPEC.with_(min_workers=1))
    assert replace_at(cluster, "a", "b", 20)
    assert replace_at(cluster, "b", "c", 20, 299, 300)
    assert replace_at(cluster, "c", "d", 20, 599, 600)
    assert len(cluster.problems) == 2
    assert cluster.problems[-1] == (
        "recycling.max_memory_mib is too small; raise it. 20 s after the start of a replica it has 300 MiB. "
        "It is replaced at an age of 600 s."
    )
    for replica, successor, age in (("d", "e", 1200), ("e", "f", 2400), ("f", "g", 3600), ("g", "h", 3600)):
        assert replace_at(cluster, replica, successor, 20, age - 1, age)


def test_a_replica_that_reaches_its_memory_late_ends_the_pauses() -> None:
    cluster = Cluster(SPEC.with_(min_workers=1))
    assert replace_at(cluster, "a", "b", 20)
    assert replace_at(cluster, "b", "c", 301)
    assert replace_at(cluster, "c", "d", 20)


def test_age_and_requests_replace_a_replica_of_any_age() -> None:
    cluster = Cluster(SPEC.with_(min_workers=1))
    assert replace_at(cluster, "a", "b", 20)
    cluster.recycler.request(SPEC.ref, "b", "requests", "it has run 100 rows", 20)
    assert cluster.plan(running("b", spec=SPEC.with_(min_workers=1)))


def test_the_loop_drains_where_no_node_has_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster()
    commands: list[tuple[str, str, bool]] = []

    def record(app: str, replica: str, drain_first: bool) -> bool:
        commands.append((app, replica, drain_first))
        if len(commands) == 1:
            raise ConnectionError("the controller is being replaced")
        return True

    cluster.recycler.replace = record
    settings = Settings(home=str(tmp_path))
    idle = reconciler.Reconciler(lambda action: None, lambda desired: {}, lambda spec, before: None)
    monkeypatch.setattr(idle, "get_free_resources", lambda: {"10.0.0.1": {"CPU": 0.5}})
    loop = ReconcileLoop(
        idle, HealthTracker(), ArchiveIngestor(settings), cluster.meters, settings, None, cluster.recycler
    )

    async def run() -> None:
        cluster.request("a")
        assert await loop._recycle(cluster.desired, {"m--1": running("a", "b")})
        cluster.now += PLACEMENT_DELAY_S
        assert await loop._recycle(cluster.desired, {"m--1": running("a", "b", starting=0)})

    asyncio.run(run())
    assert commands == [("m--1", "a", False), ("m--1", "a", True)]


def test_a_versions_limits_replace_the_servers_key_by_key() -> None:
    default = Recycling(max_age_s=60, max_requests=5)
    assert SPEC.find_recycling(default) == default
    spec = SPEC.with_(config={"recycling": {"max_requests": 0, "max_memory_mib": 9}})
    assert spec.find_recycling(default) == Recycling(60, 0, 9)


def test_a_registered_version_with_limits_below_the_minimum_has_the_minimum() -> None:
    spec = SPEC.with_(config={"recycling": {"max_age_s": 5, "max_requests": 7}})
    assert spec.find_recycling(Recycling()) == Recycling(recycling.MIN_AGE_S, recycling.MIN_REQUESTS)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        (5, "recycling is a mapping"),
        ({"max_age_s": -1}, "max_age_s: Input should be greater than or equal to 0"),
        ({"max_age_s": float("inf")}, "max_age_s: Input should be a finite number"),
        ({"max_requests": 1.5}, "max_requests: Input should be a valid integer"),
        ({"max_age_s": 59}, "max_age_s: a limit is at least 60, .*; 0: no limit .got 59"),
        ({"max_requests": 99}, "max_requests: a limit is at least 100"),
        ({"max_age": 1}, "unknown key 'max_age'; did you mean 'max_age_s'"),
    ],
)
def test_invalid_limits_are_refused(document: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        recycling.read(document)

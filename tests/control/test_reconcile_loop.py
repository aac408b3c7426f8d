"""The error of a version that was not placed in time, and the end of the reconcile loop."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from serve_app.control import reconciler
from serve_app.control.archive_ingestion import ArchiveIngestor
from serve_app.control.reconcile_loop import ReconcileLoop
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.domain.model import ModelSpec, ReplicaInfo
from serve_app.errors import InsufficientResources, StartFailed
from serve_app.settings import Settings
from serve_app.telemetry.crash_reports import CrashReport
from serve_app.telemetry.metrics import Meters

SPEC = ModelSpec(
    "m",
    "1.0",
    "m.mar",
    "d" * 64,
    "file:///m.mar",
    "",
    "python",
    1,
    1,
    num_cpus=2,
    num_gpus=1,
    tensor_parallel=2,
)
WAITS = "Deploying"


def idle_reconciler() -> reconciler.Reconciler:
    """Return a reconciler that deploys nothing."""
    return reconciler.Reconciler(lambda action: None, lambda desired: {}, lambda spec, before: None)


@pytest.mark.parametrize(
    ("free", "why"),
    [
        ({"CPU": 1.5, "GPU": 8.0}, r"a replica of 2 ranks \(4 CPU required, 1.5 free\). Free resources"),
        ({"CPU": 4.0}, r"a replica of 2 ranks \(2 GPU required, 0 free\)"),
        ({"CPU": 3.0, "GPU": 1.0}, r"\(4 CPU required, 3 free; 2 GPU required, 1 free\)"),
        ({"CPU": 4.0, "GPU": 2.0}, f"no replica runs: {WAITS}"),
    ],
)
def test_more_ranks_than_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, float], why: str
) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "f" * 56, "NodeManagerAddress": "10.0.0.1"}])
    monkeypatch.setattr(reconciler, "available_resources_per_node", lambda: {"f" * 56: free})
    settings = Settings(home=str(tmp_path))
    reconcile_loop = ReconcileLoop(
        idle_reconciler(), HealthTracker(), ArchiveIngestor(settings), Meters(), settings
    )
    reconcile_loop._observed = {
        SPEC.ref.app: ObservedApp(SPEC.ref.app, None, 1, {}, 0, "DEPLOYING", WAITS, ())
    }

    async def meanwhile() -> None:
        raise AssertionError("its time is over")

    async def wait() -> None:
        with pytest.raises(StartFailed) as failed:
            await reconcile_loop.wait_until_running(SPEC, -60, meanwhile)
        assert failed.match("Failed to start workers for model m version: 1.0")
        assert re.search(why, failed.value.detail), failed.value.detail

    asyncio.run(wait())


def test_rounds_end_at_once_when_they_are_kicked_in_the_same_moment(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path))

    async def run() -> None:
        reconcile_loop = ReconcileLoop(
            idle_reconciler(), HealthTracker(), ArchiveIngestor(settings), Meters(), settings
        )
        waits = asyncio.Event()

        async def round_() -> bool:
            asyncio.get_running_loop().call_soon(waits.set)
            return False

        reconcile_loop._reconcile = round_  # type: ignore[method-assign]
        task = asyncio.ensure_future(reconcile_loop.run())
        await waits.wait()
        await asyncio.sleep(0)
        reconcile_loop.trigger()
        await asyncio.sleep(0)  # the wait for the kick has ended, and who waited has not heard of it
        task.cancel()
        await asyncio.wait({task}, timeout=60)
        assert task.cancelled()

    asyncio.run(run())


def test_what_could_not_be_deployed_is_in_the_status_of_its_version_alone(tmp_path: Path) -> None:
    settings = Settings(home=str(tmp_path))
    health = HealthTracker()
    reconcile_loop = ReconcileLoop(idle_reconciler(), health, ArchiveIngestor(settings), Meters(), settings)
    specs = [SPEC, SPEC.with_(name="short", min_workers=50, max_workers=50), SPEC.with_(name="good")]
    desired = {spec.ref.app: DesiredState(spec, None) for spec in specs}
    result = reconciler.ActResult(3, {"m--1.0": "ValueError: no"}, {"short--1.0": "2 fit"})
    reconcile_loop._record_problems(desired, result)
    health.update(desired, {}, {})
    errors = [health.statuses[spec.ref].last_error for spec in specs]
    assert errors == ["ValueError: no", "", ""]
    assert [health.statuses[spec.ref].waiting_for for spec in specs] == ["", "2 fit", ""]
    assert [health.get_failure(spec.ref) is None for spec in specs] == [False, True, True]


class _WithoutGpus(reconciler.Reconciler):
    """A reconciler of a cluster whose nodes with GPUs are away."""

    def get_total_resources(self) -> dict[str, dict[str, float]]:
        return {"10.0.0.1": {"CPU": 64.0, "memory": 2.0**38}}


@pytest.mark.parametrize(
    ("workers", "accepted", "refused"), [((1, 1), 2, False), ((1, 1), 0, True), ((0, 1), 0, True)]
)
def test_fewer_workers_are_accepted_while_nodes_are_away(
    tmp_path: Path, workers: tuple[int, int], accepted: int, refused: bool
) -> None:
    settings = Settings(home=str(tmp_path))
    cluster = _WithoutGpus(lambda action: None, lambda desired: {}, lambda spec, before: None)
    loop = ReconcileLoop(cluster, HealthTracker(), ArchiveIngestor(settings), Meters(), settings)
    spec = SPEC.with_(min_workers=workers[0], max_workers=workers[1])
    with pytest.raises(InsufficientResources) if refused else contextlib.nullcontext():
        asyncio.run(loop.check_placement(spec, accepted))


def test_a_version_without_a_place_is_logged_once_while_resources_come_and_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "serve_app")
    settings, health = Settings(home=str(tmp_path)), HealthTracker()
    loop = ReconcileLoop(idle_reconciler(), health, ArchiveIngestor(settings), Meters(), settings)
    loop._unplaced_since = {SPEC.ref: 0.0}
    for reasons in ({SPEC.ref: "2 GPU required"}, {}, {SPEC.ref: "1 GPU required"}):
        health.waiting = reasons
        loop._report_waiting()
    assert caplog.messages == ["m 1.0 has no place for all its replicas: 2 GPU required"]
    health.waiting, loop._unplaced_since = {}, {}
    loop._report_waiting()
    assert caplog.messages[1:] == ["m 1.0 waits for no place any more"]


def test_a_replica_that_serve_replaces_without_a_crash_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, meters, now = Settings(home=str(tmp_path)), Meters(), [0.0]
    health = HealthTracker(lambda: now[0])
    reconcile_loop = ReconcileLoop(idle_reconciler(), health, ArchiveIngestor(settings), meters, settings)
    desired = {SPEC.ref.app: DesiredState(SPEC, None)}
    worker = ReplicaInfo("r1", 17, 0.0, True, node="10.0.0.2")
    ready = {SPEC.ref.app: ObservedApp(SPEC.ref.app, None, 1, {}, 0, "RUNNING", "", (worker,))}
    stopping = {SPEC.ref.app: replace(ready[SPEC.ref.app], workers=(replace(worker, ready=False),))}
    health.update(desired, ready, {})
    health.update(desired, stopping, ready)
    now[0] = 10.0
    reconcile_loop._report_replaced()
    assert "m--1.0: Ray Serve has replaced the replica r1 (pid 17 on 10.0.0.2)" in caplog.text
    labels = (("model", "m"), ("reason", "replaced"), ("version", "1.0"))
    assert meters.samples() == [("torchrelay_replica_failures_total", labels, 1.0)]


def test_a_crash_of_a_desired_version_is_counted(tmp_path: Path) -> None:
    settings, meters = Settings(home=str(tmp_path)), Meters()
    reconcile_loop = ReconcileLoop(
        idle_reconciler(), HealthTracker(), ArchiveIngestor(settings), meters, settings
    )
    crash = CrashReport(SPEC.ref.app, SPEC.digest, "r1", False, 1.0, "killed by signal 9")
    older = replace(crash, digest="e" * 64)
    reconcile_loop.record_crashes([crash, older], {SPEC.ref.app: DesiredState(SPEC, None)})
    labels = (("model", "m"), ("reason", "crashed"), ("version", "1.0"))
    assert meters.samples() == [("torchrelay_replica_failures_total", labels, 1.0)]

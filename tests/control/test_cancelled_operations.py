"""Every operation of the control plane, cancelled at each of its awaits: memory and database stay equal.

grpc.aio cancels an operation when its client's deadline passes or its connection ends.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serve_app.control import registry_changes
from serve_app.control.api import ControlPlane
from serve_app.control.drift.store import DriftStore, to_document
from serve_app.control.experiments.registry_changes import start as start_experiment
from serve_app.control.experiments.registry_changes import stop as stop_experiment
from serve_app.control.operations import OPERATIONS as NAMES
from serve_app.control.persistence.schema import EXPERIMENT_STATS
from serve_app.control.registry import Registry
from serve_app.control.rollouts.registry_changes import start as start_rollout
from serve_app.control.shadow.store import ShadowStore
from serve_app.control.workflows.registry_changes import register as register_workflow
from serve_app.dataplane.capture.recorder import CaptureReport
from serve_app.dataplane.experiment_collector import ArmStats, ExperimentReport
from serve_app.dataplane.shadow.mirror import ShadowPair
from serve_app.dataplane.shadow.stats import ShadowStats
from serve_app.domain import traffic_policy, workflow_graph
from serve_app.domain.access_keys import KeyRequest, StoredKey
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.async_prediction import StoredRequest
from serve_app.domain.audit import AuditQuery
from serve_app.domain.autoscaling import Autoscaling
from serve_app.domain.drift_window import FeatureWindow
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.model import EventQuery, ModelRef, ModelSpec, Registration
from serve_app.domain.rollout import RolloutPlan
from serve_app.domain.traffic_policy import ShadowPolicy
from tests.support.archives import ECHO, make_archive
from tests.support.cancellation import FinishedExecutor, QueuedExecutor, cancel_at
from tests.support.control_services import OPERATOR, ControlServices, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EVERY = ("*",)
SHADOW = ShadowPolicy("2.0")
CLICKS = (ExperimentMetric("clicks", "reward"),)


def spec(name: str, version: str = "1.0", **options: Any) -> ModelSpec:
    digest = (name + version).encode().hex().ljust(64, "0")
    return ModelSpec(name, version, f"{name}.mar", digest, "file:///a", **options)


def prepared_registry() -> Registry:
    """Return a registry with a model of two versions for each operation that needs one."""
    registry = Registry()
    for name in ("changed", "traffic", "shadowed", "free", "running", "stopped", "rolling", "other"):
        for version in ("1.0", "2.0"):
            workers = 0 if name == "other" else 1
            made = spec(name, version, min_workers=workers, max_workers=workers)
            registry = registry_changes.register(registry, made)
    adapted = spec(
        "adapted", min_workers=1, max_workers=1, adapters=(AdapterSpec("known", "a", "e" * 64, "b"),)
    )
    registry = registry_changes.register(registry, adapted)
    policy = Autoscaling(policy="external")
    external = spec("external", min_workers=1, max_workers=3, autoscaling=policy)
    registry = registry_changes.register(registry, external)
    drifting = spec("drifting", config={"capture": {"reference": 10, "window": 10}})
    registry = registry_changes.register(registry, drifting)
    graph = workflow_graph.read({"name": "reading", "steps": {"a": {"model": "other"}}})
    registry = register_workflow(registry, spec("reading", graph=graph))
    registry = registry_changes.set_policy(registry, "shadowed", traffic_policy.TrafficPolicy(shadow=SHADOW))
    arms = {"a": Arm("1.0", 5000), "b": Arm("2.0", 5000)}
    for name in ("running", "stopped"):
        experiment = Experiment(name, arms, CLICKS, "a", id=name, model=name, started_at=1.0)
        registry = start_experiment(registry, experiment)
    registry = stop_experiment(registry, "stopped", 2.0)
    return start_rollout(registry, "rolling", RolloutPlan("2.0"), "r1", time.time())


def stored_request(body: bytes, **options: Any) -> StoredRequest:
    return StoredRequest("other", None, "POST", "/predictions/other", "", (), body, "id", **options)


async def prepare(services: ControlServices) -> None:
    """Store what the operations need."""
    await services.keys.create_key(KeyRequest("known"), OPERATOR)
    window = FeatureWindow(10)
    for value in range(20):
        window.add([("input.x", float(value))])
    for number in (1, 2):  # the reference, then the current window
        report = CaptureReport(ModelRef("drifting", "1.0"), spec("drifting").digest, 20, {}, "", 0.0, window)
        services.drift.put("replica", number, report)
    await services.drift._save()
    services.shadow.put("gateway", 1, [(ShadowPair("shadowed", "1.0", SHADOW), ShadowStats(1))])
    await services.shadow._store()
    figures = {name: {"a": ArmStats()} for name in ("running", "stopped")}
    report = ExperimentReport(figures, [("running", "request", "a", 1)])
    await services.metric_store.record("gateway", 1, report)
    done = await services.predictions.submit_prediction(stored_request(b"done"))
    await until(lambda: services.predictions._all[done["id"]].has_ended)


@dataclass
class Stored:
    """The state that the next start loads."""

    registry: Registry
    keys: tuple[StoredKey, ...]
    predictions: dict[str, tuple[Any, ...]]
    shadows: set[Any]
    drift: dict[Any, Any]
    metrics: dict[str, Any]


async def load(services: ControlServices) -> Stored:
    database = services.database
    with database.transaction() as connection:
        metrics = {row.trial: row.document for row in connection.execute(sa.select(EXPERIMENT_STATS))}
    return Stored(
        database.load(),
        services.key_store.load(),
        {each.id: _summary(each) for each in await services.predictions._store.load()},
        set(ShadowStore(database).load()),
        {key: to_document(record) for key, record in DriftStore(database).load().items()},
        metrics,
    )


def remembered(services: ControlServices) -> Stored:
    """Return the same of the running services."""
    return Stored(
        services.state.registry,
        tuple(sorted(services.api_keys.stored, key=lambda key: key.document.name)),
        {id: _summary(each) for id, each in services.predictions._all.items()},
        set(services.shadow._records),
        {key: to_document(record) for key, record in services.drift._records.items()},
        dict(services.metric_store._documents),
    )


def _summary(prediction: Any) -> tuple[Any, ...]:
    return prediction.has_ended and prediction.state, prediction.owner, prediction.key, prediction.size


Effect = Callable[[Stored, Any], bool]  # of what is stored after the operation, and of its result


def is_done(stored: Stored, result: Any) -> bool:
    return True


def versions(stored: Stored, name: str) -> Any:
    record = stored.registry.models.get(name)
    return record.versions if record is not None else {}


def is_cancelled(stored: Stored, result: Any) -> bool:
    return stored.predictions[result["id"]][0] == "cancelled" if result else not stored.predictions


# The arguments of each operation, and what is stored once it has returned.
OPERATIONS: dict[str, tuple[Callable[[ControlServices], tuple[Any, ...]], Effect]] = {
    "register": (
        lambda s: (Registration("new-1.0.mar", initial_workers=1),),
        lambda s, r: "new" in s.registry.models,
    ),
    "scale": (
        lambda s: ("free", "1.0", 2, 2, True),
        lambda s, r: versions(s, "free")["1.0"].min_workers == 2,
    ),
    "set_replicas": (lambda s: ("external", "1.0", {"replicas": 2}), lambda s, r: r["replicas"] == 2),
    "set_default": (
        lambda s: ("changed", "2.0"),
        lambda s, r: s.registry.models["changed"].default == "2.0",
    ),
    "unregister": (lambda s: ("changed", "2.0"), lambda s, r: "2.0" not in versions(s, "changed")),
    "describe": (lambda s: ("free", "1.0", False, True), is_done),
    "get_metadata": (lambda s: ("free", "1.0"), is_done),
    "list_versions": (lambda s: ("free",), is_done),
    "list_models": (lambda s: (), is_done),
    "get_version_stats": (lambda s: (), is_done),
    "render": (lambda s: (), is_done),
    "renew_key": (lambda s: ("inference",), is_done),
    "poll_events": (lambda s: ("free", None, None, 1.0), is_done),
    "list_events": (lambda s: (EventQuery(), EVERY), is_done),
    "get_traffic": (lambda s: ("free",), is_done),
    "set_traffic": (
        lambda s: ("traffic", {"labels": {"next": "2.0"}}),
        lambda s, r: "next" in s.registry.models["traffic"].policy.labels,
    ),
    "reset_traffic": (
        lambda s: ("shadowed",),
        lambda s, r: s.registry.models["shadowed"].policy.shadow is None,
    ),
    "get_shadow": (lambda s: ("shadowed",), is_done),
    "get_shadow_history": (lambda s: ("shadowed",), is_done),
    "reset_shadow": (lambda s: ("shadowed",), lambda s, r: not s.shadows),
    "get_drift": (lambda s: ("drifting", "1.0"), is_done),
    "reset_drift": (
        lambda s: ("drifting", "1.0"),
        lambda s, r: s.drift["drifting", "1.0"]["source"] == "reset",
    ),
    "add_adapter": (
        lambda s: ("adapted", "1.0", {"name": "new", "url": "lora"}),
        lambda s, r: len(versions(s, "adapted")["1.0"].adapters) == 2,
    ),
    "list_adapters": (lambda s: ("adapted", "1.0"), is_done),
    "remove_adapter": (
        lambda s: ("adapted", "1.0", "known"),
        lambda s, r: not versions(s, "adapted")["1.0"].adapters,
    ),
    "start_experiment": (
        lambda s: ("free", EXPERIMENT),
        lambda s, r: r["id"] in s.registry.experiments,
    ),
    "list_experiments": (lambda s: (), is_done),
    "get_experiment": (lambda s: ("running", EVERY), is_done),
    "get_experiment_history": (lambda s: ("running", EVERY), is_done),
    "stop_experiment": (
        lambda s: ("running", EVERY),
        lambda s, r: not s.registry.experiments["running"].running,
    ),
    "delete_experiment": (
        lambda s: ("stopped", EVERY),
        lambda s, r: "stopped" not in s.registry.experiments and "stopped" not in s.metrics,
    ),
    "record_rewards": (
        lambda s: ("running", {"request_id": "request", "value": 1}, EVERY),
        lambda s, r: "clicks" in s.metrics["running"],
    ),
    "register_workflow": (
        lambda s: (Registration(""), {"name": "new", "steps": {"a": {"model": "free"}}}),
        lambda s, r: "new" in s.registry.models,
    ),
    "list_workflows": (lambda s: (), is_done),
    "get_workflow": (lambda s: ("reading",), is_done),
    "unregister_workflow": (lambda s: ("reading",), lambda s, r: "reading" not in s.registry.models),
    "start_rollout": (lambda s: ("free", {"to": "2.0"}), lambda s, r: "free" in s.registry.rollouts),
    "get_rollout": (lambda s: ("rolling",), is_done),
    "update_rollout": (
        lambda s: ("rolling", "abort"),
        lambda s, r: not s.registry.rollouts["rolling"].active,
    ),
    "submit_prediction": (
        lambda s: (stored_request(b"new", key="key", owner="known"),),
        lambda s, r: r["id"] in s.predictions,
    ),
    "get_prediction": (lambda s: (prediction_id(s), None), is_done),
    "get_prediction_result": (lambda s: (prediction_id(s), None), is_done),
    "list_predictions": (lambda s: (None, 10, "", ""), is_done),
    "cancel_prediction": (lambda s: (prediction_id(s), None), lambda s, r: not s.predictions),
    "create_key": (
        lambda s: ({"name": "new"}, OPERATOR),
        lambda s, r: [key.document.name for key in s.keys] == ["known", "new"],
    ),
    "list_keys": (lambda s: (OPERATOR,), is_done),
    "rotate_key": (
        lambda s: ("known", {}, OPERATOR),
        lambda s, r: s.keys[0].digest == sha256(r["key"].encode()).digest(),
    ),
    "revoke_key": (lambda s: ("known", OPERATOR), lambda s, r: not s.keys),
    "list_audit_records": (lambda s: (AuditQuery(), EVERY), is_done),
    "record_refusal": (lambda s: ("scale", "free", "forbidden"), is_done),
}
EXPERIMENT = {
    "name": "new",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [{"name": "clicks", "kind": "reward"}],
    "baseline": "a",
}


def prediction_id(services: ControlServices) -> str:
    return next(iter(services.predictions._all))


def run_with(executor: ThreadPoolExecutor, work: Coroutine[Any, Any, Any]) -> Any:
    async def run() -> Any:
        asyncio.get_running_loop().set_default_executor(executor)
        return await work

    return asyncio.run(run())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the home of a server that has ended; tests start copies of it."""
    home = tmp_path_factory.mktemp("prepared")
    (home / "model_store/lora").mkdir(parents=True)
    make_archive(home / "model_store", "new", ECHO)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (home / "model_store/lora" / name).write_text("{}")

    async def start() -> None:
        services = ControlServices(home)
        services.database.save(services.state.registry, prepared_registry())
        await services.close()
        services = ControlServices(home)
        await services.start()
        await prepare(services)
        await services.close()

    run_with(FinishedExecutor(), start())
    return home


@pytest.fixture
def copies(home: Path, tmp_path: Path) -> Iterator[Path]:
    """Return copies of the home."""
    return (Path(shutil.copytree(home, tmp_path / str(number))) for number in itertools.count())


@pytest.fixture(autouse=True)
def fast_rounds(monkeypatch: pytest.MonkeyPatch, fast_commits: None) -> None:
    monkeypatch.setattr("serve_app.control.reconcile_loop._BUSY_PERIOD", 0.002)


def test_every_operation_is_cancelled_here() -> None:
    validated = {name for name, method in vars(ControlPlane).items() if inspect.iscoroutinefunction(method)}
    assert OPERATIONS.keys() == NAMES | validated


@pytest.mark.parametrize(("executor", "repeatedly"), [(FinishedExecutor, False), (QueuedExecutor, True)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_and_database_are_equal_wherever_an_operation_is_cancelled(
    copies: Iterator[Path], name: str, executor: type[ThreadPoolExecutor], repeatedly: bool
) -> None:
    arguments, effect = OPERATIONS[name]

    async def cancel_everywhere() -> None:
        number, services, before = 0, None, None
        while True:
            number += 1
            if services is None:
                services = ControlServices(next(copies))
                await services.start()
                before = await load(services)
            work = services.operate(name, *arguments(services))
            operation = asyncio.ensure_future(cancel_at(number, work, repeatedly))
            await asyncio.wait([operation], timeout=60)
            assert operation.done(), f"{name} does not end after a cancellation at its await {number}"
            await until_equal(services, f"{name}, cancelled at its await {number}")
            after = await load(services)
            if not operation.cancelled():
                assert effect(after, operation.result()), f"{name} returned, and its change is not stored"
                break
            if after != before:  # the next round needs the first state
                await change_default(services)
                await services.close()
                services = None
        await change_default(services)
        await services.close()
        print(f"{name}: {number} rounds")

    run_with(executor(), cancel_everywhere())


async def until_equal(services: ControlServices, what: str) -> None:
    """Wait until the services have in memory what is stored."""
    for _ in range(500):
        stored, memory = await load(services), remembered(services)
        if stored == memory:
            return
        await asyncio.sleep(0.002)
    differing = [
        field.name for field in fields(Stored) if getattr(stored, field.name) != getattr(memory, field.name)
    ]
    pytest.fail(f"{what}: memory and database differ in {', '.join(differing)}")


async def change_default(services: ControlServices) -> None:
    """Change something else: it is acknowledged, and stored."""
    await services.control.api.set_default("other", "2.0")
    assert (await load(services)).registry.models["other"].default == "2.0"
    await services.control.api.set_default("other", "1.0")
    assert (await load(services)).registry == services.state.registry

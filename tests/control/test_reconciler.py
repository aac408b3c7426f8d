"""From what Ray Serve has to what the registry wants: the steps, and their order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ray import serve

from serve_app.control import reconciler
from serve_app.control.placement_check import MARGIN, count_fitting, limit_to_cluster
from serve_app.control.reconciler import DeleteAction, DeployAction, explain_message, plan
from serve_app.control.registry import DesiredState
from serve_app.control.replica_health import ObservedApp
from serve_app.domain.model import ModelSpec, ReplicaInfo
from serve_app.settings import RuntimeSettings


def want(version: str, route: str, workers: int = 1, most: int | None = None) -> DesiredState:
    most = workers if most is None else most
    spec = ModelSpec("m", version, "m.mar", "d" * 64, "file:///m.mar", min_workers=workers, max_workers=most)
    return DesiredState(spec, route)


def have(
    version: str,
    route: str | None,
    running: int = 1,
    replicas: int = 1,
    status: str = "RUNNING",
    between: tuple[int, int] | None = None,
) -> ObservedApp:
    workers = tuple(ReplicaInfo(f"r{i}", 100 + i, 0.0, True) for i in range(running))
    reported = between and {"min_replicas": between[0], "max_replicas": between[1], "policy": {}}
    return ObservedApp(f"m--{version}", route, replicas, {"v": version}, 0, status, "", workers, reported)


def steps(desired: list[DesiredState], seen: list[ObservedApp]) -> list[list[DeployAction | DeleteAction]]:
    wanted, found = {d.spec.ref.app: d for d in desired}, {s.app: s for s in seen}
    return plan(wanted, found, lambda d: {"v": d.spec.version}, scaling)


def scaling(spec: ModelSpec, before: bool) -> dict[str, int] | None:
    bounds = {"min_replicas": spec.min_workers, "max_replicas": spec.max_workers}
    return bounds if before or spec.scaling is not None else None


def test_nothing_differs_nothing_is_done() -> None:
    assert steps([want("1", "/predictions/m")], [have("1", "/predictions/m")]) == []


def test_a_new_version_starts_without_a_route() -> None:
    assert steps([want("1", "/predictions/m")], []) == [[DeployAction(want("1", "/predictions/m"), None)]]


def test_it_gets_its_route_once_a_replica_runs() -> None:
    assert steps([want("1", "/predictions/m")], [have("1", None, running=0)]) == []
    assert steps([want("1", "/predictions/m")], [have("1", None)]) == [
        [DeployAction(want("1", "/predictions/m"), "/predictions/m")]
    ]


def test_a_crash_takes_no_route_away() -> None:
    assert steps([want("1", "/predictions/m")], [have("1", "/predictions/m", running=0)]) == []


def test_a_route_changes_hands_in_two_waves() -> None:
    old, new = want("1", "/predictions/m/1"), want("2", "/predictions/m")
    waves = steps([old, new], [have("1", "/predictions/m"), have("2", "/predictions/m/2")])
    assert waves == [[DeployAction(old, "/predictions/m/1")], [DeployAction(new, "/predictions/m")]]


def test_a_route_whose_holder_is_deleted_is_free_at_once() -> None:
    new = want("2", "/predictions/m")
    waves = steps([new], [have("1", "/predictions/m"), have("2", "/predictions/m/2")])
    assert waves == [[DeleteAction("m--1"), DeployAction(new, "/predictions/m")]]


def test_replica_counts_and_settings_are_compared() -> None:
    three = want("1", "/predictions/m", workers=3)
    assert steps([three], [have("1", "/predictions/m")]) == [[DeployAction(three, "/predictions/m")]]
    wanted, found = {"m--1": want("1", "/predictions/m")}, {"m--1": have("1", "/predictions/m")}
    changed = plan(wanted, found, lambda d: {"v": "other"}, scaling)
    assert changed == [[DeployAction(want("1", "/predictions/m"), "/predictions/m")]]


def test_the_autoscaler_has_as_many_as_it_likes() -> None:
    some = want("1", "/predictions/m", 1, 4)
    for replicas in (1, 3, 4):
        found = have("1", "/predictions/m", running=1, replicas=replicas, between=(1, 4))
        assert steps([some], [found]) == []


def test_autoscaling_begins_changes_and_ends() -> None:
    some = want("1", "/predictions/m", 1, 4)
    between = {"min_replicas": 1, "max_replicas": 4}
    begun = [[DeployAction(some, "/predictions/m", scaling=between)]]
    assert steps([some], [have("1", "/predictions/m")]) == begun
    assert steps([some], [have("1", "/predictions/m", between=(1, 2))]) == begun
    # One that the autoscaler has had stays with it, between two equal bounds.
    two = want("1", "/predictions/m", 2)
    ended = [[DeployAction(two, "/predictions/m", scaling={"min_replicas": 2, "max_replicas": 2})]]
    assert steps([two], [have("1", "/predictions/m", between=(1, 4))]) == ended
    assert steps([two], [have("1", "/predictions/m", 2, 2, between=(2, 2))]) == []


def test_a_version_that_sleeps_has_no_route() -> None:
    sleeper = want("1", "/predictions/m", 0, 2)
    between = {"min_replicas": 0, "max_replicas": 2}
    assert steps([sleeper], [have("1", "/predictions/m", 0, 0, between=(0, 2))]) == [
        [DeployAction(sleeper, None, scaling=between)]
    ]
    assert steps([sleeper], [have("1", None, 0, 0, between=(0, 2))]) == []
    assert steps([sleeper], [have("1", None, 0, 1, between=(0, 2))]) == [], "it is waking up"
    assert steps([sleeper], [have("1", None, 1, 1, between=(0, 2))]) == [
        [DeployAction(sleeper, "/predictions/m", scaling=between)]
    ]


def test_an_application_that_drains_is_left_alone() -> None:
    drains = have("1", "/predictions/m", status="DELETING")
    assert steps([], [drains]) == []
    assert steps([want("1", "/predictions/m")], [drains]) == [], "its name is not free yet"


def test_a_rolling_update_that_serve_gave_up_is_begun_again() -> None:
    stuck = have("1", "/predictions/m", running=1, replicas=1, status="DEPLOY_FAILED")
    assert steps([want("1", "/predictions/m")], [stuck]) == [
        [DeployAction(want("1", "/predictions/m"), "/predictions/m", 1)]
    ]


def test_messages_of_serve_lose_colours_and_gain_an_explanation() -> None:
    assert explain_message("\x1b[36mray::Replica\x1b[39m (pid=1)\n") == "ray::Replica (pid=1)"
    result = explain_message("The deployment failed to start 3 times in a row. Error:\nActorDiedError()")
    assert result.startswith(
        "The replica's process ended while it loaded the model: the handler ended it (os._exit)"
    )
    assert result.endswith("ActorDiedError()")


MACHINE = {"CPU": 2.0, "memory": 16 * 2.0**30}


def limited(state: DesiredState, running: int = 0, machine: dict[str, float] = MACHINE) -> tuple[int, int]:
    app = state.spec.ref.app
    result = limit_to_cluster({app: state}, {app: running}, {"node": machine})[app]
    return result.min_replicas, result.max_replicas


def test_no_more_replicas_are_requested_than_the_cluster_holds_and_a_margin() -> None:
    assert limited(want("1", "/m", 1_000_000)) == (64 + MARGIN, 64 + MARGIN)
    assert limited(want("1", "/m", 2, 1_000_000)) == (2, 64 + MARGIN)
    claiming = want("1", "/m", 50)
    claiming = DesiredState(claiming.spec.with_(num_cpus=0.5), "/m")
    assert limited(claiming) == (4 + MARGIN, 4 + MARGIN)
    assert limited(claiming, running=30) == (30, 30)  # running replicas stay


def test_by_default_memory_alone_limits_the_replicas_of_a_machine() -> None:
    spec = want("1", "/m").spec.with_(num_cpus=RuntimeSettings().num_cpus)
    machine = {"node": {**MACHINE, "memory": 2.0**40}}
    assert count_fitting(spec, machine) == 4096
    assert count_fitting(spec.with_(memory=2**30), machine) == 1024


def test_a_claim_of_memory_changes_only_with_the_code_of_the_replicas() -> None:
    state = want("1", "/m")
    [[first]] = steps([DesiredState(state.spec.with_(archive_bytes=10), "/m")], [])
    assert isinstance(first, DeployAction) and first.memory == 10
    measured = DesiredState(state.spec.with_(archive_bytes=10, memory=300), "/m")
    current = replace(have("1", "/m"), memory=10)
    assert steps([measured], [current]) == []
    [[scaled]] = steps([want("1", "/m", 3)], [current])
    assert isinstance(scaled, DeployAction) and scaled.memory == 10
    [[updated]] = steps([measured], [replace(current, config={"code": "of an earlier release"})])
    assert isinstance(updated, DeployAction) and updated.memory == 300


def test_the_margin_is_requested_also_where_nothing_fits() -> None:
    gpus = DesiredState(want("1", "/m", MARGIN).spec.with_(num_gpus=1.0), "/m")
    assert limited(gpus) == (MARGIN, MARGIN)
    more = DesiredState(want("1", "/m", 20).spec.with_(num_gpus=1.0), "/m")
    assert limited(more) == (MARGIN, MARGIN)
    assert limited(more, machine={**MACHINE, "GPU": 4.0}) == (4 + MARGIN, 4 + MARGIN)


def test_the_ranks_of_a_replica_need_one_machine_each_where_they_are_packed() -> None:
    sharded = ModelSpec(
        "m", "1", "m.mar", "d" * 64, "file:///m.mar", num_gpus=1.0, tensor_parallel=4, min_workers=20
    )
    machines = {name: {**MACHINE, "GPU": 6.0} for name in "ab"}
    assert count_fitting(sharded, machines) == 2
    assert count_fitting(sharded.with_(placement_strategy="SPREAD"), machines) == 3


class SomeFail:
    """The part of Ray Serve's API that the reconciler calls; ``bad`` is refused, alone or with others."""

    RunTarget = serve.RunTarget

    def __init__(self) -> None:
        self.running: list[str] = []

    def run_many(self, targets: list[serve.RunTarget], **options: object) -> None:
        if any(target.name == "bad--1" for target in targets):
            raise ValueError("no such resource")
        self.running += [target.name for target in targets]

    def delete(self, app: str, _blocking: bool) -> None:
        raise AssertionError(app)


def test_an_application_that_cannot_be_deployed_keeps_no_other_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = SomeFail()
    monkeypatch.setattr(reconciler, "serve", fake)
    states = {
        f"{name}--1": DesiredState(want("1", "/m").spec.with_(name=name), None)
        for name in ("bad", "good", "unbuildable", "unreadable")
    }

    def build(action: DeployAction) -> object:
        if action.desired.spec.name == "unbuildable":
            raise ValueError("cannot be built")
        return object()

    def configure(state: DesiredState) -> dict[str, str]:
        if state.spec.name == "unreadable":
            raise ValueError("cannot be read")
        return {}

    result = reconciler.Reconciler(build, configure, scaling).act(states, {})
    assert fake.running == ["good--1"]
    assert result.problems == {
        "bad--1": "ValueError: no such resource",
        "unbuildable--1": "ValueError: cannot be built",
        "unreadable--1": "ValueError: cannot be read",
    }

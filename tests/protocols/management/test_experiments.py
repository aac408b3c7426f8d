"""Experiments through the HTTP API: the real state, database and measurements."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from serve_app.control import registry_changes
from serve_app.dataplane.routing import version_router
from serve_app.domain.request import InferenceResponse
from serve_app.errors import Conflict
from tests.support.experiment_services import BY_CALL, DOCUMENT, ONE_REWARD, Cluster, assert_refused

pytestmark = pytest.mark.integration

TEAM_ARMS = {name: {"version": "1.0", "weight": 5000} for name in ("a", "b")}


def test_experiment_lifecycle(cluster: Cluster) -> None:
    assert {cluster.call(f"r{n}", f"u{n}") for n in range(50)} == {"1.0"}
    id = cluster.begin()
    assert len(id) == 10 and id.isalnum()
    given = {f"u{n}": cluster.call(f"r{n}", f"u{n}") for n in range(200)}
    assert {user: cluster.call("again", user) for user in given} == given, "whoever comes again gets the same"
    assert cluster.call("nobody") == "1.0", "who shows no key gets the baseline, and is not counted"
    cluster.tell()
    result = cluster.known(id)
    assert {key: result[key] for key in ("id", "name", "model", "state", "ended", "key", "baseline")} == {
        "id": id,
        "name": "new ranking",
        "model": "m",
        "state": "running",
        "ended": None,
        "key": {"header": "x-user"},
        "baseline": "a",
    }
    for arm, version in (("a", "1.0"), ("b", "2.0")):
        units = list(given.values()).count(version)
        assert result["arms"][arm] == {
            "version": version,
            "weight": 5000,
            "units": units,
            "calls": 2 * units,
            "failed": {},
        }
    assert not result["sample_ratio"]["alarm"]
    assert list(result["metrics"]) == ["clicks", "basket", "seconds", "failures", "score"]
    for metric in result["metrics"].values():
        assert set(metric["arms"]) == {"a", "b"}
        assert metric["differences"]["b"]["sentence"]
    assert result["metrics"]["clicks"]["differences"]["b"]["verdict"] == "not_yet_known"
    assert result["sentence"]
    assert result["metrics"]["seconds"]["arms"]["a"]["mean"] == pytest.approx(10.0)
    assert result["metrics"]["score"]["arms"]["b"]["mean"] == 0.5

    status, over = cluster.ask("DELETE", f"/experiments/{id}")
    assert (status, over["state"], over["arms"]) == (200, "stopped", result["arms"])
    assert over["started_at"] < over["ended"]
    assert {cluster.call(f"r{n}", f"u{n}") for n in range(50)} == {"1.0"}
    assert cluster.known(id) == over, "what was measured stays, and nothing is counted after the end"
    assert cluster.ask("DELETE", f"/experiments/{id}") == (200, over), "it ends once"


def test_difference_is_detected(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    events = []
    for n in range(4000):
        version = cluster.call(f"r{n}")
        if n % 10 < (2 if version == "1.0" else 4):
            events.append({"request_id": f"r{n}", "value": 1})
    cluster.tell()
    assert cluster.ask("POST", f"/experiments/{id}/events", events) == (
        200,
        {"counted": len(events), "repeated": 0},
    )
    result = cluster.known(id)
    clicks = result["metrics"]["clicks"]
    assert clicks["arms"]["a"]["count"] == clicks["arms"]["b"]["count"] == 2000
    difference = clicks["differences"]["b"]
    assert (difference["verdict"], difference["trusted"]) == ("better", True)
    assert 0 < difference["low"] < difference["difference"] < difference["high"]
    assert difference["sentence"].startswith("b is better than a on clicks: ")
    assert result["sentence"] == "b is better on clicks, compared with a."


def test_rewards_per_exposure_and_per_event(cluster: Cluster) -> None:
    id = cluster.begin()
    users = [f"u{n}" for n in range(100)]
    version = {user: cluster.call(f"r-{user}", user) for user in users}
    cluster.tell()
    buyer = next(user for user in users if version[user] == "2.0")
    post = f"/experiments/{id}/events"
    events = [
        {"key": buyer, "value": value, "metric": "basket", "id": f"order {value}"} for value in (10, 20)
    ]
    assert cluster.ask("POST", post, {"events": events}) == (200, {"counted": 2, "repeated": 0})
    clicks = {"key": buyer, "value": 3, "metric": "clicks"}
    assert cluster.ask("POST", post, clicks) == (200, {"counted": 1, "repeated": 0})
    metrics = cluster.known(id)["metrics"]
    of_b = list(version.values()).count("2.0")
    assert metrics["basket"]["arms"]["b"] | {"low": None, "high": None} == {
        "count": 2,
        "mean": 15.0,
        "low": None,
        "high": None,
    }
    assert metrics["clicks"]["arms"]["b"]["count"] == of_b
    assert metrics["clicks"]["arms"]["b"]["mean"] == pytest.approx(3 / of_b)
    assert metrics["clicks"]["arms"]["a"]["mean"] == 0.0, "nothing posted is zero"
    assert metrics["basket"]["arms"]["a"]["mean"] is None


def test_duplicate_events_count_once(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    for n in range(3):
        cluster.call(f"r{n}")
    cluster.tell()
    post = f"/experiments/{id}/events"
    one = {"request_id": "r0", "value": 1}
    assert cluster.ask("POST", post, one) == (200, {"counted": 1, "repeated": 0})
    assert cluster.ask("POST", post, one) == (200, {"counted": 0, "repeated": 1})
    assert cluster.ask("POST", post, {**one, "value": 7}) == (200, {"counted": 0, "repeated": 1}), (
        "the first holds"
    )
    two = {**one, "id": "second click"}
    assert cluster.ask("POST", post, [one, two, two]) == (200, {"counted": 1, "repeated": 2})
    clicks = cluster.known(id)["metrics"]["clicks"]["arms"]
    assert sum(arm["count"] * arm["mean"] for arm in clicks.values()) == pytest.approx(2)


def test_a_call_of_an_experiment_by_key_is_known_by_its_request_id_too(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    for n in range(4):
        cluster.call(f"r{n}", "ann")
    cluster.tell()
    events = [{"request_id": f"r{n}", "value": 1} for n in range(4)] + [{"key": "ann", "value": 2}]
    assert cluster.ask("POST", f"/experiments/{id}/events", events) == (200, {"counted": 5, "repeated": 0})
    result = cluster.known(id)
    [arm] = [name for name, arm in result["arms"].items() if arm["calls"]]
    assert result["arms"][arm]["units"] == 1, "a caller is counted once, whatever the number of calls"
    assert result["metrics"]["clicks"]["arms"][arm]["mean"] == 6.0


def test_event_may_precede_the_report_of_its_request(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    cluster.call("r0")
    cluster.measured._exposure_timeout = 60.0

    async def late() -> None:
        await asyncio.sleep(0.05)
        await cluster.measured.record("gateway", 1, cluster.experiment_collector.drain())

    task = cluster.loop.create_task(late())
    response = cluster.ask("POST", f"/experiments/{id}/events", {"request_id": "r0", "value": 1})
    assert response == (200, {"counted": 1, "repeated": 0})
    cluster.loop.run_until_complete(task)


def test_unknown_request_is_named_and_nothing_is_counted(cluster: Cluster) -> None:
    id = cluster.begin()
    cluster.call("r0", "ann")
    cluster.tell()
    post = f"/experiments/{id}/events"
    events = [{"key": "ann", "value": 1, "metric": "clicks"}, {"key": "bob", "value": 1, "metric": "clicks"}]
    assert_refused(
        cluster.ask("POST", post, events), 404, "ResourceNotFoundException", id, "'bob'", "X-Request-Id"
    )
    assert cluster.ask("POST", post, events[:1]) == (200, {"counted": 1, "repeated": 0}), (
        "the first was not counted"
    )


def test_invalid_events_are_refused(cluster: Cluster) -> None:
    id = cluster.begin()
    cluster.call("r0", "ann")
    cluster.tell()
    by_call = cluster.begin(
        {**BY_CALL, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a"
    )

    def post(document: Any, id: str = id) -> tuple[int, Any]:
        return cluster.ask("POST", f"/experiments/{id}/events", document)

    wrong = (400, "BadRequestException")
    event = {"key": "ann", "value": 1}
    assert_refused(post(event), *wrong, "cannot tell which reward", "'clicks', 'basket'")
    assert_refused(post({**event, "metric": "seconds"}), *wrong, "no reward 'seconds'", "'clicks', 'basket'")
    assert_refused(post(b'{"key": "ann", "value": NaN}'), *wrong, "not JSON")
    assert_refused(post(b'{"key": "ann", "value": 1e999}'), *wrong)
    assert_refused(post(b""), *wrong, "empty")
    assert_refused(post({"value": 1}), *wrong, "either a request_id or a key")
    assert_refused(post(event, by_call), *wrong, "each request by itself", "request_id")
    assert_refused(post(event, "none"), 404, "ResourceNotFoundException", "Experiment not found: none")
    assert cluster.known(id)["metrics"]["clicks"]["arms"]["a"]["mean"] in (0.0, None), (
        "nothing of it was counted"
    )


def test_an_experiment_without_rewards_takes_no_events(cluster: Cluster) -> None:
    id = cluster.begin({**DOCUMENT, "metrics": [{"name": "seconds"}]})
    response = cluster.ask("POST", f"/experiments/{id}/events", {"key": "ann", "value": 1})
    assert_refused(response, 400, "BadRequestException", "it measures no reward")


def test_invalid_experiments_are_refused(cluster: Cluster) -> None:
    def begin(model: str = "m", **result: Any) -> tuple[int, Any]:
        return cluster.ask("POST", f"/models/{model}/experiments", {**DOCUMENT, **result})

    assert_refused(begin("none"), 404, "ModelNotFoundException", "none")
    arms = {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "9.0", "weight": 5000}}
    assert_refused(begin(arms=arms), 404, "ModelVersionNotFoundException", "9.0")
    assert_refused(begin(baseline="c"), 400, "BadRequestException", "baseline 'c' is none of the arms a, b")
    assert_refused(begin(arms={}), 400, "BadRequestException", "arms must be two or more")
    assert_refused(cluster.ask("POST", "/models/m/experiments", b"{"), 400, "BadRequestException", "not JSON")
    assert cluster.ask("GET", "/models/m/experiments") == (200, {"experiments": []}), "nothing of it was kept"
    id = cluster.begin()
    assert_refused(begin(), 409, "ConflictStatusException", "'new ranking'", f"DELETE /experiments/{id}")
    assert cluster.ask("DELETE", f"/experiments/{id}")[0] == 200
    assert begin()[0] == 200


def test_a_version_without_workers_cannot_take_part(cluster: Cluster) -> None:
    nobody, _ = registry_changes.scale(cluster.state.registry, "m", "2.0", 0, 0)
    cluster.loop.run_until_complete(cluster.state.commit(nobody))
    response = cluster.ask("POST", "/models/m/experiments", DOCUMENT)
    assert_refused(
        response,
        400,
        "BadRequestException",
        "2.0 of model m has no workers",
        "PUT /models/m/2.0?min_worker=1",
    )


def test_lists_have_the_newest_first(cluster: Cluster) -> None:
    first = cluster.begin()
    cluster.ask("DELETE", f"/experiments/{first}")
    second = cluster.begin({**DOCUMENT, "name": "another"})
    other = cluster.begin(
        {**DOCUMENT, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a"
    )
    _, of_model = cluster.ask("GET", "/models/m/experiments")
    assert [(e["id"], e["name"], e["state"]) for e in of_model["experiments"]] == [
        (second, "another", "running"),
        (first, "new ranking", "stopped"),
    ]
    assert of_model["experiments"][0]["arms"] == DOCUMENT["arms"]
    _, every = cluster.ask("GET", "/experiments")
    assert [e["id"] for e in every["experiments"]] == [other, second, first]
    assert_refused(cluster.ask("GET", "/models/none/experiments"), 404, "ModelNotFoundException")


def test_failures_and_missing_outputs_are_counted(cluster: Cluster) -> None:
    id = cluster.begin()
    for n in range(40):
        cluster.call(f"r{n}", f"u{n}", body=b'{"score": 1}' if n % 2 else b'{"other": 1}', fails=n % 4 == 0)
    cluster.tell()
    result = cluster.known(id)
    arms, score = result["arms"].values(), result["metrics"]["score"]["arms"].values()
    assert sum(arm["failed"]["handler_failed"] for arm in arms) == 10
    assert sum(arm["count"] for arm in score) == 20
    assert sum(arm["missing"] for arm in score) == 10
    failures = result["metrics"]["failures"]["arms"].values()
    assert sum(arm["count"] * arm["mean"] for arm in failures) == pytest.approx(1000), "percent"


def test_experiment_continues_after_a_restart(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    given = {f"u{n}": cluster.call(f"r{n}", f"u{n}") for n in range(100)}
    cluster.tell()
    event = {"key": "u7", "value": 1}
    cluster.ask("POST", f"/experiments/{id}/events", event)
    before = cluster.known(id)
    cluster.close()
    cluster.open()
    assert cluster.known(id) == before
    assert cluster.ask("POST", f"/experiments/{id}/events", event) == (200, {"counted": 0, "repeated": 1})
    assert {user: cluster.call("again", user) for user in given} == given
    cluster.tell()
    after = cluster.known(id)["arms"]
    assert [arm["units"] for arm in after.values()] == [arm["units"] for arm in before["arms"].values()]
    assert sum(arm["calls"] for arm in after.values()) == 200


def test_measurements_can_be_deleted(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    cluster.call("r0", "ann")
    cluster.tell()
    path = f"/experiments/{id}?purge=true"
    assert_refused(cluster.ask("DELETE", path), 409, "ConflictStatusException", "is running; stop it first")
    cluster.ask("DELETE", f"/experiments/{id}")
    assert cluster.ask("DELETE", path) == (200, {"status": f'Experiment "{id}" forgotten'})
    assert cluster.ask("GET", f"/experiments/{id}")[0] == 404
    assert cluster.ask("GET", "/experiments") == (200, {"experiments": []})
    assert cluster.measured.arm_stats(id) == {}


def test_with_its_model_an_experiment_goes_and_what_it_measured(cluster: Cluster) -> None:
    arms = {n: {"version": "1.0", "weight": 5000} for n in "ab"}
    of_team, id = cluster.begin({**DOCUMENT, "arms": arms}, "team-a"), cluster.begin(ONE_REWARD)
    cluster.call("r0", "ann")
    cluster.tell()
    with pytest.raises(
        Conflict, match=f"'new ranking' is running; stop it first: DELETE /experiments/{of_team}"
    ):
        registry_changes.unregister(cluster.state.registry, "team-a", None)
    cluster.ask("DELETE", f"/experiments/{id}")
    without = cluster.state.registry
    for version in ("2.0", "3.0", "1.0"):
        without, _ = registry_changes.unregister(without, "m", version)
    cluster.loop.run_until_complete(cluster.state.commit(without))
    assert cluster.measured.splits == {id}
    cluster.loop.run_until_complete(cluster.owner.delete_orphans())
    assert cluster.measured.splits == set()
    assert cluster.ask("GET", f"/experiments/{id}")[0] == 404
    assert cluster.known(of_team)["state"] == "running"


def test_pending_readers_are_reported(cluster: Cluster) -> None:
    cluster.alive = {"slow"}
    cluster.loop.run_until_complete(cluster.board.poll("slow", 0, None))
    status, result = cluster.ask("POST", "/models/m/experiments", DOCUMENT)
    assert (status, result["state"]) == (200, "running")
    assert result["status"] == "Stored, and not yet in force at 1 of the replicas that run."
    status, result = cluster.ask("DELETE", f"/experiments/{result['id']}")
    assert (status, result["state"], "not yet in force" in result["status"]) == (200, "stopped", True)


def test_other_methods_and_paths(cluster: Cluster) -> None:
    for method, path in (
        ("PUT", "/models/m/experiments"),
        ("DELETE", "/models/m/experiments"),
        ("POST", "/experiments"),
        ("PUT", "/experiments/e1"),
        ("GET", "/experiments/e1/events"),
    ):
        assert cluster.ask(method, path)[0] == 405, (method, path)
    assert_refused(cluster.ask("GET", "/experiments/e1/more"), 404, "ResourceNotFoundException")
    assert_refused(
        cluster.ask("GET", "/experiments/e1"), 404, "ResourceNotFoundException", "Experiment not found: e1"
    )
    assert_refused(
        cluster.ask("DELETE", "/experiments/e1"), 404, "ResourceNotFoundException", "Experiment not found: e1"
    )


def test_an_alarm_of_the_sample_ratio_stays(cluster: Cluster):
    id = cluster.begin(BY_CALL)
    cluster.experiment_collector.drain()
    trial = cluster.board.table.models["m"].active_split
    for number in range(400):  # as if arm b lost its calls
        choice = version_router.VersionSelection(
            cluster.board.table.models["m"].versions["1.0"], trial, "a", number, ""
        )
        cluster.experiment_collector.record_response(choice, f"a{number}", InferenceResponse(b"{}"), 0.01)
    cluster.tell()
    assert cluster.known(id)["sample_ratio"]["alarm"]
    for number in range(400):
        choice = version_router.VersionSelection(
            cluster.board.table.models["m"].versions["2.0"], trial, "b", number, ""
        )
        cluster.experiment_collector.record_response(choice, f"b{number}", InferenceResponse(b"{}"), 0.01)
    cluster.tell()
    result = cluster.known(id)["sample_ratio"]
    assert result["alarm"] and result["observed"] == {"a": 400, "b": 400}
    cluster.close()
    cluster.open()
    assert cluster.known(id)["sample_ratio"] == result


def gauges(cluster: Cluster) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples by name and label values, in the order of the labels' names."""
    cluster.loop.run_until_complete(cluster.owner.export())
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for name, labels, value in cluster.meters.samples():
        found.setdefault(name, {})[tuple(label for _, label in labels)] = value
    return found


def test_metrics_of_an_experiment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    id = cluster.begin({**DOCUMENT, "metrics": DOCUMENT["metrics"][2:]})
    empty = gauges(cluster)
    assert empty["torchrelay_experiment_units"] == {("a", id, "m", "1.0"): 0, ("b", id, "m", "2.0"): 0}
    assert "torchrelay_experiment_difference" not in empty, "unknown without requests"
    for n in range(400):
        cluster.call(f"r{n}", f"u{n}")
    cluster.tell()
    seen, result = gauges(cluster), cluster.known(id)
    assert seen["torchrelay_experiment_units"]["b", id, "m", "2.0"] == result["arms"]["b"]["units"] > 100
    assert seen["torchrelay_experiment_sample_ratio_alarm"] == {(id, "m"): 0}
    for metric, key in (("seconds", "difference"), ("score", "difference")):
        expected = result["metrics"][metric]["differences"]["b"]
        assert seen["torchrelay_experiment_difference"]["b", id, metric, "m"] == expected[key]
    failures = result["metrics"]["failures"]["differences"]["b"]
    assert seen["torchrelay_experiment_difference_low"]["b", id, "failures", "m"] == failures["low"]
    assert seen["torchrelay_experiment_difference_high"]["b", id, "failures", "m"] == failures["high"]
    cluster.loop.run_until_complete(cluster.owner.stop_experiment(id, ("*",)))
    assert gauges(cluster)["torchrelay_experiment_units"], "for an hour after the end"
    monkeypatch.setattr("serve_app.control.experiments.gauges.RETENTION_S", 0.0)
    assert "torchrelay_experiment_units" not in gauges(cluster)


def test_experiments_beyond_the_limit_have_no_gauges(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.control.experiments.gauges.MAX_COMPARISONS", 3)
    older, newer = cluster.begin(ONE_REWARD), cluster.begin({**ONE_REWARD, "arms": TEAM_ARMS}, "team-a")
    ids = {labels[0] for labels in gauges(cluster)["torchrelay_experiment_sample_ratio_alarm"]}
    assert ids == {newer} and older != newer

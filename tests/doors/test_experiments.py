"""Experiments as operators and applications meet them: the real ledger, database and measurements behind the door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app import traffic
from serve_app.control import registry as change
from serve_app.control.board import Board
from serve_app.control.database import Database
from serve_app.control.measurements import Measurements
from serve_app.control.registry import Registry
from serve_app.control.vitals import Vitals
from serve_app.controlplane import Keeper
from serve_app.deployments.experiments import Experiments
from serve_app.deployments.ledger import Ledger
from serve_app.errors import InUse
from serve_app.telemetry.metrics import Sum
from serve_app.telemetry.observations import Observations
from serve_app.types import Access, Call, Grant, ModelSpec, Reply, Right

QUESTIONS = {name for name in vars(Keeper) if not name.startswith("_")}
MODELS = (("m", "1.0"), ("m", "2.0"), ("m", "3.0"), ("team-a", "1.0"))
DOCUMENT = {
    "name": "new ranking",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "metrics": [
        {"name": "clicks", "kind": "reward"},
        {"name": "basket", "kind": "reward", "per": "event"},
        {"name": "seconds", "kind": "latency"},
        {"name": "failures", "kind": "error_rate"},
        {"name": "score", "kind": "output", "path": "$.score"},
    ],
    "baseline": "a",
    "key": {"header": "X-User"},
}
ONE_REWARD = {**DOCUMENT, "metrics": DOCUMENT["metrics"][:1]}
BY_CALL = {key: value for key, value in ONE_REWARD.items() if key != "key"}


class Cluster:
    """What stands behind the door, and calls as the data plane deals them out and counts them."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self._folder = folder
        self._management = management
        self.loop = asyncio.new_event_loop()
        self.observations = Observations()
        self._number = self._lot = 0
        self.open(models=True)

    def open(self, models: bool = False) -> None:
        """As a Management that begins; what another one kept is there."""
        self.database = Database(f"sqlite:///{self._folder / 'registry.db'}")
        registry = self.database.load()
        if models:
            before, registry = registry, Registry()
            for name, version in MODELS:
                spec = ModelSpec(name, version, "m.mar", "d" * 64, "archive", min_workers=1, max_workers=1)
                registry = change.register(registry, spec)
            self.database.save(before, registry)
        self.measured = Measurements(self.database, patience=0.3)
        self.board = Board(Sum())

        self.alive: set[str] = set()

        async def alive() -> set[str]:
            return self.alive

        self.ledger = Ledger(self.database, registry, self.board, Vitals(), None, alive, lambda: None, 0.05)
        self.ledger.publish()
        self.owner = Experiments(self.ledger, self.measured)
        self.door(None)

    def door(self, access: Access | None) -> None:
        app = self._management(access=access)
        app.loop = self.loop
        for question in QUESTIONS & set(vars(Experiments)):
            setattr(app.shelf, question, getattr(self.owner, question))
        self._app = app

    def close(self) -> None:
        self.loop.run_until_complete(self.measured.close())
        self.database.close()

    def ask(self, method: str, path: str, document: Any = None, **more: Any) -> tuple[int, Any]:
        body = b"" if document is None else document if isinstance(document, bytes) else json.dumps(document).encode()
        answer = self._app(method, path, body, **more)
        return answer.status, json.loads(answer.body) if answer.body else None

    def begin(self, document: Any = DOCUMENT, model: str = "m") -> str:
        status, said = self.ask("POST", f"/models/{model}/experiments", document)
        assert status == 200, said
        return said["id"]

    def known(self, id: str) -> Any:
        status, said = self.ask("GET", f"/experiments/{id}")
        assert status == 200, said
        return said

    def call(self, request_id: str, user: str = "", body: bytes = b'{"score": 0.5}', fails: bool = False) -> str:
        """The version that a call of model m gets."""
        call = Call("m", headers={"x-user": user} if user else {}, request_id=request_id)
        self._lot = traffic.after(self._lot)
        choice = traffic.choose(self.board.table, call, self._lot)
        if choice.trial is not None:
            if fails:
                self.observations.failed(choice, request_id, "handler_failed")
            else:
                seconds = 0.010 if choice.arm == "a" else 0.012
                self.observations.answered(choice, request_id, Reply(body), seconds)
        return choice.row.version

    def tell(self) -> None:
        """What this process has counted reaches Management."""
        if (seen := self.observations.take()) is not None:
            self._number += 1
            self.loop.run_until_complete(self.measured.put("gateway", self._number, seen))


@pytest.fixture
def cluster(tmp_path: Path, management: Callable[..., Any]) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, management)
    yield cluster
    cluster.close()
    cluster.loop.close()


def refused(answer: tuple[int, Any], code: int, type: str, *words: str) -> None:
    status, said = answer
    assert (status, said["code"], said["type"]) == (code, code, type), said
    for word in words:
        assert word in said["message"], said["message"]


def test_from_its_beginning_to_its_end(cluster: Cluster) -> None:
    assert {cluster.call(f"r{n}", f"u{n}") for n in range(50)} == {"1.0"}
    id = cluster.begin()
    assert len(id) == 10 and id.isalnum()
    given = {f"u{n}": cluster.call(f"r{n}", f"u{n}") for n in range(200)}
    assert {user: cluster.call("again", user) for user in given} == given, "whoever comes again gets the same"
    assert cluster.call("nobody") == "1.0", "who shows no key gets the baseline, and is not counted"
    cluster.tell()
    said = cluster.known(id)
    assert {key: said[key] for key in ("id", "name", "model", "state", "ended", "key", "baseline")} == {
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
        assert said["arms"][arm] == {
            "version": version,
            "weight": 5000,
            "units": units,
            "calls": 2 * units,
            "failed": {},
        }
    assert not said["sample_ratio"]["alarm"]
    assert list(said["metrics"]) == ["clicks", "basket", "seconds", "failures", "score"]
    for metric in said["metrics"].values():
        assert set(metric["arms"]) == {"a", "b"}
        assert metric["differences"]["b"]["sentence"]
    assert said["metrics"]["clicks"]["differences"]["b"]["verdict"] == "not_yet_known"
    assert said["sentence"]
    assert said["metrics"]["seconds"]["arms"]["a"]["mean"] == pytest.approx(10.0)
    assert said["metrics"]["score"]["arms"]["b"]["mean"] == 0.5

    status, over = cluster.ask("DELETE", f"/experiments/{id}")
    assert (status, over["state"], over["arms"]) == (200, "stopped", said["arms"])
    assert over["began"] < over["ended"]
    assert {cluster.call(f"r{n}", f"u{n}") for n in range(50)} == {"1.0"}
    assert cluster.known(id) == over, "what was measured stays, and nothing is counted after the end"
    assert cluster.ask("DELETE", f"/experiments/{id}") == (200, over), "it ends once"


def test_a_difference_is_found_and_said(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    events = []
    for n in range(4000):
        version = cluster.call(f"r{n}")
        if n % 10 < (2 if version == "1.0" else 4):
            events.append({"request_id": f"r{n}", "value": 1})
    cluster.tell()
    assert cluster.ask("POST", f"/experiments/{id}/events", events) == (200, {"counted": len(events), "repeated": 0})
    said = cluster.known(id)
    clicks = said["metrics"]["clicks"]
    assert clicks["arms"]["a"]["count"] == clicks["arms"]["b"]["count"] == 2000
    difference = clicks["differences"]["b"]
    assert (difference["verdict"], difference["trusted"]) == ("better", True)
    assert 0 < difference["low"] < difference["difference"] < difference["high"]
    assert difference["sentence"].startswith("b is better than a on clicks: ")
    assert said["sentence"] == "b is better on clicks, compared with a."


def test_rewards_per_exposure_and_per_event(cluster: Cluster) -> None:
    id = cluster.begin()
    users = [f"u{n}" for n in range(100)]
    version = {user: cluster.call(f"r-{user}", user) for user in users}
    cluster.tell()
    buyer = next(user for user in users if version[user] == "2.0")
    post = f"/experiments/{id}/events"
    events = [{"key": buyer, "value": value, "metric": "basket", "id": f"order {value}"} for value in (10, 20)]
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


def test_what_is_posted_twice_counts_once(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    for n in range(3):
        cluster.call(f"r{n}")
    cluster.tell()
    post = f"/experiments/{id}/events"
    one = {"request_id": "r0", "value": 1}
    assert cluster.ask("POST", post, one) == (200, {"counted": 1, "repeated": 0})
    assert cluster.ask("POST", post, one) == (200, {"counted": 0, "repeated": 1})
    assert cluster.ask("POST", post, {**one, "value": 7}) == (200, {"counted": 0, "repeated": 1}), "the first holds"
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
    said = cluster.known(id)
    [arm] = [name for name, arm in said["arms"].items() if arm["calls"]]
    assert said["arms"][arm]["units"] == 1, "a caller is counted once, whatever the number of calls"
    assert said["metrics"]["clicks"]["arms"][arm]["mean"] == 6.0


def test_an_event_may_come_before_its_call_is_told_of(cluster: Cluster) -> None:
    id = cluster.begin(BY_CALL)
    cluster.call("r0")

    async def late() -> None:
        await asyncio.sleep(0.05)
        await cluster.measured.put("gateway", 1, cluster.observations.take())

    task = cluster.loop.create_task(late())
    answer = cluster.ask("POST", f"/experiments/{id}/events", {"request_id": "r0", "value": 1})
    assert answer == (200, {"counted": 1, "repeated": 0})
    cluster.loop.run_until_complete(task)


def test_an_unknown_call_is_named_and_nothing_is_counted(cluster: Cluster) -> None:
    id = cluster.begin()
    cluster.call("r0", "ann")
    cluster.tell()
    post = f"/experiments/{id}/events"
    events = [{"key": "ann", "value": 1, "metric": "clicks"}, {"key": "bob", "value": 1, "metric": "clicks"}]
    refused(cluster.ask("POST", post, events), 404, "ResourceNotFoundException", id, "'bob'", "X-Request-Id")
    assert cluster.ask("POST", post, events[:1]) == (200, {"counted": 1, "repeated": 0}), "the first was not counted"


def test_events_that_are_wrong(cluster: Cluster) -> None:
    id = cluster.begin()
    cluster.call("r0", "ann")
    cluster.tell()
    by_call = cluster.begin({**BY_CALL, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a")

    def post(document: Any, id: str = id) -> tuple[int, Any]:
        return cluster.ask("POST", f"/experiments/{id}/events", document)

    wrong = (400, "BadRequestException")
    event = {"key": "ann", "value": 1}
    refused(post(event), *wrong, "cannot tell which reward", "'clicks', 'basket'")
    refused(post({**event, "metric": "seconds"}), *wrong, "no reward 'seconds'", "'clicks', 'basket'")
    refused(post(b'{"key": "ann", "value": NaN}'), *wrong, "not JSON")
    refused(post(b'{"key": "ann", "value": 1e999}'), *wrong)
    refused(post(b""), *wrong, "empty")
    refused(post({"value": 1}), *wrong, "either a request_id or a key")
    refused(post(event, by_call), *wrong, "each call by itself", "request_id")
    refused(post(event, "none"), 404, "ResourceNotFoundException", "Experiment not found: none")
    assert cluster.known(id)["metrics"]["clicks"]["arms"]["a"]["mean"] in (0.0, None), "nothing of it was counted"


def test_an_experiment_without_rewards_takes_no_events(cluster: Cluster) -> None:
    id = cluster.begin({**DOCUMENT, "metrics": [{"name": "seconds"}]})
    answer = cluster.ask("POST", f"/experiments/{id}/events", {"key": "ann", "value": 1})
    refused(answer, 400, "BadRequestException", "it measures no reward")


def test_what_cannot_begin(cluster: Cluster) -> None:
    def begin(model: str = "m", **said: Any) -> tuple[int, Any]:
        return cluster.ask("POST", f"/models/{model}/experiments", {**DOCUMENT, **said})

    refused(begin("none"), 404, "ModelNotFoundException", "none")
    arms = {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "9.0", "weight": 5000}}
    refused(begin(arms=arms), 404, "ModelVersionNotFoundException", "9.0")
    refused(begin(baseline="c"), 400, "BadRequestException", "baseline 'c' is none of the arms a, b")
    refused(begin(arms={}), 400, "BadRequestException", "arms must be two or more")
    refused(cluster.ask("POST", "/models/m/experiments", b"{"), 400, "BadRequestException", "not JSON")
    assert cluster.ask("GET", "/models/m/experiments") == (200, {"experiments": []}), "nothing of it was kept"
    id = cluster.begin()
    refused(begin(), 409, "ConflictStatusException", "'new ranking'", f"DELETE /experiments/{id}")
    assert cluster.ask("DELETE", f"/experiments/{id}")[0] == 200
    assert begin()[0] == 200


def test_a_version_without_workers_cannot_take_part(cluster: Cluster) -> None:
    nobody, _ = change.scale(cluster.ledger.registry, "m", "2.0", 0, 0)
    cluster.loop.run_until_complete(cluster.ledger.commit(nobody))
    answer = cluster.ask("POST", "/models/m/experiments", DOCUMENT)
    refused(answer, 400, "BadRequestException", "2.0 of model m has no workers", "PUT /models/m/2.0?min_worker=1")


def test_lists_have_the_newest_first(cluster: Cluster) -> None:
    first = cluster.begin()
    cluster.ask("DELETE", f"/experiments/{first}")
    second = cluster.begin({**DOCUMENT, "name": "another"})
    other = cluster.begin({**DOCUMENT, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a")
    _, of_model = cluster.ask("GET", "/models/m/experiments")
    assert [(e["id"], e["name"], e["state"]) for e in of_model["experiments"]] == [
        (second, "another", "running"),
        (first, "new ranking", "stopped"),
    ]
    assert of_model["experiments"][0]["arms"] == DOCUMENT["arms"]
    _, every = cluster.ask("GET", "/experiments")
    assert [e["id"] for e in every["experiments"]] == [other, second, first]
    refused(cluster.ask("GET", "/models/none/experiments"), 404, "ModelNotFoundException")


def test_failures_and_missing_outputs_are_counted(cluster: Cluster) -> None:
    id = cluster.begin()
    for n in range(40):
        cluster.call(f"r{n}", f"u{n}", body=b'{"score": 1}' if n % 2 else b'{"other": 1}', fails=n % 4 == 0)
    cluster.tell()
    said = cluster.known(id)
    arms, score = said["arms"].values(), said["metrics"]["score"]["arms"].values()
    assert sum(arm["failed"]["handler_failed"] for arm in arms) == 10
    assert sum(arm["count"] for arm in score) == 20
    assert sum(arm["missing"] for arm in score) == 10
    failures = said["metrics"]["failures"]["arms"].values()
    assert sum(arm["count"] * arm["mean"] for arm in failures) == pytest.approx(1000), "percent"


def test_another_management_goes_on_where_the_last_one_was(cluster: Cluster) -> None:
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


def test_what_was_measured_can_be_forgotten(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    cluster.call("r0", "ann")
    cluster.tell()
    path = f"/experiments/{id}?forget=true"
    refused(cluster.ask("DELETE", path), 409, "ConflictStatusException", "is running; stop it first")
    cluster.ask("DELETE", f"/experiments/{id}")
    assert cluster.ask("DELETE", path) == (200, {"status": f'Experiment "{id}" forgotten'})
    assert cluster.ask("GET", f"/experiments/{id}")[0] == 404
    assert cluster.ask("GET", "/experiments") == (200, {"experiments": []})
    assert cluster.measured.figures(id) == {}


def test_with_its_model_an_experiment_goes_and_what_it_measured(cluster: Cluster) -> None:
    arms = {n: {"version": "1.0", "weight": 5000} for n in "ab"}
    of_team, id = cluster.begin({**DOCUMENT, "arms": arms}, "team-a"), cluster.begin(ONE_REWARD)
    cluster.call("r0", "ann")
    cluster.tell()
    with pytest.raises(InUse, match=f"'new ranking' is running; stop it first: DELETE /experiments/{of_team}"):
        change.unregister(cluster.ledger.registry, "team-a", None)
    cluster.ask("DELETE", f"/experiments/{id}")
    without = cluster.ledger.registry
    for version in ("2.0", "3.0", "1.0"):
        without, _ = change.unregister(without, "m", version)
    cluster.loop.run_until_complete(cluster.ledger.commit(without))
    assert cluster.measured.trials == {id}
    cluster.loop.run_until_complete(cluster.owner.tidy())
    assert cluster.measured.trials == set()
    assert cluster.ask("GET", f"/experiments/{id}")[0] == 404
    assert cluster.known(of_team)["state"] == "running"


def test_who_has_not_heard_of_it_yet_is_said(cluster: Cluster) -> None:
    cluster.alive = {"slow"}
    cluster.loop.run_until_complete(cluster.board.poll("slow", 0, None))
    status, said = cluster.ask("POST", "/models/m/experiments", DOCUMENT)
    assert (status, said["state"]) == (200, "running")
    assert said["status"] == "Stored, and not yet in force at 1 of the replicas that run."
    status, said = cluster.ask("DELETE", f"/experiments/{said['id']}")
    assert (status, said["state"], "not yet in force" in said["status"]) == (200, "stopped", True)


def test_other_methods_and_paths(cluster: Cluster) -> None:
    for method, path in (
        ("PUT", "/models/m/experiments"),
        ("DELETE", "/models/m/experiments"),
        ("POST", "/experiments"),
        ("PUT", "/experiments/e1"),
        ("GET", "/experiments/e1/events"),
    ):
        assert cluster.ask(method, path)[0] == 405, (method, path)
    refused(cluster.ask("GET", "/experiments/e1/more"), 404, "ResourceNotFoundException")
    refused(cluster.ask("GET", "/experiments/e1"), 404, "ResourceNotFoundException", "Experiment not found: e1")
    refused(cluster.ask("DELETE", "/experiments/e1"), 404, "ResourceNotFoundException", "Experiment not found: e1")


# Keys


def may(*rights: Right, models: tuple[str, ...] = ("*",)) -> Grant:
    return Grant(frozenset(rights), models)


ACCESS = Access(
    {
        sha256(key.encode()).digest(): grant
        for key, grant in {
            "infer": may("infer"),
            "infer_team": may("infer", models=("team-*",)),
            "observe": may("observe"),
            "observe_team": may("observe", models=("team-*",)),
            "manage": may("observe", "manage"),
            "manage_team": may("observe", "manage", models=("team-*",)),
        }.items()
    }
)


def test_what_a_key_is_for(cluster: Cluster) -> None:
    id = cluster.begin(ONE_REWARD)
    of_team = cluster.begin({**DOCUMENT, "arms": {n: {"version": "1.0", "weight": 5000} for n in "ab"}}, "team-a")
    cluster.call("r0", "ann")
    cluster.tell()
    cluster.door(ACCESS)

    def ask(method: str, path: str, key: str, document: Any = None) -> tuple[int, Any]:
        return cluster.ask(method, path, document, headers={"Authorization": f"Bearer {key}"})

    def denied(answer: tuple[int, Any]) -> None:
        refused(answer, 400, "InvalidKeyException")

    event = {"key": "ann", "value": 1}
    assert ask("POST", f"/experiments/{id}/events", "infer", event)[1] == {"counted": 1, "repeated": 0}
    assert ask("POST", f"/experiments/{id}/events", "manage", event)[1] == {"counted": 0, "repeated": 1}
    for key in ("observe", "infer_team", "manage_team"):
        denied(ask("POST", f"/experiments/{id}/events", key, event))
    for key in ("observe", "manage"):
        assert ask("GET", f"/experiments/{id}", key)[0] == 200
    for key in ("infer", "observe_team", "manage_team"):
        denied(ask("GET", f"/experiments/{id}", key))
        denied(ask("DELETE", f"/experiments/{id}", key))
        denied(ask("DELETE", f"/experiments/{id}?forget=true", key))
        denied(ask("GET", "/models/m/experiments", key))
        denied(ask("POST", "/models/m/experiments", key, DOCUMENT))
    denied(ask("DELETE", f"/experiments/{id}", "observe"))
    assert [e["id"] for e in ask("GET", "/experiments", "observe_team")[1]["experiments"]] == [of_team]
    assert [e["id"] for e in ask("GET", "/experiments", "observe")[1]["experiments"]] == [of_team, id]
    denied(cluster.ask("GET", "/experiments"))
    assert ask("DELETE", f"/experiments/{of_team}", "manage_team")[1]["state"] == "stopped"


def test_rewards_are_taken_on_the_inference_port_and_nothing_else_of_experiments(
    cluster: Cluster, inference: Callable[..., Any]
):
    id = cluster.begin(BY_CALL)
    cluster.call("r1")
    cluster.tell()
    app = inference(keeper=cluster.owner)
    told = app("POST", f"/experiments/{id}/events", b'{"request_id": "r1", "value": 1}', loop=cluster.loop)
    assert (told.status, json.loads(told.body)) == (200, {"counted": 1, "repeated": 0})
    for method, path in (("GET", f"/experiments/{id}"), ("DELETE", f"/experiments/{id}"), ("GET", "/experiments")):
        assert app(method, path, loop=cluster.loop).status == 404
    assert app("GET", f"/experiments/{id}/events", loop=cluster.loop).status == 405


def test_an_alarm_of_the_sample_ratio_stays(cluster: Cluster):
    id = cluster.begin(BY_CALL)
    cluster.observations.take()
    trial = cluster.board.table.models["m"].trial
    for number in range(400):  # as if arm b lost its calls
        choice = traffic.Choice(cluster.board.table.models["m"].versions["1.0"], trial, "a", number, "")
        cluster.observations.answered(choice, f"a{number}", Reply(b"{}"), 0.01)
    cluster.tell()
    assert cluster.known(id)["sample_ratio"]["alarm"]
    for number in range(400):
        choice = traffic.Choice(cluster.board.table.models["m"].versions["2.0"], trial, "b", number, "")
        cluster.observations.answered(choice, f"b{number}", Reply(b"{}"), 0.01)
    cluster.tell()
    said = cluster.known(id)["sample_ratio"]
    assert said["alarm"] and said["observed"] == {"a": 400, "b": 400}

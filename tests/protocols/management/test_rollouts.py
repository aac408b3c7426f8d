"""Rollouts as operators meet them: the real ledger, database, vitals and measurements behind the door."""

from __future__ import annotations

import asyncio
import json
import logging
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
from serve_app.control.reconciler import Seen as SeenApp
from serve_app.control.registry import Registry
from serve_app.control.vitals import Vitals
from serve_app.deployments.ledger import Ledger
from serve_app.deployments.rollouts import Rollouts
from serve_app.errors import StartFailed
from serve_app.settings import RuntimeSettings
from serve_app.telemetry.metrics import Sum
from serve_app.telemetry.observations import Observations
from serve_app.types import Access, Call, Grant, ModelRef, ModelSpec, Reply, Worker

WORKERS = {("m", "1.0"): 1, ("m", "2.0"): 1, ("m", "3.0"): 0, ("team-a", "1.0"): 1}
QUICK = {"to": "2.0", "steps": [20, 50, 100], "bake_s": 0, "min_calls": 50, "keep_warm_s": 0}


class Cluster:
    """What stands behind the door; versions run as soon as they should, but for those that are ``broken``."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self._url = f"sqlite:///{folder / 'registry.db'}"
        self._management = management
        self.loop = asyncio.new_event_loop()
        self.vitals = Vitals()
        self.observations = Observations()
        self.broken: dict[str, str] = {}  # the traceback by version
        self._number = self._lot = 0
        self.open(models=True)

    def open(self, models: bool = False) -> None:
        """As a Management that begins; what another one kept is there."""
        self.database = Database(self._url)
        registry = self.database.load()
        if models:
            before, registry = registry, Registry()
            for (name, version), workers in WORKERS.items():
                spec = ModelSpec(
                    name, version, "m.mar", "d" * 64, "archive", min_workers=workers, max_workers=workers
                )
                registry = change.register(registry, spec)
            self.database.save(before, registry)
        self.measured = Measurements(self.database, patience=0.3)
        self.board = Board(Sum())

        async def alive() -> set[str]:
            return set()

        self.ledger = Ledger(self.database, registry, self.board, self.vitals, None, alive, lambda: None, 1.0)
        self.ledger.publish()
        self.owner = Rollouts(self.ledger, self.vitals, self.measured, RuntimeSettings())
        self.door(None)

    def door(self, access: Access | None) -> None:
        app = self._management(access=access)
        app.loop = self.loop
        for question in ("begin_rollout", "rollout", "steer_rollout"):
            setattr(app.shelf, question, getattr(self.owner, question))
        self._app = app

    def close(self) -> None:
        self.loop.run_until_complete(self.measured.close())
        self.database.close()

    def ask(self, method: str, path: str, document: Any = None, **more: Any) -> tuple[int, Any]:
        body = b"" if document is None else document if isinstance(document, bytes) else json.dumps(document).encode()
        answer = self._app(method, path, body, **more)
        return answer.status, json.loads(answer.body) if answer.body else None

    def begin(self, **more: Any) -> Any:
        status, said = self.ask("POST", "/models/m/rollout", {**QUICK, **more})
        assert status == 200, said
        return said

    @property
    def rollout(self) -> Any:
        status, said = self.ask("GET", "/models/m/rollout")
        assert status == 200, said
        return said

    def look(self) -> Any:
        """A second later: versions have started or failed, calls were counted, and Management has looked."""
        desired = change.desired(self.ledger.registry)
        seen = {}
        for app, want in desired.items():
            ref = want.spec.ref
            if (traceback := self.broken.get(ref.version)) is not None:
                self.vitals.failed(want.spec, StartFailed(ref.name, ref.version, traceback))
                workers: tuple[Worker, ...] = ()
            else:
                workers = tuple(Worker(f"{ref.app}#{n}", 1, 0.0, True) for n in range(want.low))
            seen[app] = SeenApp(app, want.route, want.low, {}, 0, "RUNNING", "", workers)
        self.vitals.note(desired, seen, {})
        self.ledger.publish()
        if (counted := self.observations.take()) is not None:
            self._number += 1
            self.loop.run_until_complete(self.measured.put("gateway", self._number, counted))
        self.loop.run_until_complete(self.owner.look())
        return self.rollout

    def calls(self, count: int, fails: Callable[[str, int], bool] = lambda version, n: False) -> dict[str, int]:
        """Calls of model m as the data plane deals them out and counts them, and how many each version got."""
        got: dict[str, int] = {}
        for _ in range(count):
            self._lot = traffic.after(self._lot)
            choice = traffic.choose(self.board.table, Call("m"), self._lot)
            version = choice.row.version
            got[version] = got.get(version, 0) + 1
            if choice.trial is not None and fails(version, got[version]):
                self.observations.failed(choice, "", "handler_failed")
            elif choice.trial is not None:
                self.observations.answered(choice, "", Reply(b"1"), 0.010)
        return got

    def workers(self, version: str) -> int:
        return change.find(self.ledger.registry, "m", version).min_workers


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


def test_a_good_version_takes_over(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchrelay.rollouts")
    begun = cluster.begin()
    assert (begun["state"], begun["percent"], begun["next"]) == ("starting", 0, "the workers of 2.0")
    assert cluster.calls(100) == {"1.0": 100}
    shares = []
    while cluster.look()["state"] == "running":
        shares.append(cluster.rollout["percent"])
        got = cluster.calls(1_000)
        assert got["2.0"] == pytest.approx(10 * shares[-1], abs=1)
    assert shares == [20, 50, 100]
    over = cluster.rollout
    assert (over["state"], over["percent"], over["next"]) == ("promoted", 100, None)
    assert [d["verdict"] for d in over["decisions"]] == ["began", "step", "step", "step", "promoted"]
    assert over["decisions"][-1]["figures"]["candidate"]["calls"] == 1_000
    assert cluster.ledger.registry.models["m"].default == "2.0"
    assert cluster.calls(100) == {"2.0": 100}
    assert cluster.look()["decisions"][-1]["why"] == "its workers are taken away"
    assert (cluster.workers("1.0"), cluster.workers("2.0")) == (0, 1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "m: 2.0 rollout begins: 2.0 is to take over from 1.0, and has its workers"
    assert lines[1] == "m: 2.0 gets 20 %: 2.0 runs"
    assert lines[-2].startswith("m: 2.0 promoted: ")
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_bad_version_goes_back_and_the_log_says_why(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.begin()
    cluster.look()
    cluster.calls(2_000, lambda version, n: version == "2.0" and n % 10 == 0)
    back = cluster.look()
    assert (back["state"], back["percent"]) == ("rolled_back", 0)
    assert cluster.calls(100) == {"1.0": 100}
    assert (cluster.workers("1.0"), cluster.workers("2.0")) == (1, 1)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(
        "m: 2.0 rolled back at 20 %: error_rate 9.77 % of 399 calls against 0 % of 1,601; at most 1 % more is allowed "
        "(surely above: "
    )
    assert back["decisions"][-1]["figures"]["guardrails"][0]["name"] == "error_rate"
    assert cluster.look() == {**back, "next": None}, "it is over"


def test_one_that_always_fails_goes_back_within_a_few_dozen_calls(cluster: Cluster) -> None:
    cluster.begin(steps=[1, 100])
    cluster.look()
    failed = 0
    while cluster.rollout["state"] == "running":
        failed += cluster.calls(100, lambda version, n: version == "2.0").get("2.0", 0)
        cluster.look()
    assert cluster.rollout["state"] == "rolled_back"
    assert failed <= 10


def test_a_version_that_cannot_start(cluster: Cluster) -> None:
    cluster.broken["3.0"] = "Traceback (most recent call last):\n  ...\nValueError: no weights\n"
    begun = cluster.begin(to="3.0")
    assert cluster.workers("3.0") == 1
    assert begun["decisions"][0]["why"] == "3.0 is to take over from 1.0, and gets as many workers as 1.0 has"
    back = cluster.look()
    assert back["state"] == "rolled_back"
    assert back["decisions"][-1]["why"] == (
        "no worker of 3.0 runs: ValueError: no weights; 1.0 has all calls, 3.0 loses the workers that it was given"
    )
    assert cluster.workers("3.0") == 0
    assert cluster.calls(10) == {"1.0": 10}


def test_a_version_that_runs_no_more(cluster: Cluster) -> None:
    cluster.begin()
    cluster.look()
    cluster.broken["2.0"] = "killed\n"
    back = cluster.look()
    assert (back["state"], back["decisions"][-1]["percent"]) == ("rolled_back", 0)
    assert "no worker of 2.0 runs: killed" in back["decisions"][-1]["why"]


def test_paused_resumed_aborted(cluster: Cluster) -> None:
    cluster.begin()
    early = cluster.ask("POST", "/models/m/rollout/pause")
    refused(early, 409, "ConflictStatusException", "the workers of 2.0 are starting")
    cluster.look()
    status, paused = cluster.ask("POST", "/models/m/rollout/pause")
    assert (status, paused["state"], paused["next"]) == (200, "paused", "somebody to resume it")
    cluster.calls(1_000)
    assert (cluster.look()["state"], cluster.rollout["percent"]) == ("paused", 20)
    assert cluster.ask("POST", "/models/m/rollout/pause")[1]["decisions"] == paused["decisions"]
    assert cluster.ask("POST", "/models/m/rollout/resume")[1]["state"] == "running"
    assert cluster.look()["percent"] == 50
    status, aborted = cluster.ask("POST", "/models/m/rollout/abort")
    assert (status, aborted["state"], aborted["percent"]) == (200, "aborted", 0)
    assert cluster.calls(100) == {"1.0": 100}
    again = cluster.ask("POST", "/models/m/rollout/abort")
    refused(again, 409, "ConflictStatusException", "cannot abort: it is over (aborted)", "POST /models/m/rollout")


def test_a_paused_one_is_still_watched(cluster: Cluster) -> None:
    cluster.begin()
    cluster.look()
    cluster.ask("POST", "/models/m/rollout/pause")
    cluster.calls(1_000, lambda version, n: version == "2.0")
    assert cluster.look()["state"] == "rolled_back"


def test_whoever_keeps_the_models_next_goes_on_with_it(cluster: Cluster) -> None:
    cluster.begin()
    cluster.look()
    cluster.calls(500)
    cluster.look()
    cluster.calls(300)
    before = cluster.look()
    assert (before["step"], before["figures"]["candidate"]["calls"]) == (2, 0)
    cluster.close()
    cluster.open()
    after = cluster.rollout
    assert {**after, "next": None} == {**before, "next": None}
    cluster.calls(100)
    assert cluster.look()["state"] == "promoted"


def test_figures_of_an_old_one_are_dropped(cluster: Cluster) -> None:
    old = cluster.begin()["id"]
    cluster.look()
    cluster.calls(100)
    cluster.look()
    assert cluster.measured.figures(f"{old}:0")
    cluster.ask("POST", "/models/m/rollout/abort")
    cluster.begin()
    cluster.look()
    assert not cluster.measured.figures(f"{old}:0")


@pytest.mark.parametrize(
    ("path", "document", "code", "type", "said"),
    [
        ("/models/m/rollout", None, 400, "BadRequestException", "The body is empty"),
        ("/models/m/rollout", b"{", 400, "BadRequestException", "not JSON"),
        ("/models/m/rollout", [], 400, "BadRequestException", 'such as {"to": "2.0"}'),
        ("/models/m/rollout", {"two": "2.0"}, 400, "BadRequestException", "unknown key 'two'; did you mean 'to'"),
        ("/models/m/rollout", {**QUICK, "steps": [5]}, 400, "BadRequestException", "the last step is 5"),
        ("/models/m/rollout", {**QUICK, "to": "1.0"}, 400, "BadRequestException", "has all calls of model m already"),
        (
            "/models/m/rollout",
            {**QUICK, "to": "9"},
            404,
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: m",
        ),
        ("/models/none/rollout", QUICK, 404, "ModelNotFoundException", "Model not found: none"),
        ("/models/none/rollout/abort", None, 404, "ModelNotFoundException", "Model not found: none"),
        ("/models/m/rollout/abort", None, 404, "ResourceNotFoundException", "Model m has had no rollout; begin one"),
        ("/models/m/rollout/stop", None, 404, "ResourceNotFoundException", "Requested resource is not found"),
        ("/models/m/rollout/abort/now", None, 404, "ResourceNotFoundException", "Requested resource is not found"),
    ],
)
def test_bad_input_begins_nothing(
    cluster: Cluster, path: str, document: Any, code: int, type: str, said: str
) -> None:
    before = cluster.ledger.registry
    refused(cluster.ask("POST", path, document), code, type, said)
    assert cluster.ledger.registry is before


def test_methods(cluster: Cluster) -> None:
    refused(cluster.ask("GET", "/models/m/rollout"), 404, "ResourceNotFoundException", "POST /models/m/rollout")
    refused(cluster.ask("GET", "/models/none/rollout"), 404, "ModelNotFoundException", "none")
    for method, path in (("PUT", ""), ("DELETE", ""), ("GET", "/abort"), ("PUT", "/pause")):
        refused(cluster.ask(method, f"/models/m/rollout{path}"), 405, "MethodNotAllowedException")


def test_not_two_at_once(cluster: Cluster) -> None:
    first = cluster.begin()
    said = "a rollout of version 2.0 is under way"
    refused(cluster.ask("POST", "/models/m/rollout", QUICK), 409, "ConflictStatusException", said, "rollout/abort")
    assert cluster.rollout["id"] == first["id"]


def test_keys(cluster: Cluster) -> None:
    grants = {
        "watcher": Grant(frozenset({"observe"})),
        "other": Grant(frozenset({"observe", "manage"}), ("team-a",)),
        "owner": Grant(frozenset({"observe", "manage"}), ("m",)),
    }
    cluster.door(Access({sha256(key.encode()).digest(): grant for key, grant in grants.items()}))

    def ask(method: str, path: str, key: str, document: Any = None) -> int:
        return cluster.ask(method, path, document, headers={"authorization": f"Bearer {key}"})[0]

    assert ask("POST", "/models/m/rollout", "watcher", QUICK) == 400
    assert ask("POST", "/models/m/rollout", "other", QUICK) == 400
    assert "m" not in cluster.ledger.registry.rollouts
    assert ask("POST", "/models/m/rollout", "owner", QUICK) == 200
    assert ask("GET", "/models/m/rollout", "watcher") == 200
    assert ask("GET", "/models/m/rollout", "other") == 400
    assert ask("POST", "/models/m/rollout/abort", "watcher") == 400
    assert ask("POST", "/models/m/rollout/abort", "owner") == 200
    assert ModelRef("m", "2.0") in {spec.ref for spec in cluster.ledger.registry}

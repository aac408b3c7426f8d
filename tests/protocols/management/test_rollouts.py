"""Rollouts through the HTTP API: the real state, database, health and measurements."""

from __future__ import annotations

import logging
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.reconciler import ObservedApp as SeenApp
from serve_app.control.registry import desired_states, find_version
from serve_app.control.rollouts.service import RolloutService
from serve_app.dataplane.routing import version_router
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef, ReplicaInfo
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.errors import StartFailed
from serve_app.settings import RuntimeSettings
from serve_app.telemetry.metrics import Meters
from tests.support.experiment_services import assert_refused
from tests.support.service_api import ServiceApi

pytestmark = pytest.mark.integration


WORKERS = {("m", "1.0"): 1, ("m", "2.0"): 1, ("m", "3.0"): 0, ("team-a", "1.0"): 1}
QUICK = {"to": "2.0", "steps": [20, 50, 100], "bake_s": 0, "min_calls": 50, "keep_warm_s": 0}


class Cluster(ServiceApi):
    """The services behind the API; versions run as soon as they should, except those that are ``broken``."""

    def __init__(self, folder: Path, management: Callable[..., Any]) -> None:
        self.broken: dict[str, str] = {}  # the traceback by version
        super().__init__(folder, management, WORKERS)

    def create_service(self) -> RolloutService:
        self.meters = Meters()
        return RolloutService(self.state, self.health, self.measured, RuntimeSettings(), self.meters)

    def begin(self, **more: Any) -> Any:
        status, result = self.ask("POST", "/models/m/rollout", {**QUICK, **more})
        assert status == 200, result
        return result

    @property
    def rollout(self) -> Any:
        status, result = self.ask("GET", "/models/m/rollout")
        assert status == 200, result
        return result

    def look(self) -> Any:
        """Advance by a second: start versions or let them fail, report counts, and run the state machine."""
        desired = desired_states(self.state.registry)
        seen = {}
        for app, want in desired.items():
            ref = want.spec.ref
            if (traceback := self.broken.get(ref.version)) is not None:
                self.health.record_start_failure(want.spec, StartFailed(ref.name, ref.version, traceback))
                workers: tuple[ReplicaInfo, ...] = ()
            else:
                workers = tuple(ReplicaInfo(f"{ref.app}#{n}", 1, 0.0, True) for n in range(want.min_replicas))
            seen[app] = SeenApp(app, want.route, want.min_replicas, {}, 0, "RUNNING", "", workers)
        self.health.update(desired, seen, {})
        self.state.publish()
        if (counted := self.experiment_collector.drain()) is not None:
            self._number += 1
            self.loop.run_until_complete(self.measured.record("gateway", self._number, counted))
        self.loop.run_until_complete(self.owner.evaluate())
        return self.rollout

    def calls(
        self, count: int, fails: Callable[[str, int], bool] = lambda version, n: False
    ) -> dict[str, int]:
        """Route and count requests to model m as the data plane does; return the count of each version."""
        got: dict[str, int] = {}
        for _ in range(count):
            self._lot = version_router.next_bucket_cursor(self._lot)
            choice = version_router.select_version(self.board.table, InferenceRequest("m"), self._lot)
            version = choice.route.version
            got[version] = got.get(version, 0) + 1
            if choice.active_split is not None and fails(version, got[version]):
                self.experiment_collector.record_failure(choice, "", "handler_failed")
            elif choice.active_split is not None:
                self.experiment_collector.record_response(choice, "", InferenceResponse(b"1"), 0.010)
        return got

    def workers(self, version: str) -> int:
        return find_version(self.state.registry, "m", version).min_workers


def test_a_good_version_takes_over(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_app.control.rollouts")
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
    assert [d["verdict"] for d in over["decisions"]] == ["started", "step", "step", "step", "promoted"]
    assert over["decisions"][-1]["figures"]["candidate"]["calls"] == 1_000
    assert cluster.state.registry.models["m"].default == "2.0"
    assert cluster.calls(100) == {"2.0": 100}
    assert cluster.look()["decisions"][-1]["reason"] == "its workers are taken away"
    assert (cluster.workers("1.0"), cluster.workers("2.0")) == (0, 1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "m: 2.0 rollout begins: 2.0 replaces 1.0 step by step, and has its workers"
    assert lines[1] == "m: 2.0 gets 20 %: 2.0 runs"
    assert lines[-2].startswith("m: 2.0 promoted: ")
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_bad_version_is_rolled_back_with_a_logged_reason(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.begin()
    cluster.look()
    cluster.calls(2_000, lambda version, n: version == "2.0" and n % 10 == 0)
    back = cluster.look()
    assert (back["state"], back["percent"]) == ("rolled_back", 0)
    assert cluster.calls(100) == {"1.0": 100}
    assert (cluster.workers("1.0"), cluster.workers("2.0")) == (1, 1)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith(
        "m: 2.0 rolled back at 20 %: error_rate 9.77 % of 399 requests against 0 % of 1,601; at most 1 % more is allowed "  # noqa: E501
        "(surely above: "
    )
    assert back["decisions"][-1]["figures"]["guardrails"][0]["name"] == "error_rate"
    assert cluster.look() == {**back, "next": None}, "it is over"


def test_failing_version_is_rolled_back_within_a_few_dozen_requests(cluster: Cluster) -> None:
    cluster.begin(steps=[1, 100])
    cluster.look()
    failed = 0
    while cluster.rollout["state"] == "running":
        failed += cluster.calls(100, lambda version, n: version == "2.0").get("2.0", 0)
        cluster.look()
    assert cluster.rollout["state"] == "rolled_back"
    assert failed <= 10


def test_version_that_cannot_start_is_rolled_back(cluster: Cluster) -> None:
    cluster.broken["3.0"] = "Traceback (most recent call last):\n  ...\nValueError: no weights\n"
    begun = cluster.begin(to="3.0")
    assert cluster.workers("3.0") == 1
    assert (
        begun["decisions"][0]["reason"]
        == "3.0 replaces 1.0 step by step, and gets as many workers as 1.0 has"
    )
    back = cluster.look()
    assert back["state"] == "rolled_back"
    assert back["decisions"][-1]["reason"] == (
        "no worker of 3.0 runs: ValueError: no weights; 1.0 has all requests, 3.0 loses the workers that it was given"  # noqa: E501
    )
    assert cluster.workers("3.0") == 0
    assert cluster.calls(10) == {"1.0": 10}


def test_a_version_that_runs_no_more(cluster: Cluster) -> None:
    cluster.begin()
    cluster.look()
    cluster.broken["2.0"] = "killed\n"
    back = cluster.look()
    assert (back["state"], back["decisions"][-1]["percent"]) == ("rolled_back", 0)
    assert "no worker of 2.0 runs: killed" in back["decisions"][-1]["reason"]


def test_paused_resumed_aborted(cluster: Cluster) -> None:
    cluster.begin()
    early = cluster.ask("POST", "/models/m/rollout/pause")
    assert_refused(early, 409, "ConflictStatusException", "the workers of 2.0 are starting")
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
    assert_refused(
        again, 409, "ConflictStatusException", "cannot abort: it is over (aborted)", "POST /models/m/rollout"
    )


def test_guardrails_stay_active_while_paused(cluster: Cluster) -> None:
    cluster.begin()
    cluster.look()
    cluster.ask("POST", "/models/m/rollout/pause")
    cluster.calls(1_000, lambda version, n: version == "2.0")
    assert cluster.look()["state"] == "rolled_back"


def test_rollout_continues_after_a_restart(cluster: Cluster) -> None:
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
    assert cluster.measured.arm_stats(f"{old}:0")
    cluster.ask("POST", "/models/m/rollout/abort")
    cluster.begin()
    cluster.look()
    assert not cluster.measured.arm_stats(f"{old}:0")


@pytest.mark.parametrize(
    ("path", "document", "code", "type", "result"),
    [
        ("/models/m/rollout", None, 400, "BadRequestException", "The body is empty"),
        ("/models/m/rollout", b"{", 400, "BadRequestException", "not JSON"),
        ("/models/m/rollout", [], 400, "BadRequestException", 'such as {"to": "2.0"}'),
        (
            "/models/m/rollout",
            {"two": "2.0"},
            400,
            "BadRequestException",
            "unknown key 'two'; did you mean 'to'",
        ),
        ("/models/m/rollout", {**QUICK, "steps": [5]}, 400, "BadRequestException", "the last step is 5"),
        (
            "/models/m/rollout",
            {**QUICK, "to": "1.0"},
            400,
            "BadRequestException",
            "has all requests of model m already",
        ),
        (
            "/models/m/rollout",
            {**QUICK, "to": "9"},
            404,
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: m",
        ),
        ("/models/none/rollout", QUICK, 404, "ModelNotFoundException", "Model not found: none"),
        ("/models/none/rollout/abort", None, 404, "ModelNotFoundException", "Model not found: none"),
        (
            "/models/m/rollout/abort",
            None,
            404,
            "ResourceNotFoundException",
            "Model m has had no rollout; begin one",
        ),
        ("/models/m/rollout/stop", None, 404, "ResourceNotFoundException", "Requested resource is not found"),
        (
            "/models/m/rollout/abort/now",
            None,
            404,
            "ResourceNotFoundException",
            "Requested resource is not found",
        ),
    ],
)
def test_invalid_rollouts_are_refused(
    cluster: Cluster, path: str, document: Any, code: int, type: str, result: str
) -> None:
    before = cluster.state.registry
    assert_refused(cluster.ask("POST", path, document), code, type, result)
    assert cluster.state.registry is before


def test_methods(cluster: Cluster) -> None:
    assert_refused(
        cluster.ask("GET", "/models/m/rollout"), 404, "ResourceNotFoundException", "POST /models/m/rollout"
    )
    assert_refused(cluster.ask("GET", "/models/none/rollout"), 404, "ModelNotFoundException", "none")
    for method, path in (("PUT", ""), ("DELETE", ""), ("GET", "/abort"), ("PUT", "/pause")):
        assert_refused(cluster.ask(method, f"/models/m/rollout{path}"), 405, "MethodNotAllowedException")


def test_second_rollout_is_refused(cluster: Cluster) -> None:
    first = cluster.begin()
    result = "a rollout of version 2.0 is under way"
    assert_refused(
        cluster.ask("POST", "/models/m/rollout", QUICK),
        409,
        "ConflictStatusException",
        result,
        "rollout/abort",
    )
    assert cluster.rollout["id"] == first["id"]


def test_keys(cluster: Cluster) -> None:
    grants = {
        "watcher": KeyGrant(frozenset({"observe"})),
        "other": KeyGrant(frozenset({"observe", "manage"}), ("team-a",)),
        "owner": KeyGrant(frozenset({"observe", "manage"}), ("m",)),
    }
    cluster.open_port(AccessTable({sha256(key.encode()).digest(): grant for key, grant in grants.items()}))

    def ask(method: str, path: str, key: str, document: Any = None) -> int:
        return cluster.ask(method, path, document, headers={"authorization": f"Bearer {key}"})[0]

    assert ask("POST", "/models/m/rollout", "watcher", QUICK) == 400
    assert ask("POST", "/models/m/rollout", "other", QUICK) == 400
    assert "m" not in cluster.state.registry.rollouts
    assert ask("POST", "/models/m/rollout", "owner", QUICK) == 200
    assert ask("GET", "/models/m/rollout", "watcher") == 200
    assert ask("GET", "/models/m/rollout", "other") == 400
    assert ask("POST", "/models/m/rollout/abort", "watcher") == 400
    assert ask("POST", "/models/m/rollout/abort", "owner") == 200
    assert ModelRef("m", "2.0") in {spec.ref for spec in cluster.state.registry}


def gauges(cluster: Cluster) -> dict[tuple[str, ...], float]:
    """Return the samples of rollouts' metrics by name and label values, in the order of the labels' names."""
    cluster.loop.run_until_complete(cluster.owner.export())
    return {
        (name, *(value for _, value in labels)): value
        for name, labels, value in cluster.meters.samples()
        if "rollout" in name
    }


def test_metrics_of_a_rollout_that_is_rolled_back(cluster: Cluster) -> None:
    cluster.begin(guardrails={"error_rate": 0.02, "p99": None, "non_finite": None, "empty": None})
    ends = {
        ("torchrelay_rollouts_ended_total", "m", end): 0 for end in ("promoted", "rolled_back", "aborted")
    }
    starting = {("torchrelay_rollout_state", "m", "starting", "2.0"): 1}
    assert gauges(cluster) == ends | starting | {("torchrelay_rollout_percent", "m", "2.0"): 0}
    cluster.look()
    cluster.calls(2_000, lambda version, n: version == "2.0" and n % 10 == 0)
    running = gauges(cluster)
    assert running["torchrelay_rollout_state", "m", "running", "2.0"] == 1
    assert running["torchrelay_rollout_percent", "m", "2.0"] == 20
    assert running["torchrelay_rollout_guardrail_limit", "error_rate", "m", "2.0"] == 0.02
    assert ("torchrelay_rollout_guardrail", "candidate", "error_rate", "m", "2.0") not in running, (
        "not yet sent"
    )
    assert cluster.look()["state"] == "rolled_back"
    over = gauges(cluster)
    assert {key: value for key, value in over.items() if key[0] == "torchrelay_rollout_state"} == {
        ("torchrelay_rollout_state", "m", "rolled_back", "2.0"): 1
    }
    ended = over["torchrelay_rollout_ended_timestamp_seconds", "m", "rolled_back", "2.0"]
    assert ended == cluster.rollout["ended"]
    assert over["torchrelay_rollouts_ended_total", "m", "rolled_back"] == 1
    assert over["torchrelay_rollout_percent", "m", "2.0"] == 0
    assert over["torchrelay_rollout_guardrail", "candidate", "error_rate", "m", "2.0"] == pytest.approx(
        0.1, abs=0.01
    )
    assert over["torchrelay_rollout_guardrail", "baseline", "error_rate", "m", "2.0"] == 0
    assert 0.02 < over["torchrelay_rollout_guardrail_lower_bound", "error_rate", "m", "2.0"] < 0.1
    cluster.begin()
    assert ("torchrelay_rollout_state", "m", "rolled_back", "2.0") not in gauges(cluster)
    assert cluster.ask("POST", "/models/m/rollout/abort")[0] == 200
    assert gauges(cluster)["torchrelay_rollouts_ended_total", "m", "aborted"] == 1

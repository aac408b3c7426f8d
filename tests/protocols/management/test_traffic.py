"""Traffic policies through the HTTP APIs of both ports, over the real state and database."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from serve_app.control.registry import Registry
from serve_app.control.traffic import TrafficService
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.experiment import Arm, Experiment, ExperimentMetric
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.rollout import Rollout, RolloutPlan
from serve_app.domain.routing_table import VersionRoute
from serve_app.domain.traffic_policy import StickyKey
from serve_app.errors import QueueFull
from serve_app.protocols.torchserve import openapi
from serve_app.telemetry.metrics_aggregator import MetricsAggregator
from tests.support.service_api import ServiceApi

pytestmark = pytest.mark.integration


NINETY_TEN = {"policy": "weighted", "versions": {"1.0": 9000, "2.0": 1000}}
ALL_DEFAULT = {
    "policy": "default",
    "active": {"by": "policy", "default": "1.0", "versions": {"1.0": 10_000}},
}


class Cluster(ServiceApi):
    """Both ports' routes over one state; readers in ``alive`` never get a new table."""

    def __init__(self, folder: Path, management: Callable[..., Any], inference: Callable[..., Any]) -> None:
        self.port = inference(self._answer)
        versions = [("m", "1.0"), ("m", "2.0"), ("m", "3.0"), ("team-a", "1.0")]
        super().__init__(folder, management, dict.fromkeys(versions, 1))

    def create_service(self) -> TrafficService:
        return TrafficService(self.state)

    async def _answer(self, call: InferenceRequest) -> InferenceResponse | ResponseStream:
        """As the version that was chosen: at once, in pieces, or with an error, as the body asks."""
        version = self.port.backend.ref.version
        if call.inputs[0].value == b"full":
            raise QueueFull(call.model, call.version, "")

        async def pieces():
            yield version.encode()

        theirs = (("X-Model-Version", "theirs"), ("X-Torchrelay-Arm", "theirs"))
        if call.inputs[0].value == b"stream":
            return ResponseStream(
                InferenceResponse(b"", "text/plain", headers=theirs, version=version), pieces()
            )
        return InferenceResponse(version.encode(), headers=theirs, version=version)

    def put(self, registry: Registry) -> None:
        self.run(self.state.commit(registry))

    def infer(self, path: str = "/predictions/m", body: bytes = b"x", **headers: str) -> Any:
        # Whatever phase nobody looked at: each version has a replica.
        table = self.board.table
        models = {
            name: replace(row, versions={v: VersionRoute(v, "ready", 1) for v in row.versions})
            for name, row in table.models.items()
        }
        self.port.reader.update(replace(table, models=models))
        return self.port(
            "POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )


@pytest.fixture
def cluster(
    tmp_path: Path, management: Callable[..., Any], inference: Callable[..., Any]
) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, management, inference)
    yield cluster
    cluster.close()
    cluster.loop.close()


def assert_refused(response: tuple[int, Any], status: int, kind: str, message: str) -> None:
    code, result = response
    assert (code, result["code"], result["type"]) == (status, status, kind)
    assert message in result["message"]


class TestTheManagementAPI:
    def test_set_read_and_reset(self, cluster: Cluster) -> None:
        assert cluster.ask("GET", "/models/m/traffic") == (200, ALL_DEFAULT)
        in_force = {"by": "policy", "default": "1.0", "versions": {"1.0": 9000, "2.0": 1000}}
        reported = (200, {**NINETY_TEN, "active": in_force})
        assert cluster.ask("PUT", "/models/m/traffic", NINETY_TEN) == reported
        assert cluster.ask("GET", "/models/m/traffic/") == reported
        assert cluster.board.table.models["m"].policy.versions == NINETY_TEN["versions"]
        assert cluster.ask("DELETE", "/models/m/traffic") == (200, ALL_DEFAULT)
        assert cluster.ask("GET", "/models/m/traffic") == (200, ALL_DEFAULT)

    def test_all_fields_of_a_policy(self, cluster: Cluster) -> None:
        document = {
            "policy": "sticky",
            "versions": {"1.0": 5000, "2.0": 5000, "3.0": 0},
            "key": {"cookie": "user"},
            "salt": "summer",
            "header": "x-version",
            "labels": {"stable": "1.0", "canary": "2.0"},
            "shadow": {"version": "3.0", "percent": 10.0},
        }
        status, result = cluster.ask("PUT", "/models/m/traffic", document)
        assert status == 200
        assert {**result, "shadow": {key: result["shadow"][key] for key in ("version", "percent")}} == {
            **document,
            "active": {"by": "policy", "default": "1.0", "versions": {"1.0": 5000, "2.0": 5000}},
        }
        assert cluster.ask("PUT", "/models/m/traffic", result) == (200, result)

    def test_policy_survives_a_restart(self, cluster: Cluster) -> None:
        _, result = cluster.ask(
            "PUT", "/models/m/traffic", {**NINETY_TEN, "key": {"json": "$.u"}, "policy": "sticky"}
        )
        before = cluster.state.registry.models["m"]
        cluster.close()
        cluster.open()
        assert cluster.ask("GET", "/models/m/traffic") == (200, result)
        assert cluster.state.registry.models["m"].policy == before.policy
        assert cluster.board.table.models["m"].policy == before.policy

    @pytest.mark.parametrize(
        ("document", "status", "kind", "message"),
        [
            (b"", 400, "BadRequestException", "The body is empty; send a JSON document."),
            (b"{", 400, "BadRequestException", "The body is not JSON: "),
            ([1], 400, "BadRequestException", "A traffic policy is a JSON object"),
            ({"versions": {"1.0": 1}}, 400, "BadRequestException", "must sum to 10000"),
            ({"polcy": "default"}, 400, "BadRequestException", "unknown key 'polcy'; did you mean 'policy'?"),
            (
                {"shadow": {"version": "1.0"}},
                400,
                "BadRequestException",
                "shadow.version 1.0 answers every call",
            ),
            (
                {"labels": {"2.0": "1.0"}},
                400,
                "BadRequestException",
                "the label '2.0' is a version's name too",
            ),
            (
                {"versions": {"9": 10_000}},
                404,
                "ModelVersionNotFoundException",
                "Model version: 9 does not exist",
            ),
        ],
    )
    def test_a_policy_is_never_half_applied(self, cluster, document, status, kind, message) -> None:
        cluster.ask("PUT", "/models/m/traffic", NINETY_TEN)
        before = cluster.state.registry, cluster.board.table
        assert_refused(cluster.ask("PUT", "/models/m/traffic", document), status, kind, message)
        assert (cluster.state.registry, cluster.board.table) == before
        assert cluster.database.load() == before[0]

    def test_unknown_model_is_refused(self, cluster: Cluster) -> None:
        for method in ("GET", "PUT", "DELETE", "OPTIONS"):
            response = cluster.ask(method, "/models/none/traffic", {} if method == "PUT" else None)
            assert_refused(response, 404, "ModelNotFoundException", "Model not found: none")

    def test_other_methods(self, cluster: Cluster) -> None:
        assert cluster.ask("OPTIONS", "/models/m/traffic") == (200, openapi.describe_model_management("m"))
        for method in ("POST", "PATCH"):
            assert_refused(
                cluster.ask(method, "/models/m/traffic"), 405, "MethodNotAllowedException", "not allowed"
            )

    def test_a_change_that_is_late_somewhere_says_so(self, cluster: Cluster) -> None:
        cluster.alive = {"a reader that sleeps"}
        cluster.board.expect_readers(cluster.alive)
        status, result = cluster.ask("PUT", "/models/m/traffic", NINETY_TEN)
        assert (status, result) == (
            202,
            {"status": "Stored, and not yet in force at 1 of the replicas that run."},
        )
        assert cluster.ask("GET", "/models/m/traffic")[1]["policy"] == "weighted"

    def test_an_experiment_or_a_rollout_is_in_force_in_its_place(self, cluster: Cluster) -> None:
        cluster.ask("PUT", "/models/m/traffic", NINETY_TEN)
        plain = cluster.state.registry
        arms = {"a": Arm("1.0", 4000), "b": Arm("2.0", 3500), "c": Arm("1.0", 2500)}
        experiment = Experiment("colours", arms, (ExperimentMetric("t"),), "a", id="e1", model="m")
        cluster.put(replace(plain, experiments={"e1": experiment}))
        in_force = {"by": "experiment", "id": "e1", "default": "1.0", "versions": {"1.0": 6500, "2.0": 3500}}
        assert cluster.ask("GET", "/models/m/traffic") == (200, {**NINETY_TEN, "active": in_force})
        for method, document in (("PUT", NINETY_TEN), ("DELETE", None)):
            response = cluster.ask(method, "/models/m/traffic", document)
            assert_refused(response, 409, "ConflictStatusException", "stop it first: DELETE /experiments/e1")
        rollout = Rollout(RolloutPlan("2.0", steps=(5, 100)), "r1", "m", "1.0", "running", 0.0)
        cluster.put(replace(plain, rollouts={"m": rollout}))
        in_force = {"by": "rollout", "id": "r1", "default": "1.0", "versions": {"1.0": 9500, "2.0": 500}}
        assert cluster.ask("GET", "/models/m/traffic")[1]["active"] == in_force
        assert_refused(
            cluster.ask("DELETE", "/models/m/traffic"),
            409,
            "ConflictStatusException",
            "rollout of version 2.0",
        )

    def test_what_a_key_is_for(self, cluster: Cluster) -> None:
        rights = {"observe": {"observe"}, "manage": {"observe", "manage"}, "infer": {"infer"}}
        grants = {
            sha256(name.encode()).digest(): KeyGrant(frozenset(has), ("team-*",))
            for name, has in rights.items()
        }
        cluster.open_port(AccessTable(grants))

        def status(method: str, key: str, model: str = "team-a") -> int:
            headers = {"Authorization": f"Bearer {key}"}
            document = {"policy": "default"} if method == "PUT" else None
            return cluster.ask(method, f"/models/{model}/traffic", document, headers=headers)[0]

        assert [status("GET", key) for key in ("observe", "manage", "infer", "?")] == [200, 200, 400, 400]
        for method in ("PUT", "DELETE"):
            assert [status(method, key) for key in ("observe", "manage", "infer")] == [400, 200, 400]
        assert [status(method, "manage", "m") for method in ("GET", "PUT", "DELETE")] == [400] * 3
        assert cluster.ask("OPTIONS", "/models/m/traffic")[0] == 200


class TestWhatCallersMeet:
    def test_shares_and_the_version_that_answered(self, cluster: Cluster) -> None:
        cluster.ask("PUT", "/models/m/traffic", {"versions": {"1.0": 8000, "2.0": 2000}})
        cluster.port.compares = False  # the first version is random
        responses = [cluster.infer() for _ in range(100)]
        given = Counter(response["x-model-version"] for response in responses)
        assert set(given) == {"1.0", "2.0"} and abs(given["2.0"] - 20) <= 2  # whatever the random start
        assert all(response.body.decode() == response["x-model-version"] for response in responses)
        assert {line[8] for line in cluster.port.access_log} == {"1.0", "2.0"}

    def test_sticky_key_keeps_its_version(self, cluster: Cluster) -> None:
        halves = {"1.0": 5000, "2.0": 5000}
        cluster.ask("PUT", "/models/m/traffic", {"key": {"header": "X-User"}, "versions": halves})
        given = {
            who: {cluster.infer(x_user=who)["x-model-version"] for _ in range(5)} for who in "abcdefghijkl"
        }
        assert {len(versions) for versions in given.values()} == {1}
        assert set.union(*given.values()) == {"1.0", "2.0"}

    def test_labels_and_testers(self, cluster: Cluster) -> None:
        document = {
            "versions": {"1.0": 10_000},
            "header": "X-Try",
            "labels": {"canary": "2.0", "next": "3.0"},
        }
        cluster.ask("PUT", "/models/m/traffic", document)
        requested = [
            cluster.infer(),
            cluster.infer("/predictions/m/canary"),
            cluster.infer("/explanations/m/next"),
            cluster.infer(x_try="2.0"),
            cluster.infer("/v1/models/m:predict", x_try="next"),
            cluster.infer("/predictions/m/1.0", x_try="2.0"),
            cluster.infer("/m/canary/predict"),
        ]
        versions = ["1.0", "2.0", "3.0", "2.0", "3.0", "1.0", "2.0"]
        assert [response["x-model-version"] for response in requested] == versions
        assert [line[8] for line in cluster.port.access_log] == versions
        total = MetricsAggregator()
        total.put("here", cluster.port.meters.report())
        counted = {v: total.total("torchrelay_requests", version=v) for v in ("1.0", "2.0", "3.0", "canary")}
        assert counted == {"1.0": 2, "2.0": 3, "3.0": 2, "canary": 0}

    def test_unknown_label_or_version_is_refused(self, cluster: Cluster) -> None:
        cluster.ask("PUT", "/models/m/traffic", {"header": "x-try", "labels": {"canary": "2.0"}})
        for response in (cluster.infer("/predictions/m/beta"), cluster.infer(x_try="beta")):
            assert response.status == 404
            assert json.loads(response.body)["message"] == "Model version: beta does not exist for model: m"
            assert response["x-model-version"] is None

    @pytest.mark.parametrize("path", ["/predictions/m", "/predictions/m/canary"])
    def test_errors_and_streams_have_the_version_header(self, cluster: Cluster, path: str) -> None:
        cluster.ask("PUT", "/models/m/traffic", {"versions": {"2.0": 10_000}, "labels": {"canary": "2.0"}})
        full, stream = cluster.infer(path, b"full"), cluster.infer(path, b"stream")
        assert (full.status, full["x-model-version"]) == (503, "2.0")
        assert (stream.status, stream["x-model-version"], stream["ts_stream_next"]) == (200, "2.0", "true")
        assert [line[8] for line in cluster.port.access_log] == ["2.0", "2.0"]
        assert full["x-torchrelay-arm"] is stream["x-torchrelay-arm"] is None

    @pytest.mark.parametrize(("body", "status"), [(b"x", 200), (b"stream", 200), (b"full", 503)])
    def test_response_of_an_experiment_names_its_arm(
        self, cluster: Cluster, body: bytes, status: int
    ) -> None:
        arms = {"a": Arm("1.0", 5000), "new idea": Arm("2.0", 5000)}
        experiment = Experiment(
            "e", arms, (ExperimentMetric("t"),), "a", StickyKey(header="x-user"), id="e1", model="m"
        )
        cluster.put(replace(cluster.state.registry, experiments={"e1": experiment}))
        reported = set()
        for who in "abcdefghijkl":
            response = cluster.infer(body=body, x_user=who)
            assert response.status == status
            reported.add((response["x-model-version"], response["x-torchrelay-arm"]))
        assert reported == {("1.0", "e1/a"), ("2.0", "e1/new idea")}
        for response in (cluster.infer(body=body), cluster.infer("/predictions/m/2.0", body, x_user="a")):
            assert response["x-torchrelay-arm"] is None


class TestTheSettings:
    def test_configured_policies_apply_at_startup(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        cluster.run(
            cluster.owner.apply_declared_policies({"m": NINETY_TEN, "none": NINETY_TEN, "team-a": NINETY_TEN})
        )
        assert cluster.ask("GET", "/models/m/traffic")[1]["policy"] == "weighted"
        assert caplog.messages == [
            "control.traffic.none is not in force: Model not found: none",
            "control.traffic.team-a is not in force: Model version: 2.0 does not exist for model: team-a",
        ]

    def test_what_is_changed_later_stays_changed_over_starts(self, cluster: Cluster) -> None:
        cluster.run(cluster.owner.apply_declared_policies({"m": NINETY_TEN}))
        cluster.ask("DELETE", "/models/m/traffic")
        cluster.close()
        cluster.open()
        cluster.run(cluster.owner.apply_declared_policies({"m": NINETY_TEN}))
        assert cluster.ask("GET", "/models/m/traffic") == (200, ALL_DEFAULT)
        cluster.run(cluster.owner.apply_declared_policies({"m": {"labels": {"canary": "2.0"}}}))
        assert cluster.ask("GET", "/models/m/traffic")[1]["labels"] == {"canary": "2.0"}

    def test_a_reader_that_is_late_does_not_keep_the_server_from_starting(self, cluster: Cluster) -> None:
        cluster.alive = {"a reader that sleeps"}
        cluster.board.expect_readers(cluster.alive)
        cluster.run(cluster.owner.apply_declared_policies({"m": NINETY_TEN}))
        assert cluster.ask("GET", "/models/m/traffic")[1]["policy"] == "weighted"


def test_the_inference_port_offers_them_where_it_has_the_management_api(
    inference: Callable[..., Any],
) -> None:
    app = inference(serve_management=True)
    assert "/models/{model_name}/traffic" in json.loads(app("OPTIONS", "/").body)["paths"]

"""Versions whose number of replicas a query of Prometheus or an external program determines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from serve_app.control import scaling
from serve_app.control.lifecycle_events import EventLog
from serve_app.control.placement_check import limit_to_cluster
from serve_app.control.reconciler import DeployAction, plan
from serve_app.control.registry import DesiredState, Registry
from serve_app.control.registry_changes import register
from serve_app.control.replica_health import HealthTracker, ObservedApp
from serve_app.control.scaling import PrometheusClient, QueryFailed, ReplicaScaler, check_policy
from serve_app.deployments.options import autoscaling_config
from serve_app.domain.autoscaling import Autoscaling, read, read_replicas
from serve_app.domain.model import EventQuery, ModelRef, ModelSpec, Registration
from serve_app.errors import BadRequest, ConfigurationError, Conflict, VersionNotFound
from serve_app.settings import ControlSettings, load
from serve_app.telemetry import audit_log
from serve_app.telemetry.metrics import Meters
from tests.support import prometheus_server
from tests.support.archives import ECHO, make_archive
from tests.support.control_services import ControlServices
from tests.support.http_server import dripping, serving
from tests.support.prometheus_server import running_prometheus

QUERIED = Autoscaling("prometheus", query="jobs", target_value=10.0)
SPEC = ModelSpec("m", "1", "m.mar", "d" * 64, "", min_workers=1, max_workers=4, autoscaling=QUERIED)
EXTERNAL = SPEC.with_(autoscaling=Autoscaling("external"))
APP = SPEC.ref.app


class Scaled:
    """A scaler of one version, with the values of its query and the time that a test sets."""

    def __init__(self, spec: ModelSpec = SPEC, observed: int | None = None) -> None:
        self.now, self.value = 1000.0, 0.0
        self.problem = ""
        self.events, self.health, self.meters = EventLog(), HealthTracker(), Meters()
        self.changes = 0
        self.scaler = ReplicaScaler(
            ControlSettings(), self.health, self.events, self.meters, self._query, lambda: self.now
        )
        self.registry = register(Registry(), spec)
        self.scaler.get_registry = lambda: self.registry
        self.scaler.on_change = self._count
        self.states = {APP: DesiredState(spec, "/predictions/m")}
        self.observed = {} if observed is None else {APP: ObservedApp(APP, None, observed, {}, 0, "", "", ())}
        self.apply()

    async def _query(self, query: str) -> float:
        assert query == "jobs"
        if self.problem:
            raise QueryFailed(self.problem)
        return self.value

    def _count(self) -> None:
        self.changes += 1

    def apply(self) -> int | None:
        return self.scaler.apply(self.states, self.observed)[APP].replicas

    def measure(self, value: float, seconds: float = 0.0) -> int | None:
        """Return the number of replicas after a query ``seconds`` later."""
        self.now += seconds
        self.value = value
        asyncio.run(self.scaler.measure())
        return self.apply()


class TestQuery:
    def test_the_number_follows_the_value_after_its_delays(self) -> None:
        scaled = Scaled()
        assert scaled.measure(25) == 1
        assert scaled.measure(25, 2.9) == 1
        assert scaled.measure(25, 0.2) == 3
        assert scaled.changes == 1
        assert scaled.measure(1e9, 5) == 3  # a new change has to last again
        assert scaled.measure(1e9, 5) == 4
        assert scaled.measure(10, 59) == 4
        assert scaled.measure(35, 30) == 4  # not fewer any more
        assert scaled.measure(10, 59) == 4
        assert scaled.measure(10, 59) == 4
        assert scaled.measure(10, 2) == 1

    @pytest.mark.parametrize(
        ("value", "replicas"), [(-5, 1), (0, 1), (10, 1), (10.5, 2), (40, 4), (1e300, 4)]
    )
    def test_the_number_is_within_the_bounds(self, value: float, replicas: int) -> None:
        scaled = Scaled()
        scaled.measure(value)
        assert scaled.measure(value, 100) == replicas

    @pytest.mark.parametrize(("value", "replicas"), [(-1e308, 1), (1e308, 4)])
    def test_a_quotient_beyond_a_double_is_within_the_bounds(self, value: float, replicas: int) -> None:
        scaled = Scaled(SPEC.with_(autoscaling=replace(QUERIED, target_value=0.1)))
        scaled.measure(value)
        assert scaled.measure(value, 100) == replicas

    def test_rounding_adds_no_replica(self) -> None:
        scaled = Scaled(SPEC.with_(autoscaling=replace(QUERIED, target_value=0.1)))
        scaled.measure(0.1 + 0.2)
        assert scaled.measure(0.1 + 0.2, 10) == 3

    def test_a_failed_query_keeps_the_number_and_is_one_event(self) -> None:
        scaled = Scaled(observed=3)
        scaled.problem = "status 400: parse error"
        for _ in range(3):
            assert scaled.measure(0, 100) == 3
        [event] = scaled.events.list_events(EventQuery(stage="failed"), ("*",))
        message = "The autoscaling query of m 1 failed, and 3 replicas are kept: status 400: parse error"
        assert dict(event.details) == {"reason": "query_failed", "message": message}
        assert scaled.health._last_errors[SPEC.ref][0] == message
        labels = (("model", "m"), ("version", "1"))
        assert scaled.meters.samples() == [("torchrelay_autoscaling_query_failures_total", labels, 3.0)]
        scaled.problem = ""
        assert scaled.measure(40, 1) == 3
        assert scaled.measure(40, 5) == 4
        scaled.problem = "again"
        scaled.measure(0)
        assert len(scaled.events.list_events(EventQuery(stage="failed"), ("*",))) == 2

    def test_a_new_start_continues_with_the_number_of_ray_serve(self) -> None:
        assert Scaled(observed=3).apply() == 3
        assert Scaled(observed=9).apply() == 4
        assert Scaled().apply() == 1

    def test_removed_versions_are_forgotten_and_other_policies_left_alone(self) -> None:
        scaled = Scaled(observed=3)
        plain = {APP: DesiredState(SPEC.with_(autoscaling=None), None)}
        assert scaled.scaler.apply(plain, {})[APP] is plain[APP]
        scaled.observed = {}
        assert scaled.apply() == 1


class TestExternal:
    def test_a_program_sets_the_number_within_the_bounds(self) -> None:
        scaled = Scaled(EXTERNAL)
        scaled.scaler.count_running = lambda ref: 1

        async def main() -> None:
            audit_log.start_operation("set_replicas", "m")
            for requested, chosen in ((3, 3), (99, 4), (0, 1)):
                document = await scaled.scaler.set_replicas("m", None, requested)
                assert document == {"replicas": chosen, "running": 1, "min": 1, "max": 4}
                assert scaled.apply() == chosen
                assert not audit_log.current_operation().is_recorded
            await scaled.scaler.set_replicas("m", "1", 1)
            assert audit_log.current_operation().is_recorded, "a repeated number is no change"

        asyncio.run(main())
        assert scaled.changes == 3
        assert scaled.measure(40, 100) == 1, "no query has a part in it"

    @pytest.mark.parametrize(
        ("spec", "why"),
        [
            (SPEC, "is not 'external': it is 'prometheus'"),
            (SPEC.with_(autoscaling=None), "it is 'requests'"),
            (SPEC.with_(max_workers=1), "it has a fixed number of workers"),
        ],
    )
    def test_versions_with_another_policy_are_refused(self, spec: ModelSpec, why: str) -> None:
        scaled = Scaled(EXTERNAL)
        scaled.registry = register(Registry(), spec)
        with pytest.raises(Conflict, match=why):
            asyncio.run(scaled.scaler.set_replicas("m", None, 2))
        with pytest.raises(VersionNotFound):
            asyncio.run(scaled.scaler.set_replicas("m", "9", 2))

    @pytest.mark.parametrize("document", [5, {}, {"replicas": -1}, {"replicas": "many"}, {"replica": 1}])
    def test_invalid_numbers_are_refused(self, document: Any) -> None:
        with pytest.raises(BadRequest, match="replicas"):
            read_replicas(document)

    def test_a_registered_version_is_scaled_through_the_control_plane(self, tmp_path: Path) -> None:
        async def main() -> None:
            services = ControlServices(tmp_path)
            await services.start()
            try:
                config = {"minWorkers": 1, "maxWorkers": 3, "autoscaling": {"policy": "external"}}
                archive = make_archive(tmp_path, "m", ECHO, config=config)
                (tmp_path / "model_store" / archive.name).write_bytes(archive.read_bytes())
                await services.control.register(Registration(archive.name))
                assert services.serve.apps["m--1.0"].replicas == 1
                answer = await services.control.set_replicas("m", "1.0", {"replicas": 3})
                assert (answer["replicas"], answer["max"]) == (3, 3)
                while services.reconcile_loop.count_running(ModelRef("m", "1.0")) < 3:
                    await services.reconcile_loop.wait_for_round()
                assert services.serve.apps["m--1.0"].replicas == 3
            finally:
                await services.close()

        asyncio.run(asyncio.wait_for(main(), 120))


class TestPlan:
    def test_the_number_is_deployed_without_ray_serves_autoscaler(self) -> None:
        state = DesiredState(SPEC, None, 3)
        running = ObservedApp(APP, None, 1, {}, 0, "RUNNING", "", ())
        [[action]] = plan({APP: state}, {APP: running}, lambda state: {}, autoscaling_config)
        assert isinstance(action, DeployAction)
        assert (action.desired.min_replicas, action.scaling) == (3, None)
        there = replace(running, replicas=3)
        assert plan({APP: state}, {APP: there}, lambda state: {}, autoscaling_config) == []

    def test_a_version_that_ray_serve_has_scaled_keeps_its_configuration_with_equal_bounds(self) -> None:
        before = autoscaling_config(SPEC.with_(autoscaling=None), False)
        running = ObservedApp(APP, None, 2, {}, 0, "RUNNING", "", (), before)
        state = DesiredState(SPEC, None, 3)
        [[action]] = plan({APP: state}, {APP: running}, lambda state: {}, autoscaling_config)
        assert isinstance(action, DeployAction) and action.scaling is not None
        assert (action.scaling["min_replicas"], action.scaling["max_replicas"]) == (3, 3)

    def test_no_more_are_requested_than_the_cluster_holds(self) -> None:
        spec = SPEC.with_(max_workers=500, num_cpus=1.0)
        [limited] = limit_to_cluster(
            {APP: DesiredState(spec, None, 400)}, {}, {"a": {"CPU": 2.0, "memory": 2.0**40}}
        ).values()
        assert limited == DesiredState(spec, None, 2 + 8)


class TestPolicy:
    @pytest.mark.parametrize(
        ("document", "why"),
        [
            ({"policy": "prometheus"}, "needs query, in PromQL, and target_value"),
            ({"policy": "prometheus", "query": "x"}, "needs query"),
            ({"policy": "prometheus", "query": "x", "target_value": 0}, "target_value is a number above 0"),
            ({"policy": "prometheus", "query": "x" * 5000, "target_value": 1}, "at most 4096"),
            ({"query": "x"}, "query is for the policy 'prometheus'"),
            ({"policy": "external", "target_value": 2}, "target_value is for the policy 'prometheus'"),
            ({"policy": "external", "target_p95_ms": 2}, "target_p95_ms is for the policy 'latency'"),
        ],
    )
    def test_invalid_documents_are_refused(self, document: Any, why: str) -> None:
        with pytest.raises(BadRequest, match=why):
            read(document)

    def test_another_policy_drops_the_keys_of_the_first(self) -> None:
        assert read({"policy": "external"}, QUERIED) == Autoscaling("external")
        assert read({"policy": "latency", "target_p95_ms": 5}, QUERIED).query is None

    def test_a_server_without_prometheus_and_a_version_without_workers_are_refused(self) -> None:
        with pytest.raises(BadRequest, match=r"set control\.prometheus_url"):
            check_policy(SPEC, ControlSettings())
        with pytest.raises(BadRequest, match=r"set minWorkers \(min_worker\) to 1"):
            check_policy(EXTERNAL.with_(min_workers=0), ControlSettings())
        check_policy(SPEC, ControlSettings(prometheus_url="http://p:9090"))
        check_policy(EXTERNAL, ControlSettings())
        check_policy(SPEC.with_(max_workers=1), ControlSettings())

    def test_the_token_is_a_secret_of_the_server(self) -> None:
        settings = load({"control": {"prometheus_url": "http://a:b@p", "prometheus_token": "env:TOKEN"}})
        assert "TOKEN" in settings.secret_env_vars
        assert settings.without_secrets().control.prometheus_url == ""
        with pytest.raises(ConfigurationError, match=r"control\.prometheus_token: there is no token"):
            PrometheusClient(settings.control, {})


def respond(status: int, body: Any, requests: list[dict[str, Any]] | None = None) -> Callable[[Any], None]:
    """Return a server's answer with a status and a JSON document, or bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    def answer(handler: Any) -> None:
        form = handler.rfile.read(int(handler.headers["content-length"])).decode()
        if requests is not None:
            requests.append(
                {
                    "path": handler.path,
                    "query": parse_qs(form)["query"],
                    "authorization": handler.headers["authorization"],
                }
            )
        handler.send_response(status)
        handler.send_header("content-length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def result(kind: str, value: Any) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": value}}


@pytest.fixture
def long_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a query take as long as a busy machine needs for it."""
    monkeypatch.setattr(scaling, "_TIMEOUT_S", 60.0)


@pytest.mark.usefixtures("long_timeout")
class TestClient:
    def test_a_query_is_sent_with_its_token_and_has_one_value(self) -> None:
        requests: list[dict[str, Any]] = []
        body = result("vector", [{"metric": {}, "value": [1.5, "42.5"]}])
        with serving(respond(200, body, requests)) as address:
            settings = ControlSettings(prometheus_url=f"{address}/prom/", prometheus_token="env:T")
            client = PrometheusClient(settings, {"T": "abc"})
            assert asyncio.run(client.query("sum(jobs)")) == 42.5
        expected = {"path": "/prom/api/v1/query", "query": ["sum(jobs)"], "authorization": "Bearer abc"}
        assert requests == [expected]

    @pytest.mark.parametrize(
        ("status", "body", "why"),
        [
            (200, result("vector", []), r"there is no value; .* or vector\(0\)"),
            (200, result("vector", [{"value": [1, "1"]}] * 2), "there are 2 values; aggregate them"),
            (200, result("matrix", []), "the result is a matrix"),
            (200, result("scalar", [1, "NaN"]), "the value is NaN"),
            (200, result("scalar", [1, "+Inf"]), "the value is \\+Inf"),
            (200, result("scalar", 5), "the response is not that of Prometheus"),
            (200, {"status": "success"}, "the response is not that of Prometheus"),
            (400, {"status": "error", "error": "parse error"}, "status 400: parse error"),
            (503, b"<html>", r"not Prometheus' JSON \(status 503\)"),
            (200, [1], "status 200: no reason"),
            (200, b" " * (2 << 20), "has more than 1048576 bytes"),
        ],
    )
    def test_other_responses_are_failures(self, status: int, body: Any, why: str) -> None:
        with serving(respond(status, body)) as address:
            client = PrometheusClient(ControlSettings(prometheus_url=address))
            with pytest.raises(QueryFailed, match=why):
                asyncio.run(client.query("jobs"))

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "nonsense", "http://[::1"])
    def test_a_server_that_is_not_there_is_a_failure(self, url: str) -> None:
        with pytest.raises(QueryFailed):
            asyncio.run(PrometheusClient(ControlSettings(prometheus_url=url)).query("jobs"))

    def test_slow_headers_are_a_failure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(scaling, "_TIMEOUT_S", 0.5)
        with dripping() as address, pytest.raises(QueryFailed, match="does not answer"):
            asyncio.run(PrometheusClient(ControlSettings(prometheus_url=address)).query("jobs"))

    def test_an_address_that_was_removed_is_named(self) -> None:
        """A version that was registered before keeps its policy."""
        with pytest.raises(QueryFailed, match=r"control\.prometheus_url is not set"):
            asyncio.run(PrometheusClient(ControlSettings()).query("jobs"))


@pytest.fixture(scope="module")
def prometheus() -> Iterator[str]:
    if not prometheus_server.installed:
        pytest.skip(prometheus_server.MISSING)
    with running_prometheus() as server:
        server.wait("vector(1)")
        yield str(server._http.base_url).removesuffix("/api/v1/").removesuffix("/api/v1")


@pytest.mark.usefixtures("long_timeout")
class TestPrometheus:
    def test_a_real_server_answers(self, prometheus: str) -> None:
        client = PrometheusClient(ControlSettings(prometheus_url=prometheus))
        assert asyncio.run(client.query("vector(7)")) == 7
        assert asyncio.run(client.query("scalar(vector(2.5))")) == 2.5
        assert asyncio.run(client.query("sum(absent_series) or vector(0)")) == 0
        for query, why in (
            ("sum(absent_series)", "there is no value"),
            ("vector(0) / 0", "the value is NaN"),
            ("sum(", "status 400: .*parse error"),
        ):
            with pytest.raises(QueryFailed, match=why):
                asyncio.run(client.query(query))

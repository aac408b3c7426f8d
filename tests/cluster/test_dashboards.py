"""A real Prometheus has data for each panel of each dashboard, once every feature of a server was used."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ray.dashboard.modules.metrics.dashboards.serve_dashboard_panels import serve_dashboard_config
from ray.dashboard.modules.metrics.dashboards.serve_deployment_dashboard_panels import (
    serve_deployment_dashboard_config,
)

from serve_app.client import Client
from serve_app.domain.recycling import MIN_REQUESTS
from serve_app.proto import inference_pb2, inference_pb2_grpc
from tests.support import prometheus_server
from tests.support.archives import ECHO, archive_language_model, make_archive, says
from tests.support.hf_folders import make_tokenizer, save_llama
from tests.support.ports import free_port
from tests.support.prometheus_server import Prometheus, running_prometheus
from tests.support.server import ROOT, Server

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.own_server,
    pytest.mark.nightly,
    pytest.mark.skipif(not prometheus_server.installed, reason=prometheus_server.MISSING),
]

DASHBOARDS = {
    path.stem: json.loads(path.read_text())
    for path in (ROOT / "cluster/monitoring/dashboards").glob("*.json")
}
GPU = "gpu"  # this machine has none: its queries must be valid
KEYS = {"clients": "infer", "limited": "infer", "operators": "manage"}  # each key is its name
WEBHOOK = f"http://127.0.0.1:{free_port()}/"  # nobody listens there
FAILS = """
def handle(data, context):
    raise ValueError("it always fails")
"""
SOMETIMES = """
def handle(data, context):
    return None if data is None else [1 / 0 if bytes(row["body"]) == b"fail" else "ok" for row in data]
"""
SUM = """
def handle(data, context):
    return None if data is None else ["0"] * len(data)
"""
EXPERIMENT = {
    "name": "panels",
    "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "2.0", "weight": 5000}},
    "baseline": "a",
    "metrics": [{"name": "seconds"}],
}
GUARDRAILS = {"error_rate": 0.01, "p99": None, "non_finite": None, "empty": None}
ROLLOUT = {"to": "2.0", "steps": [50, 100], "bake_s": 600, "min_calls": 0, "guardrails": GUARDRAILS}


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server with keys, traces that no collector receives, and webhooks that nobody answers."""
    keys = [
        {"name": name, "key": f"sha256:{sha256(name.encode()).hexdigest()}", "role": role}
        for name, role in KEYS.items()
    ]
    keys[1]["limits"] = {"requests_per_second": 0.001, "burst": 1}  # type: ignore[assignment]
    server = Server(
        tmp_path_factory.mktemp("monitored"),
        env={
            "RAY_enable_metrics_collection": "1",
            "RAY_metrics_report_interval_ms": "1000",
            "RELAY_WEBHOOK_SECRET": "secret",
        },
        auth={"mode": "on", "keys": keys},
        telemetry={
            "otlp_endpoint": f"http://127.0.0.1:{free_port()}",
            "otlp_timeout": 1,
            "trace_sampling": 1,
            "system_metrics_period": 1,
        },
        async_predictions={
            "webhook_urls": [WEBHOOK],
            "webhook_secret": "env:RELAY_WEBHOOK_SECRET",
            "webhook_attempts": 1,
            "webhook_timeout": 1,
        },
    )
    server.http.headers["authorization"] = "Bearer clients"
    server.management.headers["authorization"] = "Bearer operators"
    server.client = Client(server.process.inference, server.process.management, token="operators")
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def prometheus(monitored: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    address = monitored.process.metrics.removeprefix("http://").removesuffix("/metrics")
    folder = tmp_path_factory.mktemp("archives")
    with running_prometheus(torchrelay=address, ray=find_ray_metrics(monitored)) as prometheus:
        register(monitored, folder)
        for send in (send_predictions, send_special_requests, run_experiment, run_rollout, run_shadow):
            send(monitored)
        # A rate needs samples before and after a change.
        prometheus.wait("torchrelay_workflow_steps_total and on () torchrelay_shadow_requests_total")
        for send in (send_failures, send_special_requests, run_shadow):
            send(monitored)
        yield prometheus


def find_ray_metrics(server: Server) -> str:
    """Return the address at which the node's agent serves Ray's metrics; Ray chooses the port."""

    def find() -> str:
        [agent] = server.actors("DashboardAgent")
        for connection in agent.net_connections("tcp"):
            address = f"127.0.0.1:{connection.laddr.port}"
            with contextlib.suppress(httpx.HTTPError):
                if "\nray_" in httpx.get(f"http://{address}/metrics", timeout=20).text:
                    return address
        return ""

    address: str = server.wait(find, description="Ray's metrics")
    return address


def register(server: Server, folder: Path) -> None:
    for name, version, handler in (
        ("echo", "1.0", ECHO),
        ("some", "1.0", SOMETIMES),
        ("split", "1.0", says("1.0")),
        ("split", "2.0", says("2.0")),
        ("shadowed", "1.0", ECHO),
        ("shadowed", "2.0", ECHO),
        ("rolled", "1.0", says("1.0")),
        ("rolled", "2.0", FAILS.replace("raise", "if data: raise")),
    ):
        assert server.register(make_archive(folder, name, handler, version)).status_code == 200, name
    config = {"response_cache": {}, "recycling": {"max_requests": MIN_REQUESTS}}
    assert server.register(make_archive(folder, "stored", ECHO, config=config)).status_code == 200
    stateful = make_archive(folder, "adder", SUM, config={"sequenceBatching": True, "maxNumSequence": 4})
    assert server.register(stateful).status_code == 200
    assert server.register(make_archive(folder, "broken", FAILS)).status_code == 500
    language_model = save_llama(folder / "llama")
    make_tokenizer().save_pretrained(language_model)
    engine = {"num_blocks": 32, "page_size": 16, "max_batch_tokens": 64}
    poet = archive_language_model(folder, "poet", language_model, **engine)
    assert server.register(poet).status_code == 200
    workflow = "name: twice\nsteps:\n  one: {model: echo}\n  two: {model: echo}\n"
    yaml_type = {"content-type": "application/yaml"}
    assert server.management.post("/workflows", content=workflow, headers=yaml_type).status_code == 200


def send_failures(server: Server) -> None:
    answers = [server.http.post("/predictions/some", content=b"fail") for _ in range(10)]
    assert {answer.status_code for answer in answers} == {503}


def send_predictions(server: Server) -> None:
    send_failures(server)
    for _ in range(10):
        assert server.http.post("/predictions/some", content=b"x").status_code == 200
    for route in ("/predictions/echo", "/%70redictions/echo"):
        assert server.http.post(route, content=b"x").status_code == 200
    limited = [
        server.http.post("/predictions/echo", content=b"x", headers={"authorization": "Bearer limited"})
        for _ in range(3)
    ]
    assert [answer.status_code for answer in limited] == [200, 429, 429]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceAPIsServiceStub(channel)
        request = inference_pb2.PredictionsRequest(model_name="echo", input={"data": b"x"})
        metadata = [("authorization", "Bearer clients")]
        assert stub.Predictions(request, metadata=metadata, timeout=60).prediction == b"x"
        with pytest.raises(grpc.RpcError):
            request.model_name = "unknown"
            stub.Predictions(request, metadata=metadata, timeout=60)


def send_special_requests(server: Server) -> None:
    """Use sequences, workflows, async predictions with a webhook, a language model and stored responses."""
    for body in ("x", *map(str, range(MIN_REQUESTS)), "x"):
        assert server.http.post("/predictions/stored", content=body).text == body
    name, start, end = (f"ts_request_sequence_{word}" for word in ("id", "start", "end"))
    for headers in ({start: "true"}, {end: "true"}):
        answer = server.http.post("/predictions/adder", content=b"1", headers={name: "s1", **headers})
        assert answer.status_code == 200, answer.text
    assert server.http.post("/predictions/twice", content=b"x").status_code == 200
    webhook = {"prefer": "respond-async", "x-torchrelay-webhook": WEBHOOK}
    assert server.http.post("/predictions/echo", content=b"x", headers=webhook).status_code == 202
    chat = {"model": "poet", "prompt": "the cat sat on the mat", "max_tokens": 8}
    for _ in range(3):
        answer = server.http.post("/v1/completions", json=chat)
        assert answer.status_code == 200, answer.text


def run_experiment(server: Server) -> None:
    id = server.client.start_experiment("split", EXPERIMENT)["id"]
    for _ in range(400):
        server.http.post("/predictions/split", content=b"x")

    def is_known() -> bool:
        return server.client.experiment(id)["metrics"]["seconds"]["differences"]["b"]["low"] is not None

    server.wait(is_known, description="the bounds of the difference")


def run_rollout(server: Server) -> None:
    server.client.start_rollout("rolled", ROLLOUT)

    def is_rolled_back() -> bool:
        for _ in range(20):
            server.http.post("/predictions/rolled", content=b"x")
        return bool(server.client.rollout("rolled")["state"] == "rolled_back")

    server.wait(is_rolled_back, description="the rollback")


def run_shadow(server: Server) -> None:
    server.client.set_traffic("shadowed", {"shadow": {"version": "2.0", "percent": 100}})
    for _ in range(20):
        assert server.http.post("/predictions/shadowed", content=b"x").text == "x"


def panels(*names: str) -> list[Any]:
    return [
        pytest.param(name, panel, id=f"{name}: {panel['title']}")
        for name in names
        for panel in DASHBOARDS[name]["panels"]
        if panel["type"] != "row"
    ]


def substitute(expression: str) -> str:
    """Return a query with the values of Grafana's variables."""
    return re.sub(r"\$__rate_interval", "5m", expression).replace("$model", ".*")


@pytest.mark.parametrize(("name", "panel"), panels(*sorted(DASHBOARDS.keys() - {GPU})))
def test_each_query_of_a_panel_has_data(prometheus: Prometheus, name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        # A comparison drops NaN, which a ratio is until its counters have changed between two scrapes.
        series = prometheus.wait(f"({substitute(target['expr'])}) >= -Inf")
        legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"])) - {"instance"}
        assert legend <= series[0]["metric"].keys(), (
            f"a label of the legend is absent: {target['legendFormat']}"
        )


@pytest.mark.parametrize(("name", "panel"), panels(GPU))
def test_each_query_of_gpus_is_valid(prometheus: Prometheus, name: str, panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        prometheus.query(substitute(target["expr"]))


def test_each_variable_has_values(prometheus: Prometheus) -> None:
    for name, dashboard in DASHBOARDS.items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["query"]["query"])[0]
                assert prometheus.wait(f'{metric}{{{label}!=""}}'), name


def test_alerts_of_a_running_server(prometheus: Prometheus) -> None:
    """The rollback fires its alert; those that need a cause which is not here are silent."""
    [alert] = prometheus.wait('ALERTS{alertname="TorchrelayRolloutRolledBack", alertstate="firing"}')
    assert (alert["metric"]["model"], alert["metric"]["version"]) == ("rolled", "2.0")
    assert prometheus.wait('model_version:torchrelay_failures:ratio_rate5m{model="some"} > 0')
    assert not prometheus.query('ALERTS{alertname=~"TorchrelayMetricsDown|TorchrelaySampleRatioMismatch"}')


# Ray has no data of these here: its autoscaler does not run, nothing is multiplexed, and there is no GPU. Ray
# sets the number of tasks in back-off only when its router waits.
ABSENT = r"autoscaler_|multiplexed|gpus_utilization|gram_used|scheduling_tasks_in_backoff"
RAY_DASHBOARDS = (serve_dashboard_config, serve_deployment_dashboard_config)
RAY_QUERIES = [
    pytest.param(
        target.expr.format(global_filters='ray_io_cluster=~".*"'), id=f"{panel.title} {target.legend}"
    )
    for dashboard in RAY_DASHBOARDS
    for panel in dashboard.panels
    for target in panel.targets
    if not re.search(ABSENT, target.expr)
]


@pytest.mark.parametrize("expression", RAY_QUERIES)
def test_each_query_of_rays_serve_dashboards_has_data(prometheus: Prometheus, expression: str) -> None:
    series = prometheus.wait(re.sub(r"\$\w+", ".*", expression))
    assert any(float(one["value"][1]) == float(one["value"][1]) for one in series), "only NaN"


def test_rays_metrics_count_each_request_once(monitored: Server, prometheus: Prometheus) -> None:
    ours = monitored.metric("torchrelay_requests_total", model="some", version="1.0")
    assert ours == 30
    counted = 'sum(ray_serve_deployment_request_counter_total{application="some--1.0"})'
    assert prometheus.wait(f"{counted} >= {ours}")[0]["value"][1] == "30"
    latencies = 'sum(ray_serve_deployment_processing_latency_ms_bucket{application="some--1.0", le="+Inf"})'
    assert float(prometheus.wait(f"{latencies} > 29.5")[0]["value"][1]) == pytest.approx(30)
    errors = 'sum by (exception_type) (ray_serve_deployment_error_counter_total{application="some--1.0"})'
    [failed] = prometheus.wait(errors)
    assert (failed["metric"]["exception_type"], failed["value"][1]) == ("handler_failed", "20")

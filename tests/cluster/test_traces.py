"""Traces of a real server, as an OTLP collector receives them: one request of every protocol."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from websockets.sync.client import connect

from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from tests.support.archives import make_archive
from tests.support.observed_server import Observed
from tests.support.otlp_receiver import Tree, collect_grpc, collect_http
from tests.support.ports import free_port
from tests.support.server import Server

pytestmark = [pytest.mark.cluster("observed"), pytest.mark.slow]

# The stages of BaseHandler are spans; the author's code reaches the current one.
STAGES = """
import logging
from opentelemetry import trace
from ts.torch_handler.base_handler import BaseHandler

class Stages(BaseHandler):
    def initialize(self, context):
        self.initialized = True
    def preprocess(self, data):
        rows = [row.get("body") or row.get("data") for row in data]
        return [row if isinstance(row, str) else bytes(row).decode() for row in rows]
    def inference(self, data):
        trace.get_current_span().set_attribute("rows", len(data))
        logging.getLogger("author").info("in the inference")
        return [word.upper() for word in data]
    def postprocess(self, data):
        return data
"""
# An answer of OpenAI's API, whole or streamed.
POET = """
from handlers.intermediate import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    [row] = data
    if row["body"].get("stream"):
        ids = context.request_ids
        send_intermediate_predict_response(["data: {}\\n\\n"], ids, "ok", 200, context)
        return ["data: [DONE]\\n\\n"]
    return [{"object": "text_completion", "choices": [{"index": 0, "text": "a rose"}]}]
"""
_STAGES: Tree = {"preprocess": {}, "inference": {}, "postprocess": {}}
_REPLICA: Tree = {"queue": {}, "batch": _STAGES}
_LOCAL: Tree = {"replica": _REPLICA}
_REMOTE: Tree = {"gateway": {"transport": _REPLICA}}


@pytest.fixture(scope="module")
def traced(observed: Observed) -> Observed:
    server = observed.server
    for name in ("stages", "split"):
        assert server.register(make_archive(server.store, name, STAGES)).status_code == 200
    assert server.register(make_archive(server.store, "split", STAGES, "2.0")).status_code == 200
    assert server.register(make_archive(server.store, "poet", POET)).status_code == 200
    policy = {"policy": "weighted", "versions": {"1.0": 5000, "2.0": 5000}}
    assert server.management.put("/models/split/traffic", json=policy).status_code == 200
    server.wait(
        lambda: server.http.get("/-/routes").json().get("/predictions/stages") == "stages--1.0",
        description="the route of the replica",
    )
    return observed


def _context() -> tuple[str, dict[str, str]]:
    """Return a trace id of a client, and the header with its sampled context."""
    trace = secrets.token_hex(16)
    return trace, {"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"}


def _complete(expected: Tree) -> Callable[[Tree], bool]:
    return lambda tree: _rename(tree) == expected


def _rename(tree: Tree) -> Tree:
    """Return a tree in which a replica that passed its request on is named gateway.

    HAProxy may send a request to its former route's replica for some seconds after a new policy.
    """
    return {
        "gateway" if name == "replica" and "transport" in below else name: _rename(below)
        for name, below in tree.items()
    }


@pytest.mark.parametrize("stream", [False, True])
def test_openai(traced: Observed, stream: bool) -> None:
    trace, headers = _context()
    document = {"model": "poet", "prompt": "a", "stream": stream}
    answer = traced.server.http.post("/v1/completions", json=document, headers=headers)
    assert answer.status_code == 200, answer.text
    assert ("[DONE]" if stream else "a rose") in answer.text
    traced.collector.tree(
        trace, _complete({"POST /v1": {"gateway": {"transport": {"queue": {}, "batch": {}}}}})
    )
    assert traced.collector.find(trace, "POST /v1").attributes["torchrelay.model"] == "poet"


# HAProxy routes a path with an escape to the gateway.
@pytest.mark.parametrize(("route", "below"), [("predictions", _LOCAL), ("%70redictions", _REMOTE)])
def test_http(traced: Observed, route: str, below: Tree) -> None:
    trace, headers = _context()
    answer = traced.server.http.post(f"/{route}/stages", content=b"a", headers=headers)
    assert (answer.status_code, answer.text) == (200, "A")
    traced.collector.tree(trace, _complete({"POST /predictions": below}))
    root = traced.collector.find(trace, "POST /predictions")
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["torchrelay.model"] == "stages"
    assert root.attributes["torchrelay.request_id"] == answer.headers["x-request-id"]
    assert traced.collector.find(trace, "inference").attributes["rows"] == 1
    batch = traced.collector.find(trace, "batch")
    assert batch.links == [trace]
    assert batch.attributes["torchrelay.batch_size"] == 1


def test_open_inference(traced: Observed) -> None:
    trace, headers = _context()
    document = {"inputs": [{"name": "body", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}
    answer = traced.server.http.post("/v2/models/split/infer", json=document, headers=headers)
    assert answer.status_code in (200, 400, 500), answer.text  # the handler reads no tensors
    tree = traced.collector.tree(trace, lambda tree: "batch" in str(tree) and "POST /v2" in tree)
    assert "transport" in _rename(tree)["POST /v2"]["gateway"]


def test_grpc(traced: Observed) -> None:
    trace, headers = _context()
    with grpc.insecure_channel(f"127.0.0.1:{traced.server.grpc_port}") as channel:
        stub = InferenceAPIsServiceStub(channel)
        request = PredictionsRequest(model_name="stages", input={"data": b"a"})
        answer = stub.Predictions(request, timeout=60, metadata=list(headers.items()))
        assert answer.prediction == b"A"
        name = "gRPC /org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
        traced.collector.tree(trace, _complete({name: _REMOTE}))

        trace, headers = _context()
        streamed = stub.StreamPredictions(request, timeout=60, metadata=list(headers.items()))
        assert b"".join(one.prediction for one in streamed) == b"A"
        name = name.replace("Predictions", "StreamPredictions")
        traced.collector.tree(trace, _complete({name: _REMOTE}))


def test_websocket(traced: Observed) -> None:
    trace, headers = _context()
    url = traced.server.url.replace("http", "ws") + "/%70redictions/stages"
    with connect(url, additional_headers=headers, open_timeout=60) as socket:
        socket.send("a")
        assert socket.recv() == "A"
    traced.collector.tree(trace, _complete({"WebSocket /predictions": _REMOTE}))


def test_workflow(traced: Observed) -> None:
    document = {
        "name": "twice",
        "steps": {"one": {"model": "stages"}, "two": {"model": "stages", "inputs": "one"}},
    }
    answer = traced.server.management.post("/workflows", json=document)
    assert answer.status_code == 200, answer.text
    trace, headers = _context()
    answer = traced.server.http.post("/predictions/twice", content=b"a", headers=headers)
    assert (answer.status_code, answer.text) == (200, "A")
    steps = {"step one": _REMOTE, "step two": _REMOTE}
    traced.collector.tree(trace, _complete({"POST /predictions": {"gateway": steps}}))


def test_async_prediction_with_webhook(traced: Observed) -> None:
    trace, headers = _context()
    headers |= {"prefer": "respond-async", "x-torchrelay-webhook": traced.webhooks.url}
    answer = traced.server.http.post("/predictions/stages", content=b"a", headers=headers)
    assert answer.status_code == 202, answer.text
    below = {"management": {"transport": _REPLICA}, "webhook": {}}
    traced.collector.tree(trace, _complete({"POST /predictions": below}))
    sent = traced.webhooks.headers[-1]["traceparent"].split("-")
    assert sent[1:3] == [trace, traced.collector.find(trace, "webhook").id]


def test_an_error_is_the_status_of_its_spans(traced: Observed) -> None:
    trace, headers = _context()
    answer = traced.server.http.post("/predictions/split/9.9", content=b"a", headers=headers)
    assert answer.status_code == 404
    tree = traced.collector.tree(trace, lambda tree: bool(tree.get("POST /predictions")))
    (process,) = tree["POST /predictions"]
    assert traced.collector.find(trace, process).attributes["error.type"] == "version_not_found"


def test_json_logs_have_the_trace(traced: Observed) -> None:
    trace, headers = _context()
    traced.server.http.post("/predictions/stages", content=b"a", headers=headers)
    log = traced.server.home / "logs" / "model_log.log"

    def find() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line for line in lines if line.get("trace_id") == trace]

    assert traced.server.wait(find)[0]["message"] == "in the inference"


def test_requests_without_a_sampled_context_are_not_traced(traced: Observed) -> None:
    _, headers = _context()
    contexts = (headers["traceparent"][:-1] + "0", "00-nonsense-01", f"00-{'0' * 32}-{'0' * 16}-01")
    untraced = set()
    for sent in ({}, *({"traceparent": context} for context in contexts)):
        answer = traced.server.http.post("/predictions/stages", content=b"a", headers=sent)
        assert answer.status_code == 200
        untraced.add(answer.headers["x-request-id"])
    known, headers = _context()
    traced.server.http.post("/predictions/stages", content=b"a", headers=headers)
    traced.collector.tree(known, _complete({"POST /predictions": _LOCAL}))
    requests = {span.attributes.get("torchrelay.request_id") for span in traced.collector.spans}
    assert not untraced & requests


@pytest.mark.nightly
def test_otlp_over_http_with_sampling(tmp_path: Path) -> None:
    with collect_http() as (collector, endpoint):
        telemetry = {"otlp_endpoint": endpoint, "otlp_protocol": "http", "trace_sampling": 1.0}
        server = Server(tmp_path, {"OTEL_BSP_SCHEDULE_DELAY": "100"}, telemetry=telemetry)
        try:
            server.start()
            assert server.register(make_archive(server.store, "stages", STAGES)).status_code == 200
            assert server.http.post("/predictions/stages", content=b"a").status_code == 200
            with collector.changed:
                assert collector.changed.wait_for(lambda: any(s.name == "batch" for s in collector.spans), 30)
            trace = next(span.trace for span in collector.spans if span.name == "batch")
            # The route of a new model follows its registration.
            expected = ({"POST /predictions": _LOCAL}, {"POST /predictions": _REMOTE})
            collector.tree(trace, lambda tree: tree in expected)
        finally:
            server.close()


@pytest.mark.parametrize("collector", ["down", "slow"])
@pytest.mark.nightly
def test_a_collector_that_is_down_or_slow_delays_no_request(tmp_path: Path, collector: str) -> None:
    with collect_grpc(accepts=False) as (_, slow):
        endpoint = slow if collector == "slow" else f"http://127.0.0.1:{free_port()}"
        telemetry = {"otlp_endpoint": endpoint, "trace_sampling": 1.0, "otlp_timeout": 1}
        variables = {"SCHEDULE_DELAY": "100", "MAX_QUEUE_SIZE": "64", "MAX_EXPORT_BATCH_SIZE": "32"}
        environment = {f"OTEL_BSP_{name}": value for name, value in variables.items()}
        server = Server(tmp_path, environment, telemetry=telemetry)
        try:
            server.start()
            assert server.register(make_archive(server.store, "stages", STAGES)).status_code == 200
            with httpx.Client(base_url=server.url, timeout=5) as http:
                for _ in range(200):
                    assert http.post("/predictions/stages", content=b"a").status_code == 200
            dropped = "torchrelay_spans_dropped_total"
            assert server.wait(lambda: server.metric(dropped, process="replica") >= 100)
        finally:
            server.close()

"""Data capture and drift on a real server: protocols, a shifted feature, a restart, and an object store."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from websockets.sync.client import connect

from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2 import ModelInferRequest
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from tests.support.archives import make_archive
from tests.support.observed_server import BUCKET, Observed
from tests.support.server import Server

pytestmark = [pytest.mark.cluster("observed"), pytest.mark.slow]

CLASSIFIER = """
import json
def handle(data, context):
    if data is None:
        return None
    rows = [row.get("body") or row.get("data") for row in data]
    rows = [json.loads(bytes(row)) if isinstance(row, (bytes, bytearray)) else row for row in rows]
    adult, child = {"adult": 0.9, "child": 0.1}, {"child": 0.8, "adult": 0.2}
    return [adult if row["age"] >= 18 else child for row in rows]
"""
ECHO = """
def handle(data, context):
    return None if data is None else [next(iter(row.values())) for row in data]
"""
RANDOM = random.Random(3)


@pytest.fixture(scope="module")
def capturing(observed: Observed) -> Server:
    return observed.server


def register(server: Server, folder: Path, name: str, handler: str, **capture: Any) -> None:
    config = {"capture": capture}
    answer = server.register(make_archive(folder, name, handler, config=config))
    assert answer.status_code == 200, answer.text


def captured(server: Server, model: str) -> list[dict[str, Any]]:
    files = sorted((server.home / "state/capture" / model).rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def send(server: Server, model: str, count: int, age: float = 40.0) -> None:
    for _ in range(count):
        document = {
            "age": RANDOM.gauss(age, 12),
            "height": RANDOM.gauss(170, 10),
            "pet": RANDOM.choice("abc"),
        }
        answer = server.http.post(f"/predictions/{model}", json=document)
        assert answer.status_code == 200, answer.text


@pytest.mark.nightly
def test_only_the_shifted_feature_drifts_and_a_restart_keeps_the_reference(
    capturing: Server, tmp_path: Path
) -> None:
    server = capturing
    register(server, tmp_path, "people", CLASSIFIER, reference=300, window=300, max_megabytes=0)

    def drift() -> dict[str, Any]:
        document: dict[str, Any] = server.client.drift("people", "1.0")
        return document["versions"][0]

    send(server, "people", 300)
    server.wait(lambda: (drift()["reference"] or {}).get("complete"), 30, "a complete reference")
    send(server, "people", 300)
    server.wait(lambda: (drift()["current"] or {"requests": 0})["requests"] >= 290, 30, "a window")
    assert drift()["level"] == "none", drift()

    send(server, "people", 320, age=70)
    server.wait(lambda: drift()["level"] == "major", 30, "drift")
    levels = {feature["name"]: feature["level"] for feature in drift()["features"]}
    assert levels.pop("input.age") == "major"
    assert {levels["input.height"], levels["input.pet"]} == {"none"}
    assert set(levels) == {"input.height", "input.pet", "output.label", "output.score"}

    labels = {"model": "people", "version": "1.0", "feature": "input.age"}
    server.wait(lambda: server.metric("torchrelay_drift_psi", **labels) > 0.25, 30, "the gauge")
    assert server.metric("torchrelay_drift_ks", **labels) > 0.3
    assert server.metric("torchrelay_drift_psi", **{**labels, "feature": "input.height"}) < 0.25
    assert server.metric("torchrelay_captured_requests_total", model="people") == 920
    log = server.home / "logs/ts_log.log"  # which is written twice a second
    server.wait(lambda: "people--1.0: major drift of input.age" in log.read_text(), 30, "the log")

    before = drift()["reference"]
    server.stop()
    server.start()
    assert drift()["reference"] == before
    assert drift()["level"] == "major", "the window is stored too"
    reset = server.client.reset_drift("people", "1.0")["versions"][0]
    assert (reset["reference"]["source"], reset["current"]) == ("reset", None)
    server.wait(lambda: server.client.ready())
    send(server, "people", 300, age=70)
    server.wait(lambda: (drift()["current"] or {"requests": 0})["requests"] >= 250, 30, "a window")
    assert drift()["level"] == "none", "compared with the new reference"


def test_every_protocol_is_captured_once(capturing: Server, tmp_path: Path) -> None:
    server = capturing
    register(server, tmp_path, "echo", ECHO)
    sent = Counter(["fast path", "gateway", "grpc", "stream", "websocket", "later"])
    assert server.http.post("/predictions/echo", content="fast path").status_code == 200
    assert server.http.post("/%70redictions/echo", content="gateway").status_code == 200
    later = server.http.post("/predictions/echo", content="later", headers={"Prefer": "respond-async"})
    assert later.status_code == 202, later.text
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = InferenceAPIsServiceStub(channel)
        stub.Predictions(PredictionsRequest(model_name="echo", input={"data": b"grpc"}), timeout=60)
        list(
            stub.StreamPredictions(
                PredictionsRequest(model_name="echo", input={"data": b"stream"}), timeout=60
            )
        )
        infer = ModelInferRequest(model_name="echo")
        tensor = infer.inputs.add(name="x", datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(4711)
        GRPCInferenceServiceStub(channel).ModelInfer(infer, timeout=60)
    rest = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [1], "data": [4712]}]}
    assert server.http.post("/v2/models/echo/infer", json=rest).status_code == 200
    with connect(f"{server.url.replace('http', 'ws')}/predictions/echo", open_timeout=60) as socket:
        socket.send("websocket")
        while '"end"' not in str(socket.recv(timeout=60)):
            pass
    server.wait(lambda: len(captured(server, "echo")) >= len(sent) + 2, 60, "captured requests")
    server.wait(lambda: server.metric("torchrelay_captured_requests_total", model="echo") == 8, 60, "8")
    records = captured(server, "echo")
    texts = Counter(record["inputs"][0]["text"] for record in records if "text" in record["inputs"][0])
    assert texts == sent
    values = [r["inputs"][0]["json"][0]["data"] for r in records if "json" in r["inputs"][0]]
    assert sorted(values) == [[4711], [4712]]
    assert len({record["request_id"] for record in records}) == 8


@pytest.mark.nightly
def test_captured_requests_reach_an_object_store(observed: Observed, tmp_path: Path) -> None:
    server = observed.server
    denied = make_archive(tmp_path, "denied", ECHO, config={"capture": {"destination": "s3://other/x"}})
    refused = server.register(denied)
    assert refused.status_code == 400
    assert "s3://other/x" in refused.text and "telemetry.capture_destinations" in refused.text
    register(server, tmp_path, "remote", ECHO, destination="s3://captured/requests", format="parquet")
    assert server.http.post("/predictions/remote", content="to S3").status_code == 200

    def keys() -> list[str]:
        found = observed.s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])
        return [entry["Key"] for entry in found]

    server.wait(keys, 90, "the object")
    (key,) = keys()
    assert key.startswith("requests/remote/1.0/") and key.endswith(".parquet")
    folder = server.home / "state/capture/remote/1.0"
    server.wait(lambda: not list(folder.iterdir()), 30, "an empty folder")


def test_a_model_without_capture_has_no_drift(capturing: Server, tmp_path: Path) -> None:
    assert capturing.register(make_archive(tmp_path, "plain", ECHO)).status_code == 200
    answer = httpx.get(f"{capturing.process.management}/models/plain/drift", timeout=60)
    assert answer.status_code == 404
    assert "Add capture: {} to its model-config.yaml" in answer.json()["message"]

"""gRPC against a real server, by stubs that are generated here from the messages that TorchServe
documents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.support.archives import make_archive
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.cluster

CLIENT = ROOT / "examples/from_torchserve/grpc_client.py"

INFERENCE = """
syntax = "proto3";
package org.pytorch.serve.grpc.inference;
import "google/protobuf/empty.proto";
message PredictionsRequest {
  string model_name = 1;
  string model_version = 2;
  map<string, bytes> input = 3;
  optional string sequence_id = 4;
}
message PredictionResponse { bytes prediction = 1; optional string sequence_id = 2; }
message TorchServeHealthResponse { string health = 1; }
service InferenceAPIsService {
  rpc Ping(google.protobuf.Empty) returns (TorchServeHealthResponse) {}
  rpc Predictions(PredictionsRequest) returns (PredictionResponse) {}
  rpc StreamPredictions(PredictionsRequest) returns (stream PredictionResponse) {}
  rpc StreamPredictions2(stream PredictionsRequest) returns (stream PredictionResponse) {}
}
"""
MANAGEMENT = """
syntax = "proto3";
package org.pytorch.serve.grpc.management;
message ManagementResponse { string msg = 1; }
message DescribeModelRequest { string model_name = 1; string model_version = 2; bool customized = 3; }
message ListModelsRequest { int32 limit = 1; int32 next_page_token = 2; }
message RegisterModelRequest {
  int32 batch_size = 1; string handler = 2; int32 initial_workers = 3; int32 max_batch_delay = 4;
  string model_name = 5; int32 response_timeout = 6; string runtime = 7; bool synchronous = 8; string url = 9;
  bool s3_sse_kms = 10; int32 startup_timeout = 11;
}
message ScaleWorkerRequest {
  string model_name = 1; string model_version = 2; int32 max_worker = 3; int32 min_worker = 4;
  int32 number_gpu = 5; bool synchronous = 6; int32 timeout = 7;
}
message SetDefaultRequest { string model_name = 1; string model_version = 2; }
message UnregisterModelRequest { string model_name = 1; string model_version = 2; }
service ManagementAPIsService {
  rpc DescribeModel(DescribeModelRequest) returns (ManagementResponse) {}
  rpc ListModels(ListModelsRequest) returns (ManagementResponse) {}
  rpc RegisterModel(RegisterModelRequest) returns (ManagementResponse) {}
  rpc ScaleWorker(ScaleWorkerRequest) returns (ManagementResponse) {}
  rpc SetDefault(SetDefaultRequest) returns (ManagementResponse) {}
  rpc UnregisterModel(UnregisterModelRequest) returns (ManagementResponse) {}
}
"""
COUNTS = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    text = bytes(data[0]["data"]).decode()
    for letter in text[:-1]:
        send_intermediate_predict_response([letter], context.request_ids, "one", 200, context)
    return [text[-1]]
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stubs")
    (folder / "inference.proto").write_text(INFERENCE)
    (folder / "management.proto").write_text(MANAGEMENT)
    well_known = resources.files("grpc_tools") / "_proto"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{well_known}"]
    command += [
        f"--python_out={folder}",
        f"--grpc_python_out={folder}",
        "inference.proto",
        "management.proto",
    ]
    subprocess.run(command, check=True, timeout=300)
    return folder


@pytest.fixture
def client(server: Server, stubs: Path) -> Run:
    where = server.process.grpc

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(CLIENT), *words]
        command += ["--inference", where["inference"], "--management", where["management"]]
        env = {**os.environ, "PYTHONPATH": str(stubs)}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    return run


def test_a_models_life_by_grpc_alone(server: Server, client: Run, tmp_path: Path) -> None:
    def result(*words: str) -> str:
        done = client(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    make_archive(server.store, "letters", COUNTS)
    word = tmp_path / "word"
    word.write_text("abc")
    assert json.loads(result("ping")) == {"status": "Healthy"}
    assert result("register", "letters-1.0.mar") == (
        'Model "letters" Version: 1.0 registered with 1 initial workers'
    )
    assert result("infer_stream", "letters", str(word)).split() == ["a", "b", "c"]
    assert result("infer", "letters", str(word)) == "abc"
    assert "letters" in [model["modelName"] for model in json.loads(result("list"))["models"]]
    [described] = json.loads(result("describe", "letters"))
    assert [worker["status"] for worker in described["workers"]] == ["READY"]
    assert result("unregister", "letters") == 'Model "letters" unregistered'
    done = client("infer", "letters", str(word))
    assert done.returncode == 1
    assert done.stderr.strip() == "INTERNAL: Model not found: letters\nModelNotFoundException"
    assert server.metric("torchrelay_grpc_responses_total", code="OK") >= 7
    assert server.metric("torchrelay_grpc_responses_total", code="INTERNAL") >= 1
    line = '"gRPC /org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions HTTP/2" 0 '
    log = server.home / "logs/access_log.log"
    server.wait(lambda: line in log.read_text(), description="the access log")


def test_both_ports_tell_probes_that_they_are_well(server: Server) -> None:
    for address in server.process.grpc.values():
        with grpc.insecure_channel(address) as channel:
            status = HealthStub(channel).Check(HealthCheckRequest(), timeout=60).status
        assert status == HealthCheckResponse.SERVING

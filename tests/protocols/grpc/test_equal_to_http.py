"""Errors and documents over gRPC: equal to those over HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app import errors
from serve_app.domain.model import ModelSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.proto import management_pb2 as management_messages
from serve_app.proto import open_inference_grpc_pb2 as tensor_messages
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from tests.support.grpc_calls import expect_error, trailing_metadata


def to_document(message: Any) -> dict[str, Any]:
    """Return a message's fields by name, as in its JSON form except that numbers stay numbers."""
    return {field.name: _to_plain(getattr(message, field.name), field) for field in message.DESCRIPTOR.fields}


def _to_plain(value: Any, field: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_to_plain(item, field) for item in value]
    return to_document(value) if field.message_type is not None else value


@pytest.mark.parametrize(
    "failure",
    [
        errors.QueueFull("m", "1.0"),
        errors.QuotaExceeded("m", "1.0", 1),
        errors.ModelLoading("m", None),
        errors.NoReplica("m", None),
        errors.HandlerFailed("boom"),
        errors.ReplicaDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.InvalidInput("the input is wrong"),
        errors.SequenceLost("m", "s", "idle"),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
        errors.HandlerRejected("teapot", 418),
        RuntimeError("secret"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_errors_have_the_reason_and_headers_of_http(
    over_grpc: Any, inference: Any, failure: Exception
) -> None:
    async def fail(request: InferenceRequest) -> InferenceResponse:
        raise failure

    response = inference(fail)("POST", "/predictions/m", b"")
    names = ("x-torchrelay-reason", "retry-after", "x-model-version", "x-torchrelay-step")
    expected = {name: response[name] for name in names}
    server = over_grpc(fail)
    tensors = tensor_messages.ModelInferRequest(model_name="m")
    tensors.inputs.add(name="x", datatype="INT64", shape=[1]).contents.int64_contents.append(1)
    for method, request in (
        (InferenceAPIsServiceStub(server.channel).Predictions, PredictionsRequest(model_name="m")),
        (GRPCInferenceServiceStub(server.channel).ModelInfer, tensors),
    ):
        metadata = trailing_metadata(expect_error(method, request))
        assert {name: metadata.get(name) for name in names} == expected
        assert len(metadata["x-request-id"]) == 36


def test_documents_of_models(over_grpc: Any, inference: Any) -> None:
    stub, http = GRPCInferenceServiceStub(over_grpc().channel), inference()
    for version, path in (("", "/v2/models/m"), ("2.0", "/v2/models/m/versions/2.0")):
        request = tensor_messages.ModelMetadataRequest(name="m", version=version)
        assert to_document(stub.ModelMetadata(request)) == json.loads(http("GET", path).body)
    for ready in (False, True):
        index = stub.RepositoryIndex(tensor_messages.RepositoryIndexRequest(ready=ready))
        body = json.dumps({"ready": ready}).encode()
        assert to_document(index)["models"] == json.loads(http("POST", "/v2/repository/index", body).body)
    for name, path in (("", "/v2/models/stats"), ("m", "/v2/models/m/stats")):
        statistics = stub.ModelStatistics(tensor_messages.ModelStatisticsRequest(name=name))
        assert to_document(statistics) == json.loads(http("GET", path).body)


def test_management_of_models(managed_by_grpc: Any, management: Any) -> None:
    server, http = managed_by_grpc(), management()
    stub = ManagementAPIsServiceStub(server.channel)
    for port in (server, http):
        port.control_api.put(ModelSpec("a", "1.0", "a.mar", "", ""))
        port.control_api.metadata = {"labels": 3}
    listed = stub.ListModels(management_messages.ListModelsRequest())
    assert json.loads(listed.msg) == json.loads(http("GET", "/models").body)
    for customized in (False, True):
        message = management_messages.DescribeModelRequest(model_name="a", customized=customized)
        path = f"/models/a?customized={str(customized).lower()}"
        assert json.loads(stub.DescribeModel(message).msg) == json.loads(http("GET", path).body)
    registration = management_messages.RegisterModelRequest(
        url="new.mar", initial_workers=1, synchronous=True, batch_size=4
    )
    path = "/models?url=new.mar&initial_workers=1&synchronous=true&batch_size=4"
    assert stub.RegisterModel(registration).msg == json.loads(http("POST", path).body)["status"]
    removal = management_messages.UnregisterModelRequest(model_name="new")
    assert stub.UnregisterModel(removal).msg == json.loads(http("DELETE", "/models/new").body)["status"]
    assert server.control_api.operations[0][0] == "register"
    assert server.control_api.operations == http.control_api.operations

"""The gRPC contracts: KServe's version 2, and TorchServe's inference and management."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from google.protobuf.empty_pb2 import Empty

from serve_app.conformance.check import (
    ContractCheck,
    ContractViolation,
    expect_equal,
    expect_type,
)
from serve_app.proto import inference_pb2 as torchserve
from serve_app.proto import management_pb2 as management
from serve_app.proto import open_inference_grpc_pb2 as oip
from serve_app.proto.contents import CONTENTS
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub

_NO_MODEL = "none-of-this-name"
_ID = "conformance-1"
_MAX_PAGES = 100  # of models
_DTYPES = {
    "BOOL": "?",
    **{
        f"{kind}{bits}": f"<{kind[0].lower()}{bits // 8}"
        for kind in ("INT", "UINT")
        for bits in (8, 16, 32, 64)
    },
    **{f"FP{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    "BF16": "<u2",
}


@dataclass(frozen=True)
class GrpcServerUnderTest:
    """A gRPC server: its channel, a model, and a valid input of that model, a value of JSON."""

    channel: grpc.Channel
    model: str
    instance: Any
    timeout: float
    metadata: tuple[tuple[str, str], ...] = ()

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """Return a method's response. Raises ContractViolation for an error."""
        try:
            return method(request, **self._options())
        except grpc.RpcError as error:
            raise ContractViolation(f"{_describe(error)}; expected OK") from None

    def read(self, method: Callable[..., Any], request: Any) -> list[Any]:
        """Return the messages of a stream. Raises ContractViolation for an error."""
        try:
            return list(method(request, **self._options()))
        except grpc.RpcError as error:
            raise ContractViolation(f"{_describe(error)}; expected OK") from None

    def expect_error(self, method: Callable[..., Any], request: Any, *codes: str) -> None:
        """Raise ContractViolation where a method does not end with one of these codes."""
        expected = " or ".join(codes)
        try:
            method(request, **self._options())
        except grpc.RpcError as error:
            if error.code().name not in codes:
                raise ContractViolation(f"{_describe(error)}; expected {expected}") from None
            return
        raise ContractViolation(f"{_name(request)} is OK; expected {expected}")

    def _options(self) -> dict[str, Any]:
        return {"timeout": self.timeout, "metadata": self.metadata}


@contextmanager
def connect(
    address: str, model: str, instance: Any, timeout: float, headers: Mapping[str, str]
) -> Iterator[GrpcServerUnderTest]:
    """Open a channel to ``host:port``; with the scheme ``https`` or ``grpcs`` it has TLS."""
    scheme, _, target = address.rpartition("://")
    secure = scheme in ("https", "grpcs")
    open_channel = (
        grpc.secure_channel(target, grpc.ssl_channel_credentials())
        if secure
        else grpc.insecure_channel(target)
    )
    with open_channel as channel:
        yield GrpcServerUnderTest(channel, model, instance, timeout, tuple(headers.items()))


def _describe(error: grpc.RpcError) -> str:
    return f"the call is {error.code().name}, {(error.details() or '')[:200]!r}"


def _name(request: Any) -> str:
    text = str(request).replace("\n", " ").strip()
    return f"{type(request).__name__}({text[:120]})"


# KServe, version 2: "Open Inference Protocol", gRPC


def _v2(server: GrpcServerUnderTest) -> GRPCInferenceServiceStub:
    return GRPCInferenceServiceStub(server.channel)


def _v2_health(server: GrpcServerUnderTest) -> None:
    stub = _v2(server)
    expect_equal(server.call(stub.ServerLive, oip.ServerLiveRequest()).live, True, "live")
    expect_equal(server.call(stub.ServerReady, oip.ServerReadyRequest()).ready, True, "ready of the server")
    ready = server.call(stub.ModelReady, oip.ModelReadyRequest(name=server.model)).ready
    expect_equal(ready, True, "ready of the model")


def _v2_server(server: GrpcServerUnderTest) -> None:
    document = server.call(_v2(server).ServerMetadata, oip.ServerMetadataRequest())
    for field in ("name", "version"):
        expect_equal(bool(getattr(document, field)), True, f"whether there is a {field}")


def _v2_model(server: GrpcServerUnderTest) -> None:
    document = server.call(_v2(server).ModelMetadata, oip.ModelMetadataRequest(name=server.model))
    expect_equal(document.name, server.model, "name")
    for tensor in [*document.inputs, *document.outputs]:
        expect_equal(bool(tensor.name and tensor.datatype), True, "whether a tensor has name and datatype")


def _v2_infer(server: GrpcServerUnderTest) -> None:
    response = server.call(_v2(server).ModelInfer, _v2_request(server))
    expect_equal(response.model_name, server.model, "model_name")
    expect_equal(response.id, _ID, "id")
    _expect_tensors(response)


def _v2_raw(server: GrpcServerUnderTest) -> None:
    stub = _v2(server)
    typed = server.call(stub.ModelInfer, _v2_request(server))
    response = server.call(stub.ModelInfer, _v2_request(server, raw=True))
    shapes = [(t.name, t.datatype, list(t.shape)) for t in response.outputs]
    expect_equal(shapes, [(t.name, t.datatype, list(t.shape)) for t in typed.outputs], "the outputs")
    _expect_tensors(response)


def _v2_unknown(server: GrpcServerUnderTest) -> None:
    stub = _v2(server)
    request = _v2_request(server)
    request.model_name = _NO_MODEL
    server.expect_error(stub.ModelInfer, request, "NOT_FOUND", "INVALID_ARGUMENT")
    metadata = oip.ModelMetadataRequest(name=_NO_MODEL)
    server.expect_error(stub.ModelMetadata, metadata, "NOT_FOUND", "INVALID_ARGUMENT")


def _v2_invalid(server: GrpcServerUnderTest) -> None:
    for raw in (False, True):
        request = _v2_request(server, raw)
        request.inputs[0].shape.append(7)  # more elements than the contents have
        server.expect_error(_v2(server).ModelInfer, request, "INVALID_ARGUMENT")


def _v2_request(server: GrpcServerUnderTest, raw: bool = False) -> oip.ModelInferRequest:
    """Return a request: ``instance`` is a list of tensors as the protocol has them in JSON, or one text."""
    tensors = server.instance
    if not isinstance(tensors, list):
        text = tensors if isinstance(tensors, str) else json.dumps(tensors)
        tensors = [{"name": "input", "shape": [1], "datatype": "BYTES", "data": [text]}]
    request = oip.ModelInferRequest(model_name=server.model, id=_ID)
    for tensor in tensors:
        datatype, values = tensor["datatype"], _flatten(tensor["data"])
        added = request.inputs.add(name=tensor["name"], datatype=datatype, shape=tensor["shape"])
        if raw or datatype not in CONTENTS:
            request.raw_input_contents.append(_encode(datatype, values))
        else:
            if datatype == "BYTES":
                values = [str(value).encode() for value in values]
            getattr(added.contents, CONTENTS[datatype]).extend(values)
    return request


def _flatten(data: Any) -> list[Any]:
    return [value for item in data for value in _flatten(item)] if isinstance(data, list) else [data]


def _encode(datatype: str, values: list[Any]) -> bytes:
    """Return elements in the raw form: little-endian, those of BYTES after their length in four bytes."""
    if datatype == "BYTES":
        texts = [str(value).encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if datatype == "BF16":
        return np.asarray(values, "<f4").view("<u4").__rshift__(16).astype("<u2").tobytes()
    return np.asarray(values).astype(_DTYPES[datatype]).tobytes()


def _expect_tensors(response: oip.ModelInferResponse) -> None:
    """Check that each output has a name, a datatype, and as many elements as its shape."""
    raws = list(response.raw_output_contents)
    if raws:
        expect_equal(len(raws), len(response.outputs), "the number of raw_output_contents")
    for index, tensor in enumerate(response.outputs):
        expect_equal(bool(tensor.name), True, "whether an output has a name")
        if tensor.datatype not in (*CONTENTS, *_DTYPES):
            raise ContractViolation(
                f"the datatype of {tensor.name} is {tensor.datatype!r}, which there is not"
            )
        if raws:
            count = _count_raw(tensor.datatype, raws[index])
        elif tensor.datatype in CONTENTS:
            count = len(getattr(tensor.contents, CONTENTS[tensor.datatype]))
        else:
            raise ContractViolation(f"{tensor.name} is {tensor.datatype}, and has no raw_output_contents")
        place = f"the number of values of {tensor.name} with the shape {list(tensor.shape)}"
        expect_equal(count, math.prod(tensor.shape), place)


def _count_raw(datatype: str, raw: bytes) -> float:
    """Return the number of elements in raw contents."""
    if datatype != "BYTES":
        return len(raw) / np.dtype(_DTYPES[datatype]).itemsize
    count = position = 0
    while position + 4 <= len(raw):
        position += 4 + struct.unpack_from("<I", raw, position)[0]
        count += 1
    if position != len(raw):
        raise ContractViolation("raw_output_contents of BYTES end within an element")
    return count


KSERVE_V2_GRPC = (
    ContractCheck("ServerLive, ServerReady and ModelReady are true", _v2_health),
    ContractCheck("ServerMetadata has name and version", _v2_server),
    ContractCheck("ModelMetadata has the model's name and its tensors", _v2_model),
    ContractCheck("ModelInfer answers with tensors, and the request's id", _v2_infer),
    ContractCheck("ModelInfer with raw_input_contents has the same outputs", _v2_raw),
    ContractCheck("an unknown model is NOT_FOUND or INVALID_ARGUMENT", _v2_unknown),
    ContractCheck("contents that do not fill their shape are INVALID_ARGUMENT", _v2_invalid),
)


# TorchServe: "TorchServe gRPC API", inference


def _ts(server: GrpcServerUnderTest) -> InferenceAPIsServiceStub:
    return InferenceAPIsServiceStub(server.channel)


def _ts_request(server: GrpcServerUnderTest, **fields: Any) -> torchserve.PredictionsRequest:
    value = server.instance if isinstance(server.instance, str) else json.dumps(server.instance)
    return torchserve.PredictionsRequest(
        **{"model_name": server.model, "input": {"data": value.encode()}, **fields}
    )


def _ts_ping(server: GrpcServerUnderTest) -> None:
    document = json.loads(server.call(_ts(server).Ping, Empty()).health)
    expect_equal(document.get("status"), "Healthy", "status")


def _ts_predict(server: GrpcServerUnderTest) -> None:
    response = server.call(_ts(server).Predictions, _ts_request(server))
    expect_equal(bool(response.prediction), True, "whether there is a prediction")


def _ts_stream(server: GrpcServerUnderTest) -> None:
    stub = _ts(server)
    whole = server.call(stub.Predictions, _ts_request(server)).prediction
    chunks = server.read(stub.StreamPredictions, _ts_request(server))
    expect_equal(b"".join(chunk.prediction for chunk in chunks), whole, "the streamed prediction")


def _ts_errors(server: GrpcServerUnderTest) -> None:
    stub = _ts(server)
    for fields in ({"model_name": _NO_MODEL}, {"model_version": "99.9"}, {"model_name": ""}):
        request = _ts_request(server, **fields)
        server.expect_error(stub.Predictions, request, "INTERNAL", "NOT_FOUND", "INVALID_ARGUMENT")


TORCHSERVE_GRPC = (
    ContractCheck('Ping has the JSON {"status": "Healthy"}', _ts_ping),
    ContractCheck("Predictions answers the input data with bytes", _ts_predict),
    ContractCheck("StreamPredictions has the bytes of Predictions", _ts_stream),
    ContractCheck("an unknown model or version, and no name, are errors: INTERNAL in TorchServe", _ts_errors),
)


# TorchServe: "TorchServe gRPC API", management. Nothing is changed.


def _manage(server: GrpcServerUnderTest) -> ManagementAPIsServiceStub:
    return ManagementAPIsServiceStub(server.channel)


def _list_models(server: GrpcServerUnderTest) -> None:
    models: list[Any] = []
    token = 0
    for _ in range(_MAX_PAGES):
        request = management.ListModelsRequest(limit=100, next_page_token=token)
        page = json.loads(server.call(_manage(server).ListModels, request).msg)
        models += expect_type(page, "models", list)
        token = int(page.get("nextPageToken") or 0)
        if not token:
            break
    for model in models:
        for key in ("modelName", "modelUrl"):
            expect_type(model, key, str, "models[]: ")
    names = [model["modelName"] for model in models]
    expect_equal(server.model in names, True, "whether the model is listed")


def _describe_model(server: GrpcServerUnderTest) -> None:
    request = management.DescribeModelRequest(model_name=server.model)
    versions = json.loads(server.call(_manage(server).DescribeModel, request).msg)
    for version in versions:
        expect_equal(version.get("modelName"), server.model, "modelName")
        for key, kind in (("modelVersion", str), ("minWorkers", int), ("maxWorkers", int), ("workers", list)):
            expect_type(version, key, kind)
    expect_equal(len(versions), 1, "the number of versions")


def _unknown_model(server: GrpcServerUnderTest) -> None:
    stub, name = _manage(server), {"model_name": _NO_MODEL}
    requests = (
        (stub.DescribeModel, management.DescribeModelRequest(**name)),
        (stub.ScaleWorker, management.ScaleWorkerRequest(**name, min_worker=1)),
        (stub.SetDefault, management.SetDefaultRequest(**name, model_version="1.0")),
    )
    for method, request in requests:
        server.expect_error(method, request, "NOT_FOUND")


def _invalid_arguments(server: GrpcServerUnderTest) -> None:
    stub = _manage(server)
    scaling = management.ScaleWorkerRequest(model_name=server.model, min_worker=2, max_worker=1)
    server.expect_error(stub.ScaleWorker, scaling, "INVALID_ARGUMENT")
    # PERMISSION_DENIED where the model API is disabled
    registration = management.RegisterModelRequest()
    server.expect_error(stub.RegisterModel, registration, "INVALID_ARGUMENT", "PERMISSION_DENIED")


TORCHSERVE_MANAGEMENT_GRPC = (
    ContractCheck("ListModels has the models with modelName and modelUrl", _list_models),
    ContractCheck("DescribeModel has the default version with its workers", _describe_model),
    ContractCheck(
        "DescribeModel, ScaleWorker and SetDefault of an unknown model are NOT_FOUND", _unknown_model
    ),
    ContractCheck("max_worker below min_worker, and no url, are INVALID_ARGUMENT", _invalid_arguments),
)

"""Workflows of tensors, and workflows over the other protocols."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from handlers.multipart import PARTS_CONTENT_TYPE, split_parts
from serve_app.domain import signature, tensors
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import RoutingTable
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import HandlerRejected
from serve_app.proto import open_inference_grpc_pb2 as oip
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from tests.support.workflow_services import build_table, build_workflow, describe_inputs, format_inputs

Models = dict[str, Callable[[InferenceRequest], Awaitable["InferenceResponse | ResponseStream"]]]


# Tensors, as the Open Inference Protocol has them


def infer_request(**arrays: Any) -> bytes:
    given = [tensors.from_array(name, value) for name, value in arrays.items()]
    inputs = [
        {"name": t.name, "datatype": t.datatype, "shape": list(t.shape), "data": json.loads(t.to_json())}
        for t in given
    ]
    return json.dumps({"inputs": inputs}).encode()


async def doubled(call: InferenceRequest) -> InferenceResponse:
    """Double tensors as a model; return the inputs as a function."""
    if call.kind == "predict":
        return InferenceResponse(
            json.dumps([[p.name, p.value.decode("latin-1"), p.content_type] for p in call.inputs]).encode()
        )
    given = [tensors.from_content_type(p.name, p.value, p.content_type) for p in call.inputs]
    return InferenceResponse(
        tensors.pack([tensors.from_array(t.name, t.to_array() * 2) for t in given]),
        tensors.PACKED_MEDIA_TYPE,
        version="1.0",
    )


def test_tensors_go_from_model_to_model_as_tensors(inference: Callable[..., Any]) -> None:
    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    app = inference(doubled, build_table(w))
    response = app("POST", "/v2/models/w/infer", infer_request(x=np.float32([[1, 2]]), y=np.int64([3])))
    assert response.status == 200, response.body
    result = {output["name"]: output for output in json.loads(response.body)["outputs"]}
    assert (
        result["x"]["data"] == [4.0, 8.0] and result["x"]["shape"] == [1, 2] and result["y"]["data"] == [12]
    )
    assert [call.kind for call in app.backend.requests] == ["tensors", "tensors"]


def test_a_function_gets_tensors_as_plain_values(inference: Callable[..., Any]) -> None:
    mine = {"function": "f", "inputs": {"n": "first", "text": "request.text", "texts": "request.texts"}}
    w = build_workflow(first={"model": "a", "inputs": {"x": "request.x"}}, mine=mine)
    texts = {"text": np.array([b"one"], object), "texts": np.array([b"p", b"q"], object)}
    body = infer_request(x=np.float32([[1, 2], [3, 4]]), **texts)
    response = inference(doubled, build_table(w))("POST", "/v2/models/w/infer", body)
    [output] = json.loads(response.body)["outputs"]
    assert output["datatype"] == "BYTES"  # what is no tensor becomes one of text
    n, text, several = json.loads(output["data"][0])
    assert n == ["n", "[[2.0,4.0],[6.0,8.0]]", "application/json"]
    assert text == ["text", "one", None]
    assert several[2] == PARTS_CONTENT_TYPE and [value for value, _ in split_parts(several[1].encode())] == [
        b"p",
        b"q",
    ]


def test_slices_of_a_tensor_are_sent_one_by_one(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        each={"model": "a", "each": {"x": "request.x"}}, gather={"function": "g", "inputs": {"all": "each"}}
    )
    app = inference(doubled, build_table(w))
    assert app("POST", "/v2/models/w/infer", infer_request(x=np.float32([[1, 2], [3, 4]]))).status == 200
    first, second, gather = sorted(app.backend.requests, key=lambda call: call.request_id)
    assert [call.inputs[0].content_type for call in (first, second)] == ["application/x-tensor;FP32;1,2"] * 2
    found = [json.loads(value) for value, _ in split_parts(gather.inputs[0].value)]
    assert found == [{"x": [[2.0, 4.0]]}, {"x": [[6.0, 8.0]]}]


def test_several_tensors_are_not_one_value(inference: Callable[..., Any]) -> None:
    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": {"x": "first"}})
    response = inference(doubled, build_table(w))("POST", "/v2/models/w/infer", infer_request(x=[1], y=[2]))
    assert response.status == 400
    assert b"Step last of workflow w failed: first gave 2 tensors (x, y), and one is wanted" in response.body


def signed(w: WorkflowGraph) -> RoutingTable:
    """Return a table whose models have one input and one output tensor, x."""
    known = build_table(w)
    x = signature.read({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]})
    x = replace(x, outputs=x.inputs)
    models = {name: row for name, row in known.models.items() if name != "w"}
    for name, row in models.items():
        models[name] = replace(row, versions={v: replace(r, signature=x) for v, r in row.versions.items()})
    return replace(known, models={**models, "w": known.models["w"]})


def test_metadata_are_those_of_its_ends(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        first={"model": "a", "inputs": {"x": "request.picture"}}, last={"model": "b", "inputs": "first"}
    )
    app = inference(doubled, signed(w))
    metadata = json.loads(app("GET", "/v2/models/w").body)
    port = {"datatype": "FP32", "shape": [-1, 2]}
    assert metadata["inputs"] == [{"name": "picture", **port}]
    assert metadata["outputs"] == [{"name": "x", **port}]
    requested = np.float32([[1, 2]])
    sent = {"inference-header-content-length": "0"}  # the one input, as it is
    response = app("POST", "/v2/models/w/infer", requested.tobytes(), sent)
    assert response.body[int(response["inference-header-content-length"]) :] == (requested * 4).tobytes()
    assert json.loads(app("GET", "/v2/models/w/config").body)["input"][0]["name"] == "picture"


# The other ways in


async def by_name(call: InferenceRequest) -> InferenceResponse:
    """Answer with the inputs, and the model's name in OpenAI's requests."""
    result = {
        "choices": [{"text": f"{call.model}:{format_inputs(call)}"}],
        "path": call.headers.get("url_path", ""),
    }
    return InferenceResponse(json.dumps(result).encode(), "application/json", version="1.0")


def test_openai_routes_run_a_workflow(inference: Callable[..., Any]) -> None:
    w = build_workflow(
        look={"model": "a", "inputs": {"seen": "request"}}, write={"model": "b", "inputs": {"found": "look"}}
    )
    app = inference(by_name, build_table(w))
    requested = b'{"model": "w", "prompt": "x"}'
    response = app("POST", "/v1/completions", requested)
    assert (response.status, response["content-type"], response["x-model-version"]) == (
        200,
        "application/json",
        "1.0",
    )
    result = json.loads(response.body)
    assert result["path"] == "v1/completions"
    found = json.loads(result["choices"][0]["text"].removeprefix("b:found="))
    assert found["choices"][0]["text"] == f"a:seen={requested.decode()}"
    assert "w" in [one["id"] for one in json.loads(app("GET", "/v1/models").body)["data"]]


def test_openai_errors_name_the_failed_step(inference: Callable[..., Any]) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.model == "b":
            raise HandlerRejected("too long", 422)
        return InferenceResponse(b"{}", version="1.0")

    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    response = inference(infer, build_table(w))("POST", "/v1/completions", b'{"model": "w"}')
    assert (response.status, response["x-torchrelay-step"]) == (422, "last")
    assert "Step last of workflow w failed: too long" in json.loads(response.body)["error"]["message"]


def test_grpc_runs_a_workflow(over_grpc: Callable[..., Any]) -> None:
    w = build_workflow(
        first={"model": "a", "inputs": {"x": "request.data"}}, last={"model": "b", "inputs": "first"}
    )
    server = over_grpc(describe_inputs, build_table(w))
    requested = PredictionsRequest(model_name="w", input={"data": b"1"})
    response = InferenceAPIsServiceStub(server.channel).Predictions(requested, timeout=60)
    assert response.prediction == b"b(body=a(x=1))"


def test_tensors_by_grpc_go_through_a_workflow(over_grpc: Callable[..., Any]) -> None:
    w = build_workflow(first={"model": "a"}, last={"model": "b", "inputs": "first"})
    stub = GRPCInferenceServiceStub(over_grpc(doubled, signed(w)).channel)
    metadata = stub.ModelMetadata(oip.ModelMetadataRequest(name="w"), timeout=60)
    assert [(port.name, port.datatype, list(port.shape)) for port in metadata.inputs] == [
        ("x", "FP32", [-1, 2])
    ]
    array = np.float32([[1, 2]])
    requested = oip.ModelInferRequest(model_name="w", raw_input_contents=[array.tobytes()])
    requested.inputs.add(name="x", datatype="FP32", shape=array.shape)
    response = stub.ModelInfer(requested, timeout=60)
    assert response.raw_output_contents[0] == (array * 4).tobytes()
    requested.inputs[0].name = "y"
    with pytest.raises(grpc.RpcError) as refused:
        stub.ModelInfer(requested, timeout=60)
    assert "Step first of workflow w failed: There is no input 'y'" in refused.value.details()

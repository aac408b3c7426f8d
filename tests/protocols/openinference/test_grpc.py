"""The Open Inference Protocol over gRPC: requests, responses and errors."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.torchserve_compat.intermediate import send_intermediate_predict_response
from serve_app.control.api import ControlPlane
from serve_app.dataplane.data_plane import DataPlane
from serve_app.domain import tensors
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceResponse
from serve_app.domain.signature import DATATYPES
from serve_app.errors import HandlerFailed, QueueFull, RelayError
from serve_app.proto import open_inference_grpc_pb2 as pb
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from serve_app.protocols.grpc_app import inference_server
from serve_app.protocols.openinference import conversion
from serve_app.protocols.openinference.grpc import TABLE, build_response, parse_request
from serve_app.settings import load

pytestmark = pytest.mark.integration


CLIENTS = Path(__file__).parents[2] / "support/client_programs"
SIMPLE = {
    "inputs": [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16]} for i in (0, 1)],
    "outputs": [{"name": f"OUTPUT{i}", "datatype": "INT32", "shape": [1, 16]} for i in (0, 1)],
}


def simple(data: list, context: Any) -> list:
    return [{"OUTPUT0": r["INPUT0"] + r["INPUT1"], "OUTPUT1": r["INPUT0"] - r["INPUT1"]} for r in data]


def identity(data: list, context: Any) -> list:
    return [dict(row) for row in data]


@pytest.fixture
def address(models: Any, grpc_listening: Any) -> Iterator[str]:
    models.add("simple", simple, form="arrays", ports=SIMPLE)
    models.add("identity", identity, form="arrays")
    models.add("letters", letters)
    models.add("asleep", identity, replicas=0)
    settings = load({"inference": {"max_request_size": 1 << 20}})
    plane = DataPlane(models.reader, models.meters, lambda ref, row: models._models[ref])
    control = ControlPlane(models, settings, lambda: plane.access)
    with grpc_listening(lambda: inference_server(plane, control, settings, models.meters)) as address:
        yield address


def letters(data: list, context: Any) -> list:
    text = bytes(data[0]["data"]).decode()
    for letter in text[:-1]:
        send_intermediate_predict_response([letter], context.request_ids, "one", 200, context)
    return [text[-1]]


@pytest.fixture
def stub(address: str) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(address) as channel:
        yield GRPCInferenceServiceStub(channel)


def build_message(
    model: str = "identity", *inputs: tensors.Tensor, raw: bool = True, **fields: Any
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **fields)
    for tensor in inputs:
        input_ = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            request.raw_input_contents.append(bytes(tensor.data))
        else:
            getattr(input_.contents, FIELDS[tensor.datatype]).extend(tensor.to_list())
    return request


FIELDS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
ONES = tensors.from_array("INPUT0", np.ones((1, 16), np.int32))
RAMP = tensors.from_array("INPUT1", np.arange(16, dtype=np.int32).reshape(1, 16))


def outputs(response: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    arrays = {}
    for index, output in enumerate(response.outputs):
        shape = tuple(output.shape)
        if response.raw_output_contents:
            tensor = tensors.from_bytes(
                output.name, output.datatype, shape, response.raw_output_contents[index]
            )
        else:
            data = list(getattr(output.contents, FIELDS[output.datatype]))
            tensor = tensors.from_list(output.name, output.datatype, shape, data)
        arrays[output.name] = tensor.to_array()
    return arrays


def expect_error(method: Any, *args: Any, **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        method(*args, timeout=60, **options)
    return raised.value


def test_metadata_of_server_and_models(stub: GRPCInferenceServiceStub) -> None:
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    assert stub.ServerReady(pb.ServerReadyRequest()).ready
    server = stub.ServerMetadata(pb.ServerMetadataRequest())
    assert (server.name, "model_repository" in server.extensions) == ("torchrelay", True)
    assert stub.ModelReady(pb.ModelReadyRequest(name="simple")).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="asleep")).ready
    model = stub.ModelMetadata(pb.ModelMetadataRequest(name="simple", version="1.0"))
    assert list(model.versions) == ["1.0"]
    assert [(i.name, i.datatype, list(i.shape)) for i in model.inputs] == [
        ("INPUT0", "INT32", [1, 16]),
        ("INPUT1", "INT32", [1, 16]),
    ]
    config = stub.ModelConfig(pb.ModelConfigRequest(name="simple")).config
    assert (config.name, config.max_batch_size) == ("simple", 0)
    assert (config.input[0].data_type, list(config.output[1].dims)) == (pb.TYPE_INT32, [1, 16])


@pytest.mark.parametrize("raw", [True, False])
def test_inference_with_raw_and_typed_tensors(stub: GRPCInferenceServiceStub, raw: bool) -> None:
    response, call = stub.ModelInfer.with_call(build_message("simple", ONES, RAMP, raw=raw, id="mine"))
    assert (response.model_name, response.model_version, response.id) == ("simple", "1.0", "mine")
    assert bool(response.raw_output_contents) == raw
    arrays = outputs(response)
    assert arrays["OUTPUT0"].tolist() == [[1 + i for i in range(16)]]
    assert arrays["OUTPUT1"].tolist() == [[1 - i for i in range(16)]]
    assert dict(call.trailing_metadata())["x-model-version"] == "1.0"


def test_requested_outputs_are_returned(stub: GRPCInferenceServiceStub) -> None:
    request = build_message("simple", ONES, RAMP)
    request.outputs.add(name="OUTPUT1").parameters["classification"].int64_param = 2
    response = stub.ModelInfer(request)
    assert [output.name for output in response.outputs] == ["OUTPUT1"]
    assert outputs(response)["OUTPUT1"].tolist() == [[b"1.000000:0", b"0.000000:1"]]


def test_parameters_set_priority_and_sequence(stub: GRPCInferenceServiceStub, models: Any) -> None:
    request = build_message("identity", ONES)
    request.parameters["priority"].uint64_param = 9
    request.parameters["sequence_id"].string_param = "s"
    built = conversion.build_request(parse_request(request), "id", {}, load({}).runtime)
    assert (built.priority, built.headers["ts_request_sequence_id"]) == ("low", "s")


def _tensors() -> st.SearchStrategy[tensors.Tensor]:
    def of(datatype: str) -> st.SearchStrategy[tensors.Tensor]:
        shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)

        def data(shape: tuple[int, ...]) -> st.SearchStrategy[tensors.Tensor]:
            count = int(np.prod(shape))
            if datatype == "BYTES":
                lists = st.lists(st.binary(max_size=5), min_size=count, max_size=count)
                return lists.map(
                    lambda values: tensors.Tensor("t", datatype, shape, tensors.encode_elements(values))
                )
            size = count * DATATYPES[datatype]
            if datatype == "BOOL":
                elements = st.lists(st.booleans(), min_size=count, max_size=count).map(bytes)
            else:
                elements = st.binary(min_size=size, max_size=size)
            return elements.map(lambda data: tensors.Tensor("t", datatype, shape, data))

        return shapes.flatmap(data)

    return st.sampled_from(sorted(DATATYPES)).flatmap(of)


@given(_tensors(), st.booleans())
def test_tensors_survive_a_round_trip(tensor: tensors.Tensor, raw: bool) -> None:
    typed = tensor.datatype in FIELDS
    if typed and tensor.datatype.startswith("FP") and np.isnan(tensor.to_array()).any():
        raw = True  # Python's floats do not keep the payload of a NaN
    request = build_message("m", tensor, raw=raw or not typed)
    [part] = parse_request(pb.ModelInferRequest.FromString(request.SerializeToString())).inputs
    parsed = tensors.from_content_type(part.name, part.value, part.content_type)
    assert (parsed.datatype, parsed.shape, bytes(parsed.data)) == (
        tensor.datatype,
        tensor.shape,
        bytes(tensor.data),
    )
    reply = InferenceResponse(tensors.pack([tensor]), tensors.PACKED_MEDIA_TYPE, version="1.0")
    response = build_response(parse_request(request), reply, raw)
    assert bool(response.raw_output_contents) == (raw or not typed)
    np.testing.assert_array_equal(outputs(response)["t"], tensor.to_array())


def _request(**fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="identity")
    tensor = request.inputs.add(
        name="x", datatype=fields.pop("datatype", "FP32"), shape=fields.pop("shape", [2])
    )
    for raw in fields.pop("raw", []):
        request.raw_input_contents.append(raw)
    for name, values in fields.items():
        getattr(tensor.contents, name).extend(values)
    return request


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (_request(raw=[b"1234"]), "requires 8 bytes, and has 4"),
        (_request(raw=[b"12345678", b"x"]), "raw_input_contents has 2 elements, and there are 1 inputs"),
        (_request(raw=[b"12345678"], fp32_contents=[1, 2]), "has contents, and there are raw_input_contents"),
        (_request(fp32_contents=[1]), "has 2 elements, and 1 came"),
        (_request(int_contents=[1, 2]), "has int_contents; those of FP32 are fp32_contents"),
        (_request(datatype="INT8", int_contents=[1, 1000]), "no room"),
        (_request(datatype="FP16"), "FP16 has no typed contents; send raw_input_contents"),
        (_request(datatype="FLOAT"), "datatype is 'FLOAT'"),
        (_request(shape=[-1], fp32_contents=[1]), "a list of lengths from 0"),
        (_request(shape=[2**62, 2**62], raw=[b""]), "no memory holds a tensor of the shape"),
        (_request(datatype="BYTES", raw=[b"\xff\xff\xff\xffab"]), "elements of BYTES by its shape"),
    ],
)
def test_invalid_tensors_are_rejected(stub: GRPCInferenceServiceStub, request_: Any, message: str) -> None:
    error = expect_error(stub.ModelInfer, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in error.details()


def test_inputs_must_match_the_signature(stub: GRPCInferenceServiceStub) -> None:
    error = expect_error(stub.ModelInfer, build_message("simple", ONES))
    assert (error.code(), "The input INPUT1 is missing" in error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        True,
    )


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_unknown_models_are_not_found(stub: GRPCInferenceServiceStub, method: str) -> None:
    for name, version in (("missing", ""), ("simple", "9")):
        error = expect_error(
            getattr(stub, method), getattr(pb, f"{method}Request")(name=name, version=version)
        )
        assert error.code() == grpc.StatusCode.NOT_FOUND
    assert (
        expect_error(stub.ModelInfer, build_message("missing", ONES)).details() == "Model not found: missing"
    )


def test_a_stream_answers_its_requests_in_order(stub: GRPCInferenceServiceStub) -> None:
    requests = [
        build_message("simple", ONES, RAMP, id="1"),
        build_message("missing", ONES, id="2"),
        build_message("simple", RAMP, id="3"),
        build_message("simple", ONES, RAMP, id="4"),
    ]
    responses = list(stub.ModelStreamInfer(iter(requests)))
    assert [response.infer_response.id for response in responses] == ["1", "2", "3", "4"]
    assert [bool(response.error_message) for response in responses] == [False, True, True, False]
    assert responses[1].error_message == "Model not found: missing"
    assert responses[3].infer_response.parameters["triton_final_response"].bool_param


def test_each_streamed_chunk_is_a_response(stub: GRPCInferenceServiceStub) -> None:
    text = tensors.from_text(b"abc", "data")
    request = build_message("letters", text)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    *responses, last = stub.ModelStreamInfer(iter([request]))
    assert [outputs(response.infer_response)["output-0"].tolist() for response in responses] == [
        [b"a"],
        [b"b"],
        [b"c"],
    ]
    assert not last.infer_response.outputs
    assert last.infer_response.parameters["triton_final_response"].bool_param
    assert outputs(stub.ModelInfer(build_message("letters", text)))["output-0"].tolist() == [b"abc"]


def test_repository_and_statistics(stub: GRPCInferenceServiceStub, models: Any) -> None:
    index = {m.name: m.state for m in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
    assert (index["simple"], index["asleep"]) == ("READY", "UNAVAILABLE")
    assert "asleep" not in [
        m.name for m in stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models
    ]
    load_ = pb.RepositoryModelLoadRequest(model_name="asleep")
    load_.parameters["workers"].int64_param = 2
    stub.RepositoryModelLoad(load_)
    assert models.operations[-1][:4] == ("scale", "asleep", None, 2)
    assert stub.ModelReady(pb.ModelReadyRequest(name="asleep")).ready
    stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="asleep"))
    assert not stub.ModelReady(pb.ModelReadyRequest(name="asleep")).ready
    stub.ModelInfer(build_message("simple", ONES, RAMP))
    [figures] = stub.ModelStatistics(pb.ModelStatisticsRequest(name="simple")).model_stats
    assert (figures.name, figures.inference_stats.success.count) == ("simple", 1)
    load_.parameters["config"].string_param = "{}"
    assert expect_error(stub.RepositoryModelLoad, load_).code() == grpc.StatusCode.UNIMPLEMENTED


def test_keys_limit_methods_and_models(stub: GRPCInferenceServiceStub, models: Any) -> None:
    grant = KeyGrant(frozenset({"infer"}), ("simple",))
    models.grant(AccessTable({hashlib.sha256(b"good").digest(): grant}))
    key = [("authorization", "Bearer good")]
    stub.ServerReady(pb.ServerReadyRequest())
    stub.ModelInfer(build_message("simple", ONES, RAMP), metadata=key)
    assert [m.name for m in stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=key).models] == [
        "simple"
    ]
    assert (
        expect_error(stub.ModelInfer, build_message("simple", ONES, RAMP)).code()
        == grpc.StatusCode.UNAUTHENTICATED
    )
    assert (
        expect_error(stub.ModelInfer, build_message("identity", ONES), metadata=key).code()
        == grpc.StatusCode.PERMISSION_DENIED
    )
    load_ = pb.RepositoryModelLoadRequest(model_name="simple")
    assert (
        expect_error(stub.RepositoryModelLoad, load_, metadata=key).code()
        == grpc.StatusCode.PERMISSION_DENIED
    )


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("m", None, ""), "RESOURCE_EXHAUSTED"), (HandlerFailed(""), "INTERNAL")]
)
def test_statuses_of_errors(error: RelayError, code: str) -> None:
    assert next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE).name == code


def test_triton_grpc_client(address: str) -> None:
    run_client(sys.executable, "triton_grpc.py", address)


@pytest.mark.nightly
def test_kserve_grpc_client(kserve_python: Path, address: str) -> None:
    run_client(str(kserve_python), "kserve_grpc.py", address)


def run_client(python: str, script: str, address: str) -> None:
    process = subprocess.run(
        [python, CLIENTS / script, address], capture_output=True, text=True, timeout=300, check=False
    )
    assert "every call was answered" in process.stdout, process.stderr

"""The Open Inference Protocol by gRPC: what is read, what is answered, and what is refused."""

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

from handlers.intermediate import send_intermediate_predict_response
from serve_app import tensors
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane
from serve_app.doors.grpc.app import inference_server
from serve_app.doors.oip import convert
from serve_app.doors.oip.grpc import TABLE, read, write
from serve_app.errors import HandlerFailed, QueueFull, RelayError
from serve_app.proto import open_inference_grpc_pb2 as pb
from serve_app.proto.open_inference_grpc_pb2_grpc import GRPCInferenceServiceStub
from serve_app.settings import load
from serve_app.signature import DATATYPES
from serve_app.types import Access, Grant, Reply

CLIENTS = Path(__file__).parents[2] / "clients"
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


def asked(model: str = "identity", *inputs: tensors.Tensor, raw: bool = True, **more: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, **more)
    for tensor in inputs:
        made = request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            request.raw_input_contents.append(bytes(tensor.data))
        else:
            getattr(made.contents, FIELDS[tensor.datatype]).extend(tensor.values())
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
ONES = tensors.of("INPUT0", np.ones((1, 16), np.int32))
RAMP = tensors.of("INPUT1", np.arange(16, dtype=np.int32).reshape(1, 16))


def outputs(response: pb.ModelInferResponse) -> dict[str, np.ndarray]:
    found = {}
    for place, output in enumerate(response.outputs):
        shape = tuple(output.shape)
        if response.raw_output_contents:
            tensor = tensors.raw(output.name, output.datatype, shape, response.raw_output_contents[place])
        else:
            data = list(getattr(output.contents, FIELDS[output.datatype]))
            tensor = tensors.listed(output.name, output.datatype, shape, data)
        found[output.name] = tensor.array()
    return found


def refusal(call: Any, *args: Any, **named: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        call(*args, timeout=60, **named)
    return raised.value


def test_server_and_models_tell_of_themselves(stub: GRPCInferenceServiceStub) -> None:
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
def test_an_inference(stub: GRPCInferenceServiceStub, raw: bool) -> None:
    answer, call = stub.ModelInfer.with_call(asked("simple", ONES, RAMP, raw=raw, id="mine"))
    assert (answer.model_name, answer.model_version, answer.id) == ("simple", "1.0", "mine")
    assert bool(answer.raw_output_contents) == raw
    found = outputs(answer)
    assert found["OUTPUT0"].tolist() == [[1 + i for i in range(16)]]
    assert found["OUTPUT1"].tolist() == [[1 - i for i in range(16)]]
    assert dict(call.trailing_metadata())["x-model-version"] == "1.0"


def test_outputs_that_are_asked_for(stub: GRPCInferenceServiceStub) -> None:
    request = asked("simple", ONES, RAMP)
    request.outputs.add(name="OUTPUT1").parameters["classification"].int64_param = 2
    answer = stub.ModelInfer(request)
    assert [output.name for output in answer.outputs] == ["OUTPUT1"]
    assert outputs(answer)["OUTPUT1"].tolist() == [[b"1.000000:0", b"0.000000:1"]]


def test_parameters_are_those_of_the_protocol(stub: GRPCInferenceServiceStub, models: Any) -> None:
    request = asked("identity", ONES)
    request.parameters["priority"].uint64_param = 9
    request.parameters["sequence_id"].string_param = "s"
    made = convert.call(read(request), "id", {}, load({}).runtime)
    assert (made.priority, made.headers["ts_request_sequence_id"]) == ("low", "s")


def _tensors() -> st.SearchStrategy[tensors.Tensor]:
    def of(datatype: str) -> st.SearchStrategy[tensors.Tensor]:
        shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)

        def data(shape: tuple[int, ...]) -> st.SearchStrategy[tensors.Tensor]:
            count = int(np.prod(shape))
            if datatype == "BYTES":
                lists = st.lists(st.binary(max_size=5), min_size=count, max_size=count)
                return lists.map(lambda values: tensors.Tensor("t", datatype, shape, tensors.joined(values)))
            size = count * DATATYPES[datatype]
            if datatype == "BOOL":
                made = st.lists(st.booleans(), min_size=count, max_size=count).map(bytes)
            else:
                made = st.binary(min_size=size, max_size=size)
            return made.map(lambda found: tensors.Tensor("t", datatype, shape, found))

        return shapes.flatmap(data)

    return st.sampled_from(sorted(DATATYPES)).flatmap(of)


@given(_tensors(), st.booleans())
def test_a_round_trip_is_the_identity(tensor: tensors.Tensor, raw: bool) -> None:
    typed = tensor.datatype in FIELDS
    if typed and tensor.datatype.startswith("FP") and np.isnan(tensor.array()).any():
        raw = True  # which of the many NaNs it is, Python's floats do not keep
    request = asked("m", tensor, raw=raw or not typed)
    [part] = read(pb.ModelInferRequest.FromString(request.SerializeToString())).inputs
    read_back = tensors.received(part.name, part.value, part.content_type)
    assert (read_back.datatype, read_back.shape, bytes(read_back.data)) == (
        tensor.datatype,
        tensor.shape,
        bytes(tensor.data),
    )
    reply = Reply(tensors.pack([tensor]), tensors.PACKED, version="1.0")
    response = write(read(request), reply, raw)
    assert bool(response.raw_output_contents) == (raw or not typed)
    np.testing.assert_array_equal(outputs(response)["t"], tensor.array())


def _request(**fields: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="identity")
    made = request.inputs.add(name="x", datatype=fields.pop("datatype", "FP32"), shape=fields.pop("shape", [2]))
    for raw in fields.pop("raw", []):
        request.raw_input_contents.append(raw)
    for name, values in fields.items():
        getattr(made.contents, name).extend(values)
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (_request(raw=[b"1234"]), "has 8 bytes as it says, and 4 came"),
        (_request(raw=[b"12345678", b"x"]), "raw_input_contents has 2 elements, and there are 1 inputs"),
        (_request(raw=[b"12345678"], fp32_contents=[1, 2]), "has contents, and there are raw_input_contents"),
        (_request(fp32_contents=[1]), "has 2 elements, and 1 came"),
        (_request(int_contents=[1, 2]), "has int_contents; those of FP32 are fp32_contents"),
        (_request(datatype="INT8", int_contents=[1, 1000]), "no room"),
        (_request(datatype="FP16"), "FP16 has no typed contents; send raw_input_contents"),
        (_request(datatype="FLOAT"), "datatype is 'FLOAT'"),
        (_request(shape=[-1], fp32_contents=[1]), "a list of lengths from 0"),
        (_request(shape=[2**62, 2**62], raw=[b""]), "no memory holds a tensor of the shape"),
        (_request(datatype="BYTES", raw=[b"\xff\xff\xff\xffab"]), "elements of BYTES as its shape says"),
    ],
)
def test_tensors_that_are_none(stub: GRPCInferenceServiceStub, request_: Any, words: str) -> None:
    error = refusal(stub.ModelInfer, request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.details()


def test_what_the_model_does_not_take(stub: GRPCInferenceServiceStub) -> None:
    error = refusal(stub.ModelInfer, asked("simple", ONES))
    assert (error.code(), "The input INPUT1 is missing" in error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("method", ["ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"])
def test_a_model_that_is_not_here(stub: GRPCInferenceServiceStub, method: str) -> None:
    for name, version in (("nobody", ""), ("simple", "9")):
        error = refusal(getattr(stub, method), getattr(pb, f"{method}Request")(name=name, version=version))
        assert error.code() == grpc.StatusCode.NOT_FOUND
    assert refusal(stub.ModelInfer, asked("nobody", ONES)).details() == "Model not found: nobody"


def test_many_requests_over_one_stream(stub: GRPCInferenceServiceStub) -> None:
    requests = [
        asked("simple", ONES, RAMP, id="1"),
        asked("nobody", ONES, id="2"),
        asked("simple", RAMP, id="3"),
        asked("simple", ONES, RAMP, id="4"),
    ]
    answers = list(stub.ModelStreamInfer(iter(requests)))
    assert [answer.infer_response.id for answer in answers] == ["1", "2", "3", "4"]
    assert [bool(answer.error_message) for answer in answers] == [False, True, True, False]
    assert answers[1].error_message == "Model not found: nobody"
    assert answers[3].infer_response.parameters["triton_final_response"].bool_param


def test_what_a_handler_streams_is_a_response_for_each_piece(stub: GRPCInferenceServiceStub) -> None:
    text = tensors.text(b"abc", "data")
    request = asked("letters", text)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    *answers, last = stub.ModelStreamInfer(iter([request]))
    assert [outputs(answer.infer_response)["output-0"].tolist() for answer in answers] == [[b"a"], [b"b"], [b"c"]]
    assert not last.infer_response.outputs
    assert last.infer_response.parameters["triton_final_response"].bool_param
    assert outputs(stub.ModelInfer(asked("letters", text)))["output-0"].tolist() == [b"abc"]


def test_repository_and_statistics(stub: GRPCInferenceServiceStub, models: Any) -> None:
    index = {m.name: m.state for m in stub.RepositoryIndex(pb.RepositoryIndexRequest()).models}
    assert (index["simple"], index["asleep"]) == ("READY", "UNAVAILABLE")
    assert "asleep" not in [m.name for m in stub.RepositoryIndex(pb.RepositoryIndexRequest(ready=True)).models]
    load_ = pb.RepositoryModelLoadRequest(model_name="asleep")
    load_.parameters["workers"].int64_param = 2
    stub.RepositoryModelLoad(load_)
    assert models.asked[-1][:4] == ("scale", "asleep", None, 2)
    assert stub.ModelReady(pb.ModelReadyRequest(name="asleep")).ready
    stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(model_name="asleep"))
    assert not stub.ModelReady(pb.ModelReadyRequest(name="asleep")).ready
    stub.ModelInfer(asked("simple", ONES, RAMP))
    [figures] = stub.ModelStatistics(pb.ModelStatisticsRequest(name="simple")).model_stats
    assert (figures.name, figures.inference_stats.success.count) == ("simple", 1)
    load_.parameters["config"].string_param = "{}"
    assert refusal(stub.RepositoryModelLoad, load_).code() == grpc.StatusCode.UNIMPLEMENTED


def test_keys(stub: GRPCInferenceServiceStub, models: Any) -> None:
    grant = Grant(frozenset({"infer"}), ("simple",))
    models.grant(Access({hashlib.sha256(b"good").digest(): grant}))
    key = [("authorization", "Bearer good")]
    stub.ServerReady(pb.ServerReadyRequest())
    stub.ModelInfer(asked("simple", ONES, RAMP), metadata=key)
    assert [m.name for m in stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=key).models] == ["simple"]
    assert refusal(stub.ModelInfer, asked("simple", ONES, RAMP)).code() == grpc.StatusCode.UNAUTHENTICATED
    assert refusal(stub.ModelInfer, asked("identity", ONES), metadata=key).code() == grpc.StatusCode.PERMISSION_DENIED
    load_ = pb.RepositoryModelLoadRequest(model_name="simple")
    assert refusal(stub.RepositoryModelLoad, load_, metadata=key).code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("error", "code"), [(QueueFull("m", None, ""), "RESOURCE_EXHAUSTED"), (HandlerFailed(""), "INTERNAL")]
)
def test_some_errors(error: RelayError, code: str) -> None:
    assert next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE).name == code


def test_tritons_own_client(address: str) -> None:
    ran(sys.executable, "triton_grpc.py", address)


def test_kserves_own_client(kserve_python: Path, address: str) -> None:
    ran(str(kserve_python), "kserve_grpc.py", address)


def ran(python: str, script: str, address: str) -> None:
    done = subprocess.run([python, CLIENTS / script, address], capture_output=True, text=True, timeout=300, check=False)
    assert "every call was answered" in done.stdout, done.stderr

"""TorchServe's gRPC APIs through real channels: what is asked for, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import hashlib
import json
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo

from serve_app import errors
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.proto.management_pb2 import (
    DescribeModelRequest,
    ListModelsRequest,
    RegisterModelRequest,
    ScaleWorkerRequest,
    SetDefaultRequest,
    UnregisterModelRequest,
)
from serve_app.proto.management_pb2_grpc import ManagementAPIsServiceStub
from serve_app.types import Access, Call, Grant, Reply, ReplyStream, Table, Timings

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


def asked(model: str = "m", version: str = "", sequence: str | None = None, **parts: bytes) -> PredictionsRequest:
    return PredictionsRequest(
        model_name=model, model_version=version, input=parts or {"data": b"x"}, sequence_id=sequence
    )


def streams(*pieces: bytes, status: int = 200) -> Any:
    async def infer(call: Call) -> ReplyStream:
        async def chunks() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return ReplyStream(Reply(b"", version="1.0", status=status), chunks())

    return infer


def fails(error: Exception) -> Any:
    async def infer(call: Call) -> Reply:
        raise error

    return infer


def refusal(call: Any, *args: Any, **named: Any) -> grpc.RpcError:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as raised:
        answer = call(*args, timeout=60, **named)
        list(answer)
    return raised.value


def trailers(call: Any) -> dict[str, str]:
    return dict(call.trailing_metadata())


def access_of(**grants: Grant) -> Access:
    return Access({hashlib.sha256(key.encode()).digest(): grant for key, grant in grants.items()})


# Inference


def test_a_prediction(over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply:
        headers = (("Kind", "cat"), ("Über", "x"), ("x-bin", "y"))
        timings = Timings(0.001, 0.002, 3)
        return Reply(b"meow", "text/plain", 599, "Odd", headers, version="1.0", timings=timings, arm="t/a")

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    answer, call = stub.Predictions.with_call(
        asked(data=b"\x00\xff", more=b"2"), metadata=[("colour", "red"), ("x-request-id", "mine"), ("b-bin", b"\x01")]
    )
    assert answer.prediction == b"meow"
    assert not answer.HasField("sequence_id")
    assert not answer.HasField("status")
    got = server.target.calls[0]
    assert {part.name: (part.value, part.content_type) for part in got.inputs} == {
        "data": (b"\x00\xff", None),
        "more": (b"2", None),
    }
    assert (got.model, got.version, got.kind, got.priority, got.deadline) == ("m", None, "predict", "normal", None)
    assert got.headers["colour"] == "red"
    assert got.headers["url_path"] == ""
    assert got.headers["explain"] == "False"
    assert "b-bin" not in got.headers
    said = trailers(call)
    assert said.pop("x-request-id") == got.request_id != "mine"
    assert said == {
        "x-model-version": "1.0",
        "x-torchrelay-arm": "t/a",
        "server-timing": "queue;dur=1.000, inference;dur=2.000, batch;desc=3",
        "x-content-type": "text/plain",
        "kind": "cat",
        "x-status": "599 Odd",
    }
    client, method, path, http, status, _, request_id, model, version, _ = server.access[0]
    assert client.startswith("127.0.0.1:")
    assert (method, path) == ("gRPC", "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
    assert (http, status, request_id, model, version) == ("2", 0, got.request_id, "m", "1.0")


def test_a_version_a_deadline_and_a_priority_are_heeded(over_grpc: Any) -> None:
    server = over_grpc()
    stub = InferenceAPIsServiceStub(server.channel)
    before = time.time()
    stub.Predictions(asked(version="2.0"), timeout=60, metadata=[("x-request-priority", "high")])
    call = server.target.calls[0]
    assert (call.version, call.priority) == ("2.0", "high")
    assert before + 59 < call.deadline < time.time() + 61
    error = refusal(stub.Predictions, asked(), metadata=[("x-request-priority", "urgent")])
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "Header x-request-priority must be high, normal or low; got 'urgent'.\nBadRequestException"
    )


def test_a_sequence_id_reaches_the_handler_as_the_header_that_it_is_over_http(over_grpc: Any) -> None:
    server = over_grpc()
    stub = InferenceAPIsServiceStub(server.channel)
    stub.Predictions(asked(sequence="s1", data=b"x", ts_request_sequence_end=b"true"))
    headers = server.target.calls[0].headers
    assert headers["ts_request_sequence_id"] == "s1"
    assert headers["ts_request_sequence_end"] == "true"
    assert "ts_request_sequence_start" not in headers


def test_a_streamed_prediction(over_grpc: Any) -> None:
    server = over_grpc(streams(b"a", b"b", b""))
    stub = InferenceAPIsServiceStub(server.channel)
    stream = stub.StreamPredictions(asked())
    assert [answer.prediction for answer in stream] == [b"a", b"b", b""]
    assert trailers(stream)["x-model-version"] == "1.0"
    assert stub.Predictions(asked()).prediction == b"ab"  # who asks for one message gets one


def test_one_message_of_a_model_that_does_not_stream(over_grpc: Any) -> None:
    stub = InferenceAPIsServiceStub(over_grpc().channel)
    assert [answer.prediction for answer in stub.StreamPredictions(asked(data=b"whole"))] == [b"whole"]


def test_what_is_streamed_into_one_message_is_bounded(over_grpc: Any) -> None:
    server = over_grpc(streams(b"a" * 60, b"b" * 60), runtime={"max_response_size": 100})
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, asked())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "runtime.max_response_size" in error.details()


def test_a_stream_that_breaks_ends_with_its_error(over_grpc: Any) -> None:
    async def infer(call: Call) -> ReplyStream:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"a"
            raise errors.WorkerDied("gone")

        return ReplyStream(Reply(b"", version="1.0"), chunks())

    stream = InferenceAPIsServiceStub(over_grpc(infer).channel).StreamPredictions(asked())
    assert next(stream).prediction == b"a"
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert raised.value.details() == "Worker died.\nInternalServerException"
    assert trailers(raised.value)["x-torchrelay-reason"] == "worker_died"


def test_a_sequence_over_one_stream(over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply:
        if call.inputs[0].value == b"bad":
            raise errors.HandlerFailed("trace")
        return Reply(call.inputs[0].value.upper(), version="1.0")

    server = over_grpc(infer)
    answers = list(
        InferenceAPIsServiceStub(server.channel).StreamPredictions2(
            iter([asked(sequence="s", data=b"a"), asked(sequence="s", data=b"bad"), asked(sequence="s", data=b"c")])
        )
    )
    assert [(answer.prediction, answer.sequence_id) for answer in answers] == [(b"A", "s"), (b"", "s"), (b"C", "s")]
    assert [answer.HasField("status") for answer in answers] == [False, True, False]
    assert answers[1].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert answers[1].status.message == "Prediction failed\nInternalServerException"
    info = ErrorInfo()
    assert answers[1].status.details[0].Unpack(info)
    assert info.reason == "handler_failed"
    assert info.metadata["x-request-id"] == server.target.calls[1].request_id
    assert [call.headers["ts_request_sequence_id"] for call in server.target.calls] == ["s"] * 3


def test_a_sequence_without_an_id_gets_one_where_it_starts(over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply:
        return Reply(b"", headers=(("ts_request_sequence_id", "made-here"),), version="1.0")

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    first, second = stub.StreamPredictions2(iter([asked(ts_request_sequence_start=b"true"), asked()]))
    assert {first.sequence_id, second.sequence_id} == {"made-here", ""}
    refused = first if first.HasField("status") else second
    assert refused.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert refused.status.message == "Parameter sequenceId is required.\nBadRequestException"
    assert [call.headers["ts_request_sequence_start"] for call in server.target.calls] == ["true"]
    assert stub.Predictions(asked(ts_request_sequence_start=b"true")).sequence_id == "made-here"


def test_a_request_reaches_a_sequence_whose_answer_is_being_streamed(over_grpc: Any) -> None:
    stopped: list[bool] = []

    async def infer(call: Call) -> Reply | ReplyStream:
        if call.inputs[0].value == b"stop":
            stopped.append(True)
            return Reply(b"stopping", version="1.0")

        async def chunks() -> AsyncIterator[bytes]:
            while not stopped:
                yield b"x"
                await asyncio.sleep(0.005)
            yield b"end"

        return ReplyStream(Reply(b"", version="1.0"), chunks())

    server = over_grpc(infer)
    more: queue.SimpleQueue[PredictionsRequest | None] = queue.SimpleQueue()
    more.put(asked(sequence="s"))
    answers = InferenceAPIsServiceStub(server.channel).StreamPredictions2(iter(more.get, None))
    assert next(answers).prediction == b"x"
    more.put(asked(sequence="s", data=b"stop"))
    more.put(None)
    assert {b"stopping", b"end"} <= {answer.prediction for answer in answers}
    assert len({call.request_id for call in server.target.calls}) == 2


def test_a_stream_of_sequences_that_is_left_ends_all_of_its_calls(over_grpc: Any) -> None:
    ended = []

    async def infer(call: Call) -> Reply:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(call.request_id)
            raise
        return Reply(b"")

    server = over_grpc(infer)
    answers = InferenceAPIsServiceStub(server.channel).StreamPredictions2(iter([asked(sequence="s")] * 3))
    wait(lambda: len(server.target.calls) == 3)
    answers.cancel()
    wait(lambda: len(ended) == 3)


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (asked("nobody"), "INTERNAL", "Model not found: nobody\nModelNotFoundException"),
        (
            asked("m", "9.9"),
            "INTERNAL",
            "Model version: 9.9 does not exist for model: m\nModelVersionNotFoundException",
        ),
        (asked(""), "INTERNAL", "Parameter model_name is required.\nBadRequestException"),
    ],
)
def test_who_asks_for_what_is_not_there(over_grpc: Any, request_: Any, code: str, details: str) -> None:
    server = over_grpc()
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, request_)
    assert (error.code().name, error.details()) == (code, details)
    wait(lambda: server.access)
    assert server.access[0][4] == error.code().value[0]


def test_what_a_refusal_says_beside_its_status(over_grpc: Any) -> None:
    server = over_grpc(fails(errors.QueueFull("m", None, "full")))
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, asked())
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith('Model "m" has no worker to serve inference request.')
    said = trailers(error)
    assert (said["x-torchrelay-reason"], said["retry-after"], said["x-model-version"]) == ("queue_full", "1", "1.0")
    for error, more in (
        (errors.HandlerSaid("no", 418), {"x-status": "418"}),
        (errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""), {"x-torchrelay-step": "first"}),
    ):
        refused = refusal(InferenceAPIsServiceStub(over_grpc(fails(error)).channel).Predictions, asked())
        assert more.items() <= trailers(refused).items()


def test_the_type_of_the_parts(over_grpc: Any) -> None:
    server = over_grpc()
    InferenceAPIsServiceStub(server.channel).Predictions(asked(), metadata=[("x-content-type", "application/json")])
    assert server.target.calls[0].inputs[0].content_type == "application/json"


def test_a_fault_of_the_server_keeps_its_words_to_itself(over_grpc: Any, caplog: Any) -> None:
    server = over_grpc(fails(RuntimeError("secret")))
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, asked())
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith("Unexpected RuntimeError; the server's log has more under ")
    assert "secret" in caplog.text


def test_how_much_of_a_handlers_error_is_shown_is_a_setting(over_grpc: Any) -> None:
    raised = errors.HandlerFailed("Traceback\nValueError: bad " + "x" * 100_000)
    server = over_grpc(fails(raised), inference={"handler_errors": "traceback"})
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, asked())
    assert error.details().startswith("Prediction failed\nTraceback\nValueError: bad x")
    assert len(error.details()) == 2_000


def test_ping(over_grpc: Any) -> None:
    server = over_grpc()
    health = InferenceAPIsServiceStub(server.channel).Ping(Empty()).health
    assert json.loads(health) == {"status": "Healthy"}


def test_a_request_that_is_too_large(over_grpc: Any) -> None:
    server = over_grpc(inference={"max_request_size": 1000})
    error = refusal(InferenceAPIsServiceStub(server.channel).Predictions, asked(data=b"x" * 2000))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers(error) == {"x-torchrelay-reason": "too_large"}
    assert not server.target.calls


def test_a_caller_who_leaves_ends_the_call(over_grpc: Any) -> None:
    ended = []

    async def infer(call: Call) -> Reply:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(call.model)
            raise
        return Reply(b"")

    server = over_grpc(infer)
    waiting = InferenceAPIsServiceStub(server.channel).Predictions.future(asked())
    wait(lambda: server.target.calls)
    waiting.cancel()
    wait(lambda: ended)
    wait(lambda: server.access)
    assert server.access[0][4] == grpc.StatusCode.CANCELLED.value[0]


def test_a_stream_whose_caller_leaves_is_closed(over_grpc: Any) -> None:
    closed = []

    async def infer(call: Call) -> ReplyStream:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            finally:
                closed.append(True)

        return ReplyStream(Reply(b"", version="1.0"), chunks())

    stream = InferenceAPIsServiceStub(over_grpc(infer).channel).StreamPredictions(asked())
    next(stream)
    stream.cancel()
    wait(lambda: closed)


def test_a_client_that_does_not_read_holds_up_its_own_stream_alone(over_grpc: Any) -> None:
    made = []

    async def infer(call: Call) -> Reply | ReplyStream:
        if call.inputs[0].value != b"stream":
            return Reply(b"ok", version="1.0")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(1000):
                made.append(1)
                yield b"x" * 100_000

        return ReplyStream(Reply(b"", version="1.0"), chunks())

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    stream = stub.StreamPredictions(asked(data=b"stream"))
    next(stream)
    with grpc.insecure_channel(server.address, options=[("unshared", 1)]) as other:
        for _ in range(50):
            assert InferenceAPIsServiceStub(other).Predictions(asked(), timeout=60).prediction == b"ok"
    assert len(made) < 300  # of the 100 MB a few are under way
    stream.cancel()


def wait(condition: Any, patience: float = 60.0) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Keys


def test_a_key_is_asked_for_and_kept_from_handlers(over_grpc: Any) -> None:
    server = over_grpc()
    grant = Grant(frozenset({"infer"}), ("m",))
    server.reader.put(Table(2, server.reader.table.models, True, access_of(good=grant)))
    stub = InferenceAPIsServiceStub(server.channel)
    stub.Predictions(asked(), metadata=[("authorization", "Bearer good")])
    assert "authorization" not in server.target.calls[0].headers
    for key, reason in ((None, "missing_token"), ("Bearer bad", "invalid_token")):
        error = refusal(stub.Predictions, asked(), metadata=[("authorization", key)] if key else None)
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert error.details() == f"{REFUSED}\nInvalidKeyException"
        assert trailers(error)["x-torchrelay-reason"] == reason
    error = refusal(stub.StreamPredictions, asked("other"), metadata=[("authorization", "Bearer good")])
    assert trailers(error)["x-torchrelay-reason"] == "wrong_model"
    stub.Ping(Empty())  # probes show no key


# Management


@pytest.fixture
def manage(managed_by_grpc: Any) -> Iterator[tuple[ManagementAPIsServiceStub, Any]]:
    server = managed_by_grpc()
    yield ManagementAPIsServiceStub(server.channel), server


def test_the_life_of_a_model(manage: Any) -> None:
    stub, server = manage
    said = stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar", initial_workers=1, synchronous=True)).msg
    assert said == 'Model "m" Version: 1.0 registered with 1 initial workers'
    asked = server.shelf.asked[0][1]
    assert (asked.batch_size, asked.max_batch_delay, asked.response_timeout, asked.wait) == (None, None, None, True)
    said = stub.RegisterModel(RegisterModelRequest(url="m-2.0.mar", batch_size=4, max_batch_delay=-1)).msg
    assert said.startswith('Model "m" Version: 2.0 registered with 0 initial workers. Use scale workers API')
    assert stub.ScaleWorker(ScaleWorkerRequest(model_name="m", min_worker=2, synchronous=True)).msg == (
        "Workers scaled to 2 for model: m"
    )
    scale = ScaleWorkerRequest(model_name="m", model_version="2.0", min_worker=2)
    assert stub.ScaleWorker(scale).msg == "Processing worker updates..."
    assert stub.SetDefault(SetDefaultRequest(model_name="m", model_version="2.0")).msg == (
        'Default version successfully updated for model "m" to "2.0"'
    )
    [described] = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m")).msg)
    assert (described["modelVersion"], described["batchSize"]) == ("2.0", 4)
    everything = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m", model_version="all")).msg)
    assert [version["modelVersion"] for version in everything] == ["1.0", "2.0"]
    assert json.loads(stub.ListModels(ListModelsRequest()).msg) == {
        "models": [{"modelName": "m", "modelUrl": "m-2.0.mar"}]
    }
    assert stub.UnregisterModel(UnregisterModelRequest(model_name="m", model_version="1.0")).msg == (
        'Model "m" unregistered'
    )
    path = "/org.pytorch.serve.grpc.management.ManagementAPIsService/UnregisterModel"
    _, method, logged, _, status, _, _, model, version, _ = server.access[-1]
    assert (method, logged, status, model, version) == ("gRPC", path, 0, "m", "1.0")


def test_pages_of_models(manage: Any) -> None:
    stub, _ = manage
    for name in "abc":
        stub.RegisterModel(RegisterModelRequest(url=f"{name}-1.0.mar"))
    first = json.loads(stub.ListModels(ListModelsRequest(limit=2)).msg)
    assert ([m["modelName"] for m in first["models"]], first["nextPageToken"]) == (["a", "b"], "2")
    second = json.loads(stub.ListModels(ListModelsRequest(limit=2, next_page_token=2)).msg)
    assert [m["modelName"] for m in second["models"]] == ["c"]


def test_what_a_handler_says_of_itself(manage: Any) -> None:
    stub, server = manage
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"))
    server.shelf.said = {"labels": 3}
    [described] = json.loads(stub.DescribeModel(DescribeModelRequest(model_name="m", customized=True)).msg)
    assert described["customizedMetadata"] == {"labels": 3}
    server.shelf.said = errors.NoWorker("m", None, "")
    error = refusal(stub.DescribeModel, DescribeModelRequest(model_name="m", customized=True))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details().startswith('Model "m" has no worker to serve describe request.')


@pytest.mark.parametrize(
    ("method", "request_", "code", "details"),
    [
        ("RegisterModel", RegisterModelRequest(), "INVALID_ARGUMENT", "Parameter url is required."),
        ("RegisterModel", RegisterModelRequest(url="m-1.0.mar"), "UNKNOWN", "Model version 1.0 is already registered"),
        (
            "ScaleWorker",
            ScaleWorkerRequest(model_name="m", min_worker=2, max_worker=1),
            "INVALID_ARGUMENT",
            "max_worker cannot be less than min_worker.",
        ),
        ("ScaleWorker", ScaleWorkerRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
        ("DescribeModel", DescribeModelRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
        ("DescribeModel", DescribeModelRequest(), "INVALID_ARGUMENT", "Parameter model_name is required."),
        (
            "SetDefault",
            SetDefaultRequest(model_name="m", model_version="9"),
            "NOT_FOUND",
            "Model version 9 does not exist",
        ),
        ("SetDefault", SetDefaultRequest(model_name="m"), "INVALID_ARGUMENT", "Parameter model_version is required."),
        ("UnregisterModel", UnregisterModelRequest(model_name="m"), "UNKNOWN", "Cannot remove default version"),
        ("UnregisterModel", UnregisterModelRequest(model_name="x"), "NOT_FOUND", "Model not found: x"),
    ],
)
def test_what_management_refuses(manage: Any, method: str, request_: Any, code: str, details: str) -> None:
    stub, _ = manage
    for version in ("1.0", "2.0"):
        stub.RegisterModel(RegisterModelRequest(url=f"m-{version}.mar"))
    error = refusal(getattr(stub, method), request_)
    assert error.code().name == code
    assert error.details().startswith(details)


def test_workers_that_are_no_number_are_as_if_nothing_was_said(manage: Any) -> None:
    stub, server = manage
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"))
    stub.ScaleWorker(ScaleWorkerRequest(model_name="m", min_worker=-1, max_worker=-1))
    assert server.shelf.asked[-1] == ("scale", "m", None, 1, 1, False)


def test_a_change_that_is_not_everywhere_yet_is_said_as_an_answer(manage: Any) -> None:
    stub, server = manage
    server.shelf.fails = errors.NotYet("Accepted, and not everywhere in force yet.")
    said = stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar", initial_workers=1)).msg
    assert said == "Accepted, and not everywhere in force yet."


def test_a_model_api_that_is_switched_off(managed_by_grpc: Any) -> None:
    server = managed_by_grpc(control={"enable_model_api": False})
    error = refusal(ManagementAPIsServiceStub(server.channel).RegisterModel, RegisterModelRequest(url="m-1.0.mar"))
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED


def test_who_may_manage(managed_by_grpc: Any) -> None:
    grants = {"looks": Grant(frozenset({"observe"})), "mine": Grant(frozenset({"observe", "manage"}), ("team-*",))}
    server = managed_by_grpc(access_of(**grants))
    stub = ManagementAPIsServiceStub(server.channel)
    key = {"metadata": [("authorization", "Bearer looks")]}
    stub.ListModels(ListModelsRequest(), **key)
    error = refusal(stub.RegisterModel, RegisterModelRequest(url="m-1.0.mar"), **key)
    assert error.code() == grpc.StatusCode.PERMISSION_DENIED
    assert trailers(error)["x-torchrelay-reason"] == "wrong_role"
    key = {"metadata": [("authorization", "Bearer mine")]}
    stub.RegisterModel(RegisterModelRequest(url="m-1.0.mar"), **key)
    assert server.shelf.asked[-1][1].within == ("team-*",)
    error = refusal(stub.UnregisterModel, UnregisterModelRequest(model_name="m"), **key)
    assert trailers(error)["x-torchrelay-reason"] == "wrong_model"

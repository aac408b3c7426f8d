"""TorchServe's gRPC inference API over real channels."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo

from serve_app import errors
from serve_app.domain.access import KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream, Timings
from serve_app.domain.routing_table import RoutingTable
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from tests.support.grpc_calls import access_table, expect_error, trailing_metadata

REFUSED = "Token Authorization failed. Token either incorrect, expired, or not provided correctly"


def requested(
    model: str = "m", version: str = "", sequence: str | None = None, **parts: bytes
) -> PredictionsRequest:
    return PredictionsRequest(
        model_name=model, model_version=version, input=parts or {"data": b"x"}, sequence_id=sequence
    )


def streams(*pieces: bytes, status: int = 200) -> Any:
    async def infer(call: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        return ResponseStream(InferenceResponse(b"", version="1.0", status=status), chunks())

    return infer


def fails(error: Exception) -> Any:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        raise error

    return infer


# Inference


def test_a_prediction(over_grpc: Any) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        headers = (("Kind", "cat"), ("Über", "x"), ("x-bin", "y"))
        timings = Timings(0.001, 0.002, 3)
        return InferenceResponse(
            b"meow", "text/plain", 599, "Odd", headers, version="1.0", timings=timings, arm="t/a"
        )

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    response, call = stub.Predictions.with_call(
        requested(data=b"\x00\xff", more=b"2"),
        metadata=[("colour", "red"), ("x-request-id", "mine"), ("b-bin", b"\x01")],
    )
    assert response.prediction == b"meow"
    assert not response.HasField("sequence_id")
    assert not response.HasField("status")
    got = server.backend.requests[0]
    assert {part.name: (part.value, part.content_type) for part in got.inputs} == {
        "data": (b"\x00\xff", None),
        "more": (b"2", None),
    }
    assert (got.model, got.version, got.kind, got.priority, got.deadline) == (
        "m",
        None,
        "predict",
        "normal",
        None,
    )
    assert got.headers["colour"] == "red"
    assert got.headers["url_path"] == ""
    assert got.headers["explain"] == "False"
    assert "b-bin" not in got.headers
    result = trailing_metadata(call)
    assert result.pop("x-request-id") == got.request_id != "mine"
    assert result == {
        "x-model-version": "1.0",
        "x-torchrelay-arm": "t/a",
        "server-timing": "queue;dur=1.000, inference;dur=2.000, batch;desc=3",
        "x-content-type": "text/plain",
        "kind": "cat",
        "x-status": "599 Odd",
    }
    client, method, path, http, status, _, request_id, model, version, *_ = server.access_log[0]
    assert client.startswith("127.0.0.1:")
    assert (method, path) == ("gRPC", "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions")
    assert (http, status, request_id, model, version) == ("2", 0, got.request_id, "m", "1.0")


def test_version_deadline_and_priority_are_applied(over_grpc: Any) -> None:
    server = over_grpc()
    stub = InferenceAPIsServiceStub(server.channel)
    before = time.time()
    stub.Predictions(requested(version="2.0"), timeout=60, metadata=[("x-request-priority", "high")])
    call = server.backend.requests[0]
    assert (call.version, call.priority) == ("2.0", "high")
    assert before + 59 < call.deadline < time.time() + 61
    error = expect_error(stub.Predictions, requested(), metadata=[("x-request-priority", "urgent")])
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == (
        "Header x-request-priority must be high, normal or low; got 'urgent'.\nBadRequestException"
    )


def test_a_sequence_id_reaches_the_handler_as_the_header_that_it_is_over_http(over_grpc: Any) -> None:
    server = over_grpc()
    stub = InferenceAPIsServiceStub(server.channel)
    stub.Predictions(requested(sequence="s1", data=b"x", ts_request_sequence_end=b"true"))
    headers = server.backend.requests[0].headers
    assert headers["ts_request_sequence_id"] == "s1"
    assert headers["ts_request_sequence_end"] == "true"
    assert "ts_request_sequence_start" not in headers


def test_a_streamed_prediction(over_grpc: Any) -> None:
    server = over_grpc(streams(b"a", b"b", b""))
    stub = InferenceAPIsServiceStub(server.channel)
    stream = stub.StreamPredictions(requested())
    assert [response.prediction for response in stream] == [b"a", b"b", b""]
    assert trailing_metadata(stream)["x-model-version"] == "1.0"
    assert stub.Predictions(requested()).prediction == b"ab"  # who asks for one message gets one


def test_unary_model_streams_one_message(over_grpc: Any) -> None:
    stub = InferenceAPIsServiceStub(over_grpc().channel)
    assert [response.prediction for response in stub.StreamPredictions(requested(data=b"whole"))] == [
        b"whole"
    ]


def test_collected_stream_size_is_limited(over_grpc: Any) -> None:
    server = over_grpc(streams(b"a" * 60, b"b" * 60), runtime={"max_response_size": 100})
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, requested())
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "runtime.max_response_size" in error.details()


def test_a_stream_that_breaks_ends_with_its_error(over_grpc: Any) -> None:
    async def infer(call: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"a"
            raise errors.ReplicaDied("gone")

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    stream = InferenceAPIsServiceStub(over_grpc(infer).channel).StreamPredictions(requested())
    assert next(stream).prediction == b"a"
    with pytest.raises(grpc.RpcError) as raised:
        next(stream)
    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert raised.value.details() == "Worker died.\nInternalServerException"
    assert trailing_metadata(raised.value)["x-torchrelay-reason"] == "replica_died"


def test_a_sequence_over_one_stream(over_grpc: Any) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        if call.inputs[0].value == b"bad":
            raise errors.HandlerFailed("trace")
        return InferenceResponse(call.inputs[0].value.upper(), version="1.0")

    server = over_grpc(infer)
    responses = list(
        InferenceAPIsServiceStub(server.channel).StreamPredictions2(
            iter(
                [
                    requested(sequence="s", data=b"a"),
                    requested(sequence="s", data=b"bad"),
                    requested(sequence="s", data=b"c"),
                ]
            )
        )
    )
    assert [(response.prediction, response.sequence_id) for response in responses] == [
        (b"A", "s"),
        (b"", "s"),
        (b"C", "s"),
    ]
    assert [response.HasField("status") for response in responses] == [False, True, False]
    assert responses[1].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert responses[1].status.message == "Prediction failed\nInternalServerException"
    info = ErrorInfo()
    assert responses[1].status.details[0].Unpack(info)
    assert info.reason == "handler_failed"
    assert info.metadata["x-request-id"] == server.backend.requests[1].request_id
    assert [call.headers["ts_request_sequence_id"] for call in server.backend.requests] == ["s"] * 3


def test_a_sequence_without_an_id_gets_one_where_it_starts(over_grpc: Any) -> None:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"", headers=(("ts_request_sequence_id", "made-here"),), version="1.0")

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    first, second = stub.StreamPredictions2(iter([requested(ts_request_sequence_start=b"true"), requested()]))
    assert {first.sequence_id, second.sequence_id} == {"made-here", ""}
    refused = first if first.HasField("status") else second
    assert refused.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert refused.status.message == "Parameter sequenceId is required.\nBadRequestException"
    assert [call.headers["ts_request_sequence_start"] for call in server.backend.requests] == ["true"]
    assert stub.Predictions(requested(ts_request_sequence_start=b"true")).sequence_id == "made-here"


def test_a_request_reaches_a_sequence_whose_answer_is_being_streamed(over_grpc: Any) -> None:
    stopped: list[bool] = []

    async def infer(call: InferenceRequest) -> InferenceResponse | ResponseStream:
        if call.inputs[0].value == b"stop":
            stopped.append(True)
            return InferenceResponse(b"stopping", version="1.0")

        async def chunks() -> AsyncIterator[bytes]:
            while not stopped:
                yield b"x"
                await asyncio.sleep(0.005)
            yield b"end"

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    server = over_grpc(infer)
    more: queue.SimpleQueue[PredictionsRequest | None] = queue.SimpleQueue()
    more.put(requested(sequence="s"))
    responses = InferenceAPIsServiceStub(server.channel).StreamPredictions2(iter(more.get, None))
    assert next(responses).prediction == b"x"
    more.put(requested(sequence="s", data=b"stop"))
    more.put(None)
    assert {b"stopping", b"end"} <= {response.prediction for response in responses}
    assert len({call.request_id for call in server.backend.requests}) == 2


def test_disconnect_cancels_all_requests_of_a_sequence_stream(over_grpc: Any) -> None:
    ended = []

    async def infer(call: InferenceRequest) -> InferenceResponse:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(call.request_id)
            raise
        return InferenceResponse(b"")

    server = over_grpc(infer)
    responses = InferenceAPIsServiceStub(server.channel).StreamPredictions2(
        iter([requested(sequence="s")] * 3)
    )
    wait(lambda: len(server.backend.requests) == 3)
    responses.cancel()
    wait(lambda: len(ended) == 3)


@pytest.mark.parametrize(
    ("request_", "code", "details"),
    [
        (requested("nobody"), "INTERNAL", "Model not found: nobody\nModelNotFoundException"),
        (
            requested("m", "9.9"),
            "INTERNAL",
            "Model version: 9.9 does not exist for model: m\nModelVersionNotFoundException",
        ),
        (requested(""), "INTERNAL", "Parameter model_name is required.\nBadRequestException"),
    ],
)
def test_unknown_models_and_versions_are_refused(
    over_grpc: Any, request_: Any, code: str, details: str
) -> None:
    server = over_grpc()
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, request_)
    assert (error.code().name, error.details()) == (code, details)
    wait(lambda: server.access_log)
    assert server.access_log[0][4] == error.code().value[0]


def test_trailing_metadata_of_errors(over_grpc: Any) -> None:
    server = over_grpc(fails(errors.QueueFull("m", None, "full")))
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, requested())
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith('Model "m" has no worker to serve inference request.')
    result = trailing_metadata(error)
    assert (result["x-torchrelay-reason"], result["retry-after"], result["x-model-version"]) == (
        "queue_full",
        "1",
        "1.0",
    )
    for error, more in (
        (errors.HandlerRejected("no", 418), {"x-status": "418"}),
        (errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""), {"x-torchrelay-step": "first"}),
    ):
        refused = expect_error(
            InferenceAPIsServiceStub(over_grpc(fails(error)).channel).Predictions, requested()
        )
        assert more.items() <= trailing_metadata(refused).items()


def test_the_type_of_the_parts(over_grpc: Any) -> None:
    server = over_grpc()
    InferenceAPIsServiceStub(server.channel).Predictions(
        requested(), metadata=[("x-content-type", "application/json")]
    )
    assert server.backend.requests[0].inputs[0].content_type == "application/json"


def test_internal_error_hides_its_message(over_grpc: Any, caplog: Any) -> None:
    server = over_grpc(fails(RuntimeError("secret")))
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, requested())
    assert error.code() == grpc.StatusCode.INTERNAL
    assert error.details().startswith("Unexpected RuntimeError; the server's log has more under ")
    assert "secret" in caplog.text


def test_how_much_of_a_handlers_error_is_shown_is_a_setting(over_grpc: Any) -> None:
    raised = errors.HandlerFailed("Traceback\nValueError: bad " + "x" * 100_000)
    server = over_grpc(fails(raised), inference={"handler_errors": "traceback"})
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, requested())
    assert error.details().startswith("Prediction failed\nTraceback\nValueError: bad x")
    assert len(error.details()) == 2_000


def test_ping(over_grpc: Any) -> None:
    server = over_grpc()
    health = InferenceAPIsServiceStub(server.channel).Ping(Empty()).health
    assert json.loads(health) == {"status": "Healthy"}


def test_a_request_that_is_too_large(over_grpc: Any) -> None:
    server = over_grpc(inference={"max_request_size": 1000})
    error = expect_error(InferenceAPIsServiceStub(server.channel).Predictions, requested(data=b"x" * 2000))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailing_metadata(error) == {"x-torchrelay-reason": "request_too_large"}
    assert not server.backend.requests


def test_disconnect_cancels_the_request(over_grpc: Any) -> None:
    ended = []

    async def infer(call: InferenceRequest) -> InferenceResponse:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append(call.model)
            raise
        return InferenceResponse(b"")

    server = over_grpc(infer)
    waiting = InferenceAPIsServiceStub(server.channel).Predictions.future(requested())
    wait(lambda: server.backend.requests)
    waiting.cancel()
    wait(lambda: ended)
    wait(lambda: server.access_log)
    assert server.access_log[0][4] == grpc.StatusCode.CANCELLED.value[0]


def test_disconnect_closes_the_stream(over_grpc: Any) -> None:
    closed = []

    async def infer(call: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0.01)
            finally:
                closed.append(True)

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    stream = InferenceAPIsServiceStub(over_grpc(infer).channel).StreamPredictions(requested())
    next(stream)
    stream.cancel()
    wait(lambda: closed)


def test_slow_reader_blocks_only_its_own_stream(over_grpc: Any) -> None:
    made = []

    async def infer(call: InferenceRequest) -> InferenceResponse | ResponseStream:
        if call.inputs[0].value != b"stream":
            return InferenceResponse(b"ok", version="1.0")

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(1000):
                made.append(1)
                yield b"x" * 1_000_000

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    server = over_grpc(infer)
    stub = InferenceAPIsServiceStub(server.channel)
    stream = stub.StreamPredictions(requested(data=b"stream"))
    next(stream)
    with grpc.insecure_channel(server.address, options=[("unshared", 1)]) as other:
        for _ in range(50):
            assert InferenceAPIsServiceStub(other).Predictions(requested(), timeout=60).prediction == b"ok"
    assert len(made) < 100  # of 1 GB; Linux alone may buffer 36 MB of a connection
    stream.cancel()


def wait(condition: Any, max_wait: float = 60.0) -> None:
    deadline = time.monotonic() + max_wait
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Keys


def test_key_is_required_and_hidden_from_handlers(over_grpc: Any) -> None:
    server = over_grpc()
    grant = KeyGrant(frozenset({"infer"}), ("m",))
    server.reader.update(RoutingTable(2, server.reader.table.models, True, access_table(good=grant)))
    stub = InferenceAPIsServiceStub(server.channel)
    stub.Predictions(requested(), metadata=[("authorization", "Bearer good")])
    assert "authorization" not in server.backend.requests[0].headers
    for key, reason in ((None, "missing_token"), ("Bearer bad", "invalid_token")):
        error = expect_error(
            stub.Predictions, requested(), metadata=[("authorization", key)] if key else None
        )
        assert error.code() == grpc.StatusCode.PERMISSION_DENIED
        assert error.details() == f"{REFUSED}\nInvalidKeyException"
        assert trailing_metadata(error)["x-torchrelay-reason"] == reason
    error = expect_error(
        stub.StreamPredictions, requested("other"), metadata=[("authorization", "Bearer good")]
    )
    assert trailing_metadata(error)["x-torchrelay-reason"] == "model_not_allowed"
    stub.Ping(Empty())  # probes show no key

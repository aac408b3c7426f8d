"""Predictions, streams and sequences over gRPC, with both clients."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from blocking_clients import BlockingAsyncGrpcClient
from client_helpers import (
    ClientFactory,
    EndlessStream,
    quick_retries,
    streaming,
    without_retry_after,
)

from serve_app import errors
from serve_app.client import errors as client_errors
from serve_app.domain.request import InferenceRequest, InferenceResponse


def test_prediction_has_body_and_metadata(make_client: ClientFactory, over_grpc: Any) -> None:
    async def infer(request: InferenceRequest) -> InferenceResponse:
        headers = (("kind", "cat"),)
        return InferenceResponse(
            request.inputs[0].value, "text/plain", 203, "Odd", headers, version="2.0", arm="t/a"
        )

    server = over_grpc(infer)
    client = make_client(server)
    assert client.predict("m", "héllo", "text/plain") == "héllo".encode()
    headers = {"X-Mine": "1", "Content-Type": "a/b"}
    prediction = client.request("m", b"x", version="2.0", priority="high", headers=headers, timeout=30)
    assert (prediction.body, prediction.status, prediction.version, prediction.arm) == (
        b"x",
        203,
        "2.0",
        "t/a",
    )
    assert (prediction.content_type, prediction.headers["kind"]) == ("text/plain", "cat")
    first, second = server.backend.requests
    assert [(i.name, i.value, i.content_type) for i in first.inputs] == [
        ("body", "héllo".encode(), "text/plain")
    ]
    assert (second.version, second.headers["x-mine"], second.priority) == ("2.0", "1", "high")
    assert (second.request_id, second.inputs[0].content_type) == (prediction.request_id, "a/b")
    assert 0 < second.deadline - time.time() < 31, "gRPC rounds it"
    assert 31 < first.deadline - time.time() < 123, "the client's own"


def test_json_is_encoded_and_decoded(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc()
    assert make_client(server).predict_json("m", {"a": [1, None]}) == {"a": [1, None]}
    assert server.backend.requests[0].inputs[0].content_type == "application/json"


def test_named_parts_are_sent_as_a_form(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc()
    client = make_client(server)
    client.predict("m", {"question": "wörds", "data": b"\xff"})
    assert {i.name: i.value for i in server.backend.requests[0].inputs} == {
        "question": "wörds".encode(),
        "data": b"\xff",
    }
    for body, content_type, message in (
        ({}, "", "predict_json"),
        ({"a": "b"}, "application/json", "predict_json"),
        ({"a": ("k.jpg", b"", "image/jpeg")}, "", "over HTTP"),
    ):
        with pytest.raises(ValueError, match=message):
            client.predict("m", body, content_type)
    assert len(server.backend.requests) == 1


def test_first_response_of_a_sequence_has_its_id(make_client: ClientFactory, over_grpc: Any) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        sequence = request.headers.get("ts_request_sequence_id", "s1")
        sequence_end = request.headers.get("ts_request_sequence_end", "false").encode()
        return InferenceResponse(sequence_end, headers=(("ts_request_sequence_id", sequence),))

    client = make_client(over_grpc(respond))
    first = client.request("m", b"")
    last = client.request("m", b"", sequence=first.sequence, sequence_end=True)
    assert (first.sequence, first.body, last.sequence, last.body) == ("s1", b"false", "s1", b"true")


def test_stream_yields_chunks(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc(streaming(b"0", b"1", b"2"))
    client = make_client(server)
    assert list(client.stream("m", b"", version="2.0")) == [b"0", b"1", b"2"]
    assert list(client.stream("m", b"", timeout=30)) == [b"0", b"1", b"2"]
    unlimited, limited = server.backend.requests
    assert (unlimited.version, unlimited.deadline, limited.deadline is None) == ("2.0", None, False)


def test_interrupted_stream_raises(make_client: ClientFactory, over_grpc: Any) -> None:
    """The stream is not retried, whatever the reason."""
    server = over_grpc(streaming(b"one", failure=without_retry_after(errors.QueueFull("m", "1.0"))))
    chunks = make_client(server, retries=quick_retries()).stream("m", b"")
    assert next(chunks) == b"one"
    with pytest.raises(client_errors.QueueFullError):
        next(chunks)
    assert len(server.backend.requests) == 1


def test_closing_a_stream_cancels_it(make_client: ClientFactory, over_grpc: Any) -> None:
    endless = EndlessStream()
    client = make_client(over_grpc(endless))
    chunks = client.stream("m", b"")
    assert next(chunks) == b"x"
    chunks.close()
    if isinstance(client, BlockingAsyncGrpcClient):
        client.live()  # runs its event loop
    assert endless.closed.wait(60)


def test_idle_stream_times_out(make_client: ClientFactory, over_grpc: Any) -> None:
    """The idle time counts while the reader waits for a chunk, not while it does something else."""
    endless = EndlessStream(pause=60)
    client = make_client(over_grpc(endless), timeout=1.5)
    client.ping()
    started_at = time.monotonic()
    chunks = client.stream("m", b"")
    assert next(chunks) == b"x"
    with pytest.raises(
        client_errors.DeadlineExceededError, match=r"No message was received for 1\.5 seconds"
    ):
        next(chunks)
    assert time.monotonic() - started_at >= 1.5
    assert endless.closed.wait(60)
    slow = make_client(over_grpc(streaming(b"a", b"b")), timeout=2)
    chunks = slow.stream("m", b"")
    assert next(chunks) == b"a"
    time.sleep(2.5)
    assert list(chunks) == [b"b"]


def test_sequence_over_one_stream(make_client: ClientFactory, over_grpc: Any) -> None:
    async def infer(request: InferenceRequest) -> InferenceResponse:
        [body] = [part.value for part in request.inputs if not part.name.startswith("ts_")]
        if body == b"bad":
            raise errors.HandlerRejected("no such word", 422)
        return InferenceResponse(
            request.headers.get("ts_request_sequence_end", "").encode() + body, version="1.0"
        )

    server = over_grpc(infer)
    client = make_client(server)
    bodies = [b"a", "bad", {"data": b"c", "ts_request_sequence_end": "true"}]
    first, second, third = client.stream_sequence(
        "m", bodies, version="2.0", sequence="s", headers={"x-mine": "1"}
    )
    assert (first.body, first.sequence, first.error) == (b"a", "s", None)
    assert (third.body, third.error) == (b"truec", None)
    assert isinstance(second.error, client_errors.HandlerFailedError)
    assert (second.error.status, second.error.message, second.error.reason) == (
        422,
        "no such word",
        "handler_rejected",
    )
    assert second.error.request_id == server.backend.requests[1].request_id
    assert {(request.version, request.headers["x-mine"]) for request in server.backend.requests} == {
        ("2.0", "1")
    }
    [alone] = client.stream_sequence("m", [b"x"])
    assert server.backend.requests[-1].headers["ts_request_sequence_id"] == alone.sequence != ""


def test_requests_are_sent_as_they_are_yielded(make_client: ClientFactory, over_grpc: Any) -> None:
    client = make_client(over_grpc())
    if isinstance(client, BlockingAsyncGrpcClient):
        queued: Any = asyncio.Queue()

        async def bodies() -> AsyncIterator[bytes]:
            while (body := await queued.get()) is not None:
                yield body

        responses = client.stream_sequence("m", bodies())
        put = queued.put_nowait
    else:
        queued = queue.SimpleQueue()
        responses, put = client.stream_sequence("m", iter(queued.get, None)), queued.put
    for body in (b"a", b"b"):
        put(body)
        assert next(responses).body == body
    put(None)
    assert list(responses) == []


def test_exception_of_the_callers_iterable_is_raised(make_client: ClientFactory, over_grpc: Any) -> None:
    def bodies() -> Iterator[bytes]:
        yield b"a"
        raise KeyError("mine")

    responses = make_client(over_grpc()).stream_sequence("m", bodies())
    assert next(responses).body == b"a"
    with pytest.raises(KeyError, match="mine"):
        next(responses)

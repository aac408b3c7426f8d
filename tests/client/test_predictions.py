"""Predictions, forms, streams and async predictions over HTTP, with both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from serve_app import errors
from serve_app.client import Client, ServerSentEvent, health
from serve_app.client import errors as client_errors
from serve_app.domain.async_prediction import StoredResponse
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.protocols.http import form_data
from tests.support.inference_functions import (
    ClientFactory,
    failing,
    quick_retries,
    stalled_stream,
    streaming,
    without_retry_after,
)

pytestmark = pytest.mark.integration


def test_prediction_has_body_and_metadata(make_client: ClientFactory, inference: Any) -> None:
    server = inference()
    client = make_client(server)
    assert client.predict("m", "héllo", "text/plain") == "héllo".encode()
    prediction = client.request("m", b"x", version="2.0", priority="high", headers={"x-mine": "1"})
    assert (prediction.body, prediction.version, prediction.status) == (b"x", "2.0", 200)
    assert len(prediction.request_id) == 36
    [first, second] = server.backend.requests
    assert (first.inputs[0].value, first.inputs[0].content_type) == ("héllo".encode(), "text/plain")
    assert (second.headers["x-mine"], second.priority, second.request_id) == (
        "1",
        "high",
        prediction.request_id,
    )


def test_first_response_of_a_sequence_has_its_id(make_client: ClientFactory, inference: Any) -> None:
    async def respond(request: InferenceRequest) -> InferenceResponse:
        sequence = request.headers.get("ts_request_sequence_id", "s1")
        sequence_end = request.headers.get("ts_request_sequence_end", "false").encode()
        return InferenceResponse(sequence_end, headers=(("ts_request_sequence_id", sequence),))

    client = make_client(inference(respond))
    first = client.request("m", b"")
    last = client.request("m", b"", sequence=first.sequence, sequence_end=True)
    assert (first.sequence, first.body, last.sequence, last.body) == ("s1", b"false", "s1", b"true")


def test_json_is_encoded_and_decoded(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference())
    assert client.predict_json("m", {"a": [1, None]}) == {"a": [1, None]}
    assert client.explain_json("m", [1]) == [1]
    assert client.explain("m", b"x") == b"x"


def test_named_parts_are_sent_as_a_form(make_client: ClientFactory, inference: Any) -> None:
    """Each attempt sends the same parts; the bytes of one look like a boundary."""
    server = inference(failing(without_retry_after(errors.QueueFull("m", "1.0"))))
    client = make_client(server, retries=quick_retries())
    parts = {"question": "wörds", "data": b"\xff\r\n--", "ä b": ("k.jpg", b"jpeg", "image/jpeg")}
    assert client.predict("m", parts, headers={"Content-Type": "text/plain"}) == b"done"
    client.explain("m", parts)
    client.request("m", parts, version="2.0")
    list(client.stream("m", parts))
    assert len(server.backend.requests) == 5
    for request in server.backend.requests:
        assert [(part.name, part.value, part.content_type) for part in request.inputs] == [
            ("question", "wörds".encode(), None),
            ("data", b"\xff\r\n--", "application/octet-stream"),
            ("ä b", b"jpeg", "image/jpeg"),
        ]


def test_forms_without_parts_or_with_a_content_type_are_refused(
    make_client: ClientFactory, inference: Any
) -> None:
    server = inference()
    client = make_client(server)
    assert client.predict_json("m", {"a": "b"}) == {"a": "b"}
    with pytest.raises(ValueError, match="as JSON with predict_json"):
        client.predict("m", {})
    with pytest.raises(ValueError, match="send JSON with predict_json"):
        client.predict("m", {"a": "b"}, "application/json")
    assert len(server.backend.requests) == 1


def test_model_names_are_quoted(make_client: ClientFactory, inference: Any) -> None:
    with pytest.raises(client_errors.NotFoundError, match="Model not found: a b"):
        make_client(inference()).predict("a b", b"")


def test_stream_yields_chunks(make_client: ClientFactory, inference: Any) -> None:
    async def count(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number
                await asyncio.sleep(0.01)

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    assert list(make_client(inference(count)).stream("m", b"")) == [b"0", b"1", b"2"]


def test_interrupted_stream_raises(make_client: ClientFactory, inference: Any) -> None:
    async def interrupted(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"one"
            raise errors.ReplicaDied("killed")

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    with pytest.raises(httpx.RemoteProtocolError):
        list(make_client(inference(interrupted)).stream("m", b""))


def test_server_sent_events(make_client: ClientFactory, inference: Any) -> None:
    server = inference(streaming(b"one ", b"two\nthree", failure=errors.HandlerRejected("no more", 503)))
    first, second, end = make_client(server).stream_events("m", b"", headers={"x-mine": "1"})
    assert first == ServerSentEvent("message", "one ")
    assert second == ServerSentEvent("message", "two\nthree")
    assert (end.kind, end.json()["message"]) == ("error", "no more")
    [request] = server.backend.requests
    assert (request.deadline, request.headers["x-mine"]) == (None, "1")


def test_refused_stream_raises(make_client: ClientFactory, inference: Any) -> None:
    with pytest.raises(client_errors.NotFoundError):
        list(make_client(inference()).stream("nobody", b""))


def test_number_of_connections_is_limited(
    make_client: ClientFactory, inference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream uses the only connection; the health check gives up after its timeout of 2 s."""
    client = make_client(inference(stalled_stream), limits=httpx.Limits(max_connections=1))
    if isinstance(client, Client):
        stream = client.stream("m", b"")
        assert next(stream) == b"one"
        assert not client.live()
        stream.close()
    else:
        stream, wait = client._client.stream("m", b""), client._loop.run_until_complete
        assert wait(anext(stream)) == b"one"
        assert not client.live()
        wait(stream.aclose())
    monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 60.0)
    assert client.live()


def test_async_predictions(make_client: ClientFactory, inference: Any) -> None:
    class AsyncStore:
        """A store of one request, whose result is ready with the second poll."""

        def __init__(self) -> None:
            self.request: Any = None
            self.polls = 0

        async def submit_prediction(self, request: Any) -> dict[str, Any]:
            self.request = request
            return self._document("queued")

        async def get_prediction(self, id: str, within: tuple[str, ...]) -> dict[str, Any]:
            return self._document("running")

        async def get_prediction_result(self, id: str, within: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
            self.polls += 1
            response = StoredResponse(200, (("x-model-version", "1.0"),), self.request.body)
            return (self._document("done"), response) if self.polls > 1 else (self._document("queued"), None)

        async def cancel_prediction(self, id: str, within: tuple[str, ...]) -> None:
            raise errors.PredictionNotFound(id)

        def _document(self, state: str) -> dict[str, Any]:
            return {
                "id": "0" * 32,
                "state": state,
                "model": "m",
                "version": None,
                "self": f"/async/{'0' * 32}",
            }

    store = AsyncStore()
    client = make_client(inference(control_api=store))
    id = client.submit_async(
        "m", b"later", key="k", webhook="http://127.0.0.1/done", headers={"x-mine": "1"}
    )["id"]
    assert (store.request.key, store.request.webhook) == ("k", "http://127.0.0.1/done")
    assert ("x-mine", "1") in store.request.headers
    client.submit_async("m", {"data": ("k.jpg", b"jpeg", "image/jpeg")})
    content_type = dict(store.request.headers)["content-type"]
    assert form_data.parse_body(content_type, store.request.body) == (
        InputPart("data", b"jpeg", "image/jpeg"),
    )
    assert client.async_status(id)["state"] == "running"
    assert client.async_result(id) is None
    result = client.async_result(id)
    assert (result.body, result.version) == (store.request.body, "1.0")
    with pytest.raises(client_errors.NotFoundError, match="asynchronous prediction"):
        client.cancel_async(id)

"""OpenAI's routes over a data plane: the requests that they build, and their responses."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy, allocate
from serve_app.errors import HandlerRejected, QueueFull, QuotaExceeded
from serve_app.protocols.http import sse
from serve_app.protocols.openai.inference import OpenAIRoutes


def parse(response: Any) -> Any:
    return json.loads(response.body)


def error_fields(response: Any) -> tuple[int, str, str | None]:
    """Return the status, the code and the field of an error."""
    assert response["content-type"] == "application/json"
    [(key, error)] = parse(response).items()
    assert key == "error"
    assert {"message", "type", "param", "code"} == set(error)
    return response.status, error["code"], error["param"]


async def complete(request: InferenceRequest) -> InferenceResponse:
    """Answer JSON without a content type."""
    return InferenceResponse(b'{"choices": []}', version=request.version or "1.0")


async def complete_stream(request: InferenceRequest) -> ResponseStream:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'data: {"a": 1}\n\n'
        yield b"data: [DONE]\n\n"

    return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/completions"])
def test_requests_have_the_path_as_a_header(inference: Any, path: str) -> None:
    app = inference(complete)
    body = b'{"model": "m", "prompt": "a"}'
    response = app(
        "POST", f"/{path}", body, {"x-request-priority": "high", "x-request-timeout-seconds": "30"}
    )
    assert (response.status, parse(response)) == (200, {"choices": []})
    assert (response["content-type"], response["x-model-version"]) == ("application/json", "1.0")
    [request] = app.backend.requests
    assert (request.model, request.version, request.kind, request.priority) == ("m", None, "predict", "high")
    assert request.deadline is not None
    assert [(part.name, part.value, part.content_type) for part in request.inputs] == [
        ("body", body, "application/json")
    ]
    assert request.headers["url_path"] == path
    assert request.request_id == response["x-request-id"]
    assert app.access_log[0][7:9] == ("m", "1.0"), "the log has model and version"


def test_a_model_may_name_its_version(inference: Any) -> None:
    app = inference(complete)
    assert app("POST", "/v1/completions", b'{"model": "m:2.0"}').status == 200
    assert app.backend.ref.version == "2.0"


def test_streams_are_forwarded_chunk_by_chunk(inference: Any) -> None:
    response = inference(complete_stream)("POST", "/v1/chat/completions", b'{"model": "m", "stream": true}')
    assert response.chunks == [b'data: {"a": 1}\n\n', b"data: [DONE]\n\n", b""]
    assert (response["content-type"], response["x-model-version"]) == ("text/event-stream", "1.0")
    assert response.ended


def test_a_stream_may_be_one_chunk(inference: Any) -> None:
    async def complete_at_once(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"data: [DONE]\n\n", version="1.0")

    response = inference(complete_at_once)("POST", "/v1/completions", b'{"model": "m", "stream": true}')
    assert (response["content-type"], response.body) == ("text/event-stream", b"data: [DONE]\n\n")


def test_an_error_in_mid_stream_is_an_event(inference: Any) -> None:
    async def fail_in_mid_stream(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            yield b'data: {"a": 1}\n\n'
            raise HandlerRejected("the loop failed", 503)

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    app = inference(fail_in_mid_stream)
    response = app("POST", "/v1/chat/completions", b'{"model": "m", "stream": true}')
    assert response.ended, "the response is complete, and its last event is the error"
    first, second = response.body.decode().removesuffix("\n\n").split("\n\n")
    assert first == 'data: {"a": 1}'
    error = json.loads(second.removeprefix("data: "))["error"]
    assert (error["message"], error["type"]) == ("the loop failed", "server_error")


def test_comments_are_sent_while_the_model_is_silent(inference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse.KeepAlive.__init__, "__defaults__", (0.005,))
    comments, next_chunk = [], sse.KeepAlive.__anext__

    async def count_comments(keep_alive: Any) -> bytes:
        if (chunk := await next_chunk(keep_alive)) == sse.KEEP_ALIVE_COMMENT:
            comments.append(chunk)
        return chunk

    monkeypatch.setattr(sse.KeepAlive, "__anext__", count_comments)

    async def wait_for_comments(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            while len(comments) < 2:
                await asyncio.sleep(0.001)
            yield b"data: 2\n\n"

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    app = inference(wait_for_comments)
    app.compares = False  # the number of comments depends on the machine
    response = app("POST", "/v1/completions", b'{"model": "m"}')
    assert response.chunks[0] == b"data: 1\n\n" and response.chunks[-2:] == [b"data: 2\n\n", b""]
    assert 2 <= response.chunks.count(b": keep-alive\n\n") == len(response.chunks) - 3


def test_a_disconnected_client_closes_the_stream(inference: Any) -> None:
    closed = asyncio.Event()

    async def endless(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"data: 1\n\n"
                    await asyncio.sleep(0.01)
            finally:
                closed.set()

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    with pytest.raises(asyncio.CancelledError):  # by the check for disconnected clients
        inference(endless)("POST", "/v1/completions", b'{"model": "m"}', disconnects=True)
    assert closed.is_set()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("POST", "/v1/completions", b'{"model": "none"}', 404, "model_not_found", "model"),
        ("POST", "/v1/completions", b'{"model": "m:9"}', 404, "model_not_found", "model"),
        ("POST", "/v1/completions", b'{"prompt": "a"}', 400, "bad_request", "model"),
        ("POST", "/v1/completions", b'{"model": 5}', 400, "bad_request", "model"),
        ("POST", "/v1/completions", b"{", 400, "invalid_body", None),
        ("POST", "/v1/completions", b"[]", 400, "invalid_body", None),
        (
            "POST",
            "/v1/completions",
            b'{"model": "m", "x": "%s"}' % (b"x" * 200),
            413,
            "request_too_large",
            None,
        ),
        ("GET", "/v1/completions", b"", 405, "method_not_allowed", None),
        ("POST", "/v1/models", b"", 405, "method_not_allowed", None),
        ("GET", "/v1/models/none", b"", 404, "model_not_found", "model"),
        ("GET", "/v1/models/m:9", b"", 404, "model_not_found", "model"),
        ("GET", "/v1/models/predict", b"", 404, "model_not_found", "model"),  # not TorchServe's route
        ("POST", "/v1/embeddings", b'{"model": "m"}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": ""}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": [1, "a"]}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": [[1], []]}', 400, "bad_request", "input"),
        ("POST", "/v1/embeddings", b'{"model": "m", "input": [true]}', 400, "bad_request", "input"),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "m", "input": "a", "dimensions": 0}',
            400,
            "bad_request",
            "dimensions",
        ),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "m", "input": "a", "encoding_format": "int8"}',
            400,
            "bad_request",
            "encoding_format",
        ),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "m", "input": "a", "prompt": "b"}',
            400,
            "bad_request",
            "prompt",
        ),
        ("POST", "/v1/embeddings", b'{"model": "none", "input": "a"}', 404, "model_not_found", "model"),
        (
            "POST",
            "/v1/embeddings",
            b'{"model": "m", "input": "a"}',
            400,
            "bad_request",
            "model",
        ),  # it only echoes
    ],
)
def test_invalid_requests_are_rejected(
    inference: Any, method: str, path: str, body: bytes, status: int, code: str, param: str | None
) -> None:
    assert error_fields(inference(max_request_size=120)(method, path, body)) == (status, code, param)


@pytest.mark.parametrize(
    ("error", "status", "code", "retry"),
    [
        (QuotaExceeded("m", "1.0", 2), 429, "rate_limit_exceeded", "1"),
        (QueueFull("m", None), 503, "queue_full", "1"),
        (HandlerRejected("There is no prompt", 400), 400, "handler_rejected", None),
    ],
)
def test_errors_of_the_model(
    inference: Any, error: Exception, status: int, code: str, retry: str | None
) -> None:
    async def reject(request: InferenceRequest) -> InferenceResponse:
        raise error

    response = inference(reject)("POST", "/v1/completions", b'{"model": "m"}')
    assert error_fields(response) == (status, code, None)
    assert (response["retry-after"], response["x-model-version"]) == (retry, "1.0")


def test_other_paths_go_to_other_protocols(inference: Any) -> None:
    app = inference()
    assert app("POST", "/v1/models/m:predict", b"hello").body == b"hello"
    assert parse(app("GET", "/v1/nothing"))["type"] == "ResourceNotFoundException"
    assert app("OPTIONS", "/v1/chat/completions").status == 204


# Models


def version_route(version: str, phase: Any = "ready", **more: Any) -> VersionRoute:
    return VersionRoute(version, phase, 1 if phase == "ready" else 0, **more)


MODELS = RoutingTable(
    1,
    {
        "asleep": ModelRoute("1.0", {"1.0": version_route("1.0", "idle")}),
        "broken": ModelRoute("1.0", {"1.0": version_route("1.0", "failed")}),
        "one": ModelRoute("1.0", {"1.0": version_route("1.0")}),
        "two": ModelRoute(
            "2.0",
            {
                "1.0": version_route("1.0"),
                "2.0": version_route("2.0"),
                "3.0": version_route("3.0", "loading"),
            },
        ),
    },
    startup_complete=True,
)


def test_models_lists_those_that_are_ready(inference: Any) -> None:
    app = inference(table=MODELS)
    models = parse(app("GET", "/v1/models"))
    assert models["object"] == "list"
    assert [item["id"] for item in models["data"]] == ["asleep", "one", "two", "two:1.0", "two:2.0"]
    for item in models["data"]:
        assert parse(app("GET", f"/v1/models/{item['id']}")) == item
        assert item["object"] == "model" and isinstance(item["created"], int) and item["owned_by"]
    assert parse(app("GET", "/v1/models/one:1.0"))["id"] == "one:1.0"
    for unready in ("broken", "two:3.0"):
        response = app("GET", f"/v1/models/{unready}")
        assert error_fields(response) == (503, "no_replica", None)
        assert response["retry-after"] is None


def test_kserves_first_protocol_has_the_same_addresses(inference: Any) -> None:
    app = inference(table=MODELS)
    assert parse(app("GET", "/v1/models"))["models"] == ["asleep", "one", "two", "two:1.0", "two:2.0"]
    model = parse(app("GET", "/v1/models/one"))
    assert (model["id"], model["name"], model["ready"]) == ("one", "one", True)
    assert parse(app("GET", "/"))["status"] == "alive"


def test_keys_limit_routes_and_models(inference: Any) -> None:
    grants = {
        sha256(b"all").digest(): KeyGrant(frozenset(("infer",))),
        sha256(b"ones").digest(): KeyGrant(frozenset(("infer",)), ("one",)),
        sha256(b"looks").digest(): KeyGrant(frozenset(("observe",))),
    }
    app = inference(complete, table=replace(MODELS, access=AccessTable(grants)))

    def send(key: str | None, path: str, body: bytes | None = None) -> Any:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return app("GET" if body is None else "POST", path, body or b"", headers)

    assert [item["id"] for item in parse(send("ones", "/v1/models"))["data"]] == ["one"]
    assert send("all", "/v1/completions", b'{"model": "two"}').status == 200
    assert "authorization" not in app.backend.requests[0].headers
    assert error_fields(send(None, "/v1/models")) == (401, "invalid_api_key", None)
    assert error_fields(send("wrong", "/v1/completions", b'{"model": "two"}')) == (
        401,
        "invalid_api_key",
        None,
    )
    assert error_fields(send("looks", "/v1/models")) == (403, "insufficient_permissions", None)
    for path, body in (
        ("/v1/models/two", None),
        ("/v1/completions", b'{"model": "two"}'),
        ("/v1/embeddings", b'{"model": "two", "input": "a"}'),
    ):
        assert error_fields(send("ones", path, body)) == (403, "insufficient_permissions", "model")


# Embeddings


async def embed(request: InferenceRequest) -> InferenceResponse:
    """Return two numbers for a text, and its number of tokens."""
    assert request.headers["url_path"] == "v1/embeddings"
    text = next(part.value for part in request.inputs if part.name == "body")
    version = request.version or "1.0"
    document = {"embedding": [len(text) / 4, float(version)], "tokens": len(text)}
    return InferenceResponse(json.dumps(document).encode(), version=version)


def test_embeddings_of_several_texts(inference: Any) -> None:
    app = inference(embed)
    response = app("POST", "/v1/embeddings", json.dumps({"model": "m", "input": ["abc", "d"]}).encode())
    assert parse(response) == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.75, 1.0]},
            {"object": "embedding", "index": 1, "embedding": [0.25, 1.0]},
        ],
        "model": "m",
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert response["x-model-version"] == "1.0"
    ids = [request.request_id for request in app.backend.requests]
    assert ids[0] == response["x-request-id"] and len(set(ids)) == 2
    base64_response = app(
        "POST", "/v1/embeddings", b'{"model": "m", "input": "abc", "encoding_format": "base64", "user": "u"}'
    )
    [vector] = parse(base64_response)["data"]
    assert struct.unpack("<2f", base64.b64decode(vector["embedding"])) == (0.75, 1.0)


@pytest.mark.parametrize("inference", ["callbacks"], indirect=True)
def test_the_embedding_of_one_text_needs_no_task(inference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(routes: OpenAIRoutes, exchange: Any) -> None:
        raise RuntimeError("a task")

    monkeypatch.setattr(OpenAIRoutes, "_embed", fail)
    app = inference(embed)
    for text, status in (("abc", 200), (["abc"], 200), (["abc", "d"], 500)):
        body = json.dumps({"model": "m", "input": text}).encode()
        assert app("POST", "/v1/embeddings", body).status == status, text


def test_a_bare_vector_is_an_embedding(inference: Any) -> None:
    async def embed_bare(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"[1, 2.5]", version="1.0")

    document = parse(inference(embed_bare)("POST", "/v1/embeddings", b'{"model": "m", "input": "abc"}'))
    assert document["data"][0]["embedding"] == [1, 2.5]
    assert document["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_vectors_are_shortened_to_the_requested_dimensions(inference: Any) -> None:
    async def embed_long(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"[3, 4, 12]", version="1.0")

    app = inference(embed_long)
    body = {"model": "m", "input": ["a", "b"], "dimensions": 2}
    vectors = [
        item["embedding"] for item in parse(app("POST", "/v1/embeddings", json.dumps(body).encode()))["data"]
    ]
    assert vectors == [[0.6, 0.8]] * 2
    response = app("POST", "/v1/embeddings", json.dumps({**body, "dimensions": 4}).encode())
    assert error_fields(response) == (400, "bad_request", "dimensions")


def test_token_ids_are_inputs(inference: Any) -> None:
    async def count(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(
            json.dumps([sum(json.loads(request.inputs[0].value)["inputs"])]).encode(), version="1.0"
        )

    app = inference(count)
    for ids, expected in (([1, 2], [3]), ([[1, 2], [4]], [3, 4])):
        document = parse(app("POST", "/v1/embeddings", json.dumps({"model": "m", "input": ids}).encode()))
        assert [item["embedding"][0] for item in document["data"]] == expected


def test_numbers_beyond_float32_have_no_base64(inference: Any) -> None:
    async def embed_large(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"[1e300]", version="1.0")

    body = b'{"model": "m", "input": "a", "encoding_format": "base64"}'
    response = inference(embed_large)("POST", "/v1/embeddings", body)
    assert error_fields(response) == (400, "bad_request", "encoding_format")


def test_concurrent_rows_are_limited_by_batch_and_queue_size(inference: Any) -> None:
    in_progress = max_in_progress = 0

    async def embed_slowly(request: InferenceRequest) -> InferenceResponse:
        nonlocal in_progress, max_in_progress
        in_progress += 1
        max_in_progress = max(max_in_progress, in_progress)
        await asyncio.sleep(0.001)
        in_progress -= 1
        return InferenceResponse(b"[1.0]", version="1.0")

    table = RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": version_route("1.0", max_batch_size=20)})})
    app = inference(embed_slowly, table=table)
    texts = json.dumps({"model": "m", "input": ["a"] * 100}).encode()
    assert len(parse(app("POST", "/v1/embeddings", texts))["data"]) == 100
    assert max_in_progress == 40, "two batches"
    app.reader.update(
        RoutingTable(
            2, {"m": ModelRoute("1.0", {"1.0": version_route("1.0", max_batch_size=20, job_queue_size=3)})}
        )
    )
    max_in_progress = 0
    assert app("POST", "/v1/embeddings", texts).status == 200
    assert max_in_progress == 3


def test_an_error_of_one_row_fails_the_request(inference: Any) -> None:
    async def reject_bad(request: InferenceRequest) -> InferenceResponse:
        if request.inputs[0].value == b"bad":
            raise HandlerRejected("This is no text", 400)
        return InferenceResponse(b"[1.0]", version="1.0")

    app = inference(reject_bad)
    response = app("POST", "/v1/embeddings", b'{"model": "m", "input": ["a", "bad", "c"]}')
    assert error_fields(response) == (400, "handler_rejected", None)


def test_too_many_inputs_are_rejected(inference: Any) -> None:
    body = json.dumps({"model": "m", "input": ["a"] * 2049}).encode()
    assert error_fields(inference(embed)("POST", "/v1/embeddings", body)) == (400, "bad_request", "input")


def test_all_rows_of_a_request_run_on_one_version(inference: Any) -> None:
    async def embed_version(request: InferenceRequest) -> InferenceResponse:
        version = app.backend.ref.version
        return InferenceResponse(json.dumps([1.0, float(version)]).encode(), version=version)

    version_routes = {version: version_route(version) for version in ("1.0", "2.0")}
    weights = {"1.0": 5000, "2.0": 5000}
    policy = TrafficPolicy("weighted", weights, allocation=allocate(weights))
    app = inference(embed_version, table=RoutingTable(1, {"m": ModelRoute("1.0", version_routes, policy)}))
    app.compares = False  # the first version is random
    versions_seen = set()
    for _ in range(8):
        response = app("POST", "/v1/embeddings", b'{"model": "m", "input": ["a", "b", "c", "d"]}')
        versions = {item["embedding"][1] for item in parse(response)["data"]}
        assert versions == {float(response["x-model-version"])}
        versions_seen |= versions
    assert versions_seen == {1.0, 2.0}

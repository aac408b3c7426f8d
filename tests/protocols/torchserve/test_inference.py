"""The inference API as a TorchServe client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream, Timings
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import HandlerFailed, HandlerRejected, NoReplica, QueueFull, ReplicaDied
from tests.support.coroutine_backend import CoroutineBackend

NOT_FOUND = (
    b'{\n  "code": 404,\n  "type": "ResourceNotFoundException",\n'
    b'  "message": "Requested resource is not found, please refer to API document."\n}\n'
)
NOT_ALLOWED = (
    b'{\n  "code": 405,\n  "type": "MethodNotAllowedException",\n'
    b'  "message": "Requested method is not allowed, please refer to API document."\n}\n'
)


def table(*rows: VersionRoute, generation: int = 1, settled: bool = True) -> RoutingTable:
    return RoutingTable(
        generation, {"m": ModelRoute(rows[0].version, {row.version: row for row in rows})}, settled
    )


def test_a_prediction_to_the_byte(inference) -> None:
    response = inference()("POST", "/predictions/m", b'{"x": 1}', {"Content-Type": "application/json"})
    assert response.status == 200
    assert response.body == b'{"x": 1}'
    headers = dict(response.headers)
    request_id = headers.pop(b"x-request-id").decode()
    assert len(headers) == len(response.headers) - 1
    assert headers == {
        b"content-length": b"8",
        b"pragma": b"no-cache",
        b"cache-control": b"no-cache; no-store, must-revalidate, private",
        b"expires": b"Thu, 01 Jan 1970 00:00:00 UTC",
        b"x-model-version": b"1.0",
    }
    assert [len(part) for part in request_id.split("-")] == [8, 4, 4, 4, 12]
    assert request_id[14] == "4"
    assert request_id[19] in "89ab"


FRAMING = {"content-length", "transfer-encoding"}  # the headers of a connection's messages


def test_request_is_passed_to_the_backend(inference) -> None:
    app = inference()
    headers = {"Content-Type": "text/plain; charset=utf-8", "X-Who": "me", "x-request-id": "theirs"}
    response = app("POST", "/predictions/m/2.0/v1/chat/completions", [b"hel", b"lo"], headers)
    [call] = app.backend.requests
    assert (call.model, call.version, call.kind, call.deadline) == ("m", "2.0", "predict", None)
    assert call.inputs == (InputPart("body", b"hello", "text/plain"),)
    assert {name: value for name, value in call.headers.items() if name not in FRAMING} == {
        "content-type": "text/plain; charset=utf-8",
        "x-who": "me",
        "x-request-id": "theirs",
        "url_path": "v1/chat/completions",
        "explain": "False",
    }
    assert call.request_id == response["x-request-id"] != "theirs"


def test_a_client_cannot_set_what_the_server_injects(inference) -> None:
    app = inference()
    app("POST", "/predictions/m", b"", {"url_path": "secret", "explain": "True"})
    sent = app.backend.requests[0].headers
    assert {name: sent[name] for name in sent.keys() - FRAMING} == {"url_path": "", "explain": "False"}


def test_explanations_are_a_kind_of_their_own(inference) -> None:
    app = inference()
    app("POST", "/explanations/m/2.0", b"x")
    [call] = app.backend.requests
    assert (call.kind, call.version, call.headers["explain"]) == ("explain", "2.0", "True")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
def test_any_method_infers(inference, method: str) -> None:
    assert inference()(method, "/predictions/m", b"x").body == b"x"


@pytest.mark.parametrize("path", ["/predictions/m/", "/predictions/m/1.0//", "/ping/", "/health/live/"])
def test_trailing_slashes_do_not_matter(inference, path: str) -> None:
    assert inference()("GET", path).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("POST", "/", 405, NOT_ALLOWED),
        ("POST", "/nothing", 404, NOT_FOUND),
        ("POST", "/predictions", 404, NOT_FOUND),
        ("POST", "/explanations/", 404, NOT_FOUND),
        ("GET", "/health", 404, NOT_FOUND),
        ("GET", "/health/other", 404, NOT_FOUND),
        ("GET", "/api-description/x", 404, NOT_FOUND),
        (
            "POST",
            "/predictions/none",
            404,
            b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: none"\n}\n',  # noqa: E501
        ),
        (
            "OPTIONS",
            "/predictions/none",
            404,
            b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: none"\n}\n',  # noqa: E501
        ),
        (
            "POST",
            "/predictions/m/9",
            404,
            b'{\n  "code": 404,\n  "type": "ModelVersionNotFoundException",\n'
            b'  "message": "Model version: 9 does not exist for model: m"\n}\n',
        ),
    ],
)
def test_refusals_to_the_byte(inference, method: str, path: str, status: int, body: bytes) -> None:
    response = inference()(method, path)
    assert (response.status, response.body) == (status, body)
    assert response["content-type"] == "application/json"
    assert response["content-length"] == str(len(body))
    assert response["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "reason", "retry"),
    [
        (NoReplica("m", None), 503, "no_replica", "10"),
        (QueueFull("m", None), 503, "queue_full", "1"),
        (HandlerFailed("Traceback: secret"), 503, "handler_failed", None),
        (HandlerRejected("my words", 418), 418, "handler_rejected", None),
        (ReplicaDied("killed"), 500, "replica_died", None),
        (ZeroDivisionError("secret"), 500, "internal", None),
    ],
)
def test_errors_carry_their_reason(
    inference, error: Exception, status: int, reason: str, retry: str | None
) -> None:
    async def fail(call: InferenceRequest) -> InferenceResponse:
        raise error

    response = inference(fail)("POST", "/predictions/m")
    assert (response.status, response["x-torchrelay-reason"], response["retry-after"]) == (
        status,
        reason,
        retry,
    )
    assert json.loads(response.body)["code"] == status
    assert b"secret" not in response.body


def test_internal_error_is_logged_with_its_traceback(inference, caplog) -> None:
    async def fail(call: InferenceRequest) -> InferenceResponse:
        raise ZeroDivisionError("secret")

    response = inference(fail)("POST", "/predictions/m")
    assert json.loads(response.body)["type"] == "InternalServerException"
    assert response["x-request-id"] in json.loads(response.body)["message"]
    [record] = caplog.records
    assert "ZeroDivisionError: secret" in caplog.text
    assert response["x-request-id"] in record.getMessage()


def test_handler_headers_are_sent(inference) -> None:
    async def reply(call: InferenceRequest) -> InferenceResponse:
        headers = (
            ("X-Mine", "1"),
            ("Pragma", "cache"),
            ("Content-Length", "99"),
            ("bad name", "x"),
            ("X-Two", "a\r\nb: c"),
        )
        return InferenceResponse(b"hi", "text/plain", 599, "Odd", headers)

    response = inference(reply)("POST", "/predictions/m")
    assert response.status == 599
    assert response.headers[:3] == [
        (b"content-type", b"text/plain"),
        (b"x-mine", b"1"),
        (b"x-two", b"a  b: c"),
    ]
    assert (response["pragma"], response["content-length"], response["bad name"]) == ("no-cache", "2", None)


def test_a_content_type_among_the_handlers_headers_wins(inference) -> None:
    async def reply(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"", "text/plain", headers=(("Content-Type", "text/html"),))

    assert inference(reply)("POST", "/predictions/m")["content-type"] == "text/html"


@pytest.mark.parametrize(("set_", "sent"), [(204, 204), (304, 304), (100, 500), (700, 500)])
def test_special_http_statuses(inference, set_: int, sent: int) -> None:
    async def reply(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"hi", status=set_)

    response = inference(reply)("POST", "/predictions/m")
    assert response.status == sent
    assert (response.body, response["content-length"]) == ((b"", None) if sent < 400 else (b"hi", "2"))


def test_timings_are_shown(inference) -> None:
    async def reply(call: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"", timings=Timings(0.0015, 0.25, 4))

    response = inference(reply)("POST", "/predictions/m")
    assert response["server-timing"] == "queue;dur=1.500, inference;dur=250.000, batch;desc=4"


def test_a_form_reaches_the_handler_by_field(inference) -> None:
    app = inference()
    app("POST", "/predictions/m", b"data=1&target=2", {"Content-Type": "application/x-www-form-urlencoded"})
    assert app.backend.requests[0].inputs == (InputPart("data", b"1"), InputPart("target", b"2"))


def test_a_malformed_form_is_refused(inference) -> None:
    response = inference()(
        "POST", "/predictions/m", b"x", {"Content-Type": "multipart/form-data; boundary=XX"}
    )
    assert (response.status, response["x-torchrelay-reason"]) == (400, "invalid_body")
    assert json.loads(response.body)["type"] == "BadRequestException"


@pytest.mark.parametrize(
    ("body", "headers"), [(b"x" * 11, {}), ([b"x" * 6, b"x" * 5], {}), (b"", {"Content-Length": "11"})]
)
def test_body_over_the_limit_is_refused_with_an_empty_body(
    inference, body: bytes | list[bytes], headers: dict
) -> None:
    app = inference(max_request_size=10)
    response = app("POST", "/predictions/m", body, headers)
    assert (response.status, response.body, response["content-length"]) == (413, b"", "0")
    assert response["content-type"] is None
    assert app.backend.requests == []


def test_a_body_at_the_limit_is_served(inference) -> None:
    response = inference(max_request_size=10)("POST", "/predictions/m", b"x" * 10, {"Content-Length": "10"})
    assert response.status == 200


def test_disconnect_during_the_body_gets_no_response(inference) -> None:
    app = inference()
    scope = {"path": "/predictions/m"}
    response = app("POST", "/predictions/m", [], scope=scope, disconnects=True)
    assert response.status == 0
    assert app.backend.requests == []
    assert app.access_log[0][4] == 499


def test_client_deadline_reaches_the_request(inference) -> None:
    app = inference()
    before = time.time()
    app("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "2.5"})
    assert before + 2.5 <= app.backend.requests[0].deadline <= time.time() + 2.5


def test_client_priority_reaches_the_request(inference) -> None:
    seen: list[InferenceRequest] = []

    async def note(call: InferenceRequest) -> InferenceResponse:
        seen.append(call)
        return InferenceResponse(b"")

    app = inference(note)
    for headers in ({}, *({"x-request-priority": word} for word in ("high", "normal", "low"))):
        assert app("POST", "/predictions/m", b"", headers).status == 200
    assert [call.priority for call in seen] == ["normal", "high", "normal", "low"]
    for word in ("urgent", "shadow", "", "HIGH"):
        refused = app("POST", "/predictions/m", b"", {"x-request-priority": word})
        assert (refused.status, refused["x-torchrelay-reason"]) == (400, "bad_request")
        assert (
            f"x-request-priority must be high, normal or low; got {word!r}."
            in json.loads(refused.body)["message"]
        )


def test_the_models_client_timeout_is_a_deadline_too(inference) -> None:
    app = inference(
        table=table(VersionRoute("1.0", "ready", 1, client_timeout=500), VersionRoute("2.0", "ready", 1))
    )
    before = time.time()
    app("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "10"})
    app("POST", "/predictions/m/1.0")
    app("POST", "/predictions/m/2.0")
    first, second, third = (call.deadline for call in app.backend.requests)
    assert before + 0.5 <= first <= second <= time.time() + 0.5
    assert third is None


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_invalid_deadline_is_refused(inference, value: str) -> None:
    response = inference()("POST", "/predictions/m", b"", {"x-request-timeout-seconds": value})
    assert response.status == 400
    assert json.loads(response.body)["message"] == (
        f"Header x-request-timeout-seconds must be a number of seconds, 0 for no limit; got {value!r}."
    )


def test_a_deadline_of_more_than_a_year_is_refused(inference) -> None:
    response = inference()("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "1e308"})
    assert response.status == 400
    assert "a number of seconds up to 31536000" in json.loads(response.body)["message"]


def test_a_deadline_that_passes_is_answered(inference) -> None:
    response = inference()("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "1e-12"})
    assert (response.status, response["x-torchrelay-reason"]) == (504, "deadline")
    assert json.loads(response.body)["type"] == "RequestTimeoutException"


class Pieces(CoroutineBackend):
    """A stream of ``pieces`` that says whether it was closed; an exception among them is raised."""

    def __init__(self, *pieces: bytes | Exception, head: InferenceResponse | None = None) -> None:
        self._pieces = pieces
        self._head = head or InferenceResponse(b"")
        self.closed = False

    async def infer(self, call: InferenceRequest) -> ResponseStream:
        return ResponseStream(self._head, self._iterate())

    async def _iterate(self) -> AsyncIterator[bytes]:
        try:
            for piece in self._pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.closed = True


def test_each_chunk_is_one_body_message(inference) -> None:
    stream = Pieces(b"a", b"", b"bc", head=InferenceResponse(b"", "text/plain", headers=(("X-Mine", "1"),)))
    app = inference(stream.infer)
    response = app("POST", "/predictions/m")
    # An empty chunk would end the body of a connection.
    assert response.chunks == [b"a", b"bc", b""]
    assert response.ended
    assert response.headers[:3] == [
        (b"content-type", b"text/plain"),
        (b"x-mine", b"1"),
        (b"ts_stream_next", b"true"),
    ]
    assert response["content-length"] is None
    assert response["x-request-id"]
    assert stream.closed


@pytest.mark.parametrize("error", [ReplicaDied("killed"), OSError("ours")])
def test_an_error_in_mid_stream_leaves_the_body_without_an_end(inference, error: Exception, caplog) -> None:
    stream = Pieces(b"a", error)
    response = inference(stream.infer)("POST", "/predictions/m", raises=True)
    assert response.error is error
    assert response.chunks == [b"a"]
    assert not response.ended
    assert response["x-request-id"] in caplog.text


@pytest.mark.parametrize(("healthy", "status", "word"), [(True, 200, "Healthy"), (False, 500, "Unhealthy")])
def test_ping(inference, healthy: bool, status: int, word: str) -> None:
    response = inference(table=table(VersionRoute("1.0", "ready", 1, healthy=healthy)))("GET", "/ping")
    assert (response.status, response.body) == (status, b'{\n  "status": "%s"\n}\n' % word.encode())


def test_live(inference) -> None:
    response = inference(table=RoutingTable())("GET", "/health/live")
    assert (response.status, json.loads(response.body)) == (200, {"live": True})


def test_readiness_names_loading_and_failed_versions(inference) -> None:
    rows = [
        VersionRoute("1.0", "loading", 0),
        VersionRoute("2.0", "failed", 0, last_error="secret"),
        VersionRoute("3.0", "ready", 1),
    ]
    response = inference(table=table(*rows, settled=False))("GET", "/health/ready")
    assert response.status == 503
    assert json.loads(response.body) == {"ready": False, "loading": ["m/1.0"], "failed": ["m/2.0"]}
    response = inference(table=table(*rows))("GET", "/health/ready")
    assert (response.status, json.loads(response.body)["ready"]) == (200, True)
    response = inference(table=RoutingTable())("GET", "/health/ready")
    assert response.status == 503
    assert json.loads(response.body)["reason"] == "no routing table has reached this process yet"


def test_every_answer_is_counted_and_logged(inference) -> None:
    app = inference()
    response = app("POST", "/predictions/m?a=b", b"x")
    app("GET", "/nothing")
    counts = {
        dict(labels)["code"]: value
        for name, labels, value in app.meters.samples()
        if name == "torchrelay_http_responses_total"
    }
    assert counts == {"200": 1.0, "404": 1.0}
    client, method, path, http_version, status, milliseconds, request_id, model, version, *_ = app.access_log[
        0
    ]
    assert (client, method, path, http_version, status) == (
        "127.0.0.1:40000",
        "POST",
        "/predictions/m?a=b",
        "1.1",
        200,
    )
    assert 0 < milliseconds < 60_000
    assert (request_id, model, version) == (response["x-request-id"], "m", "1.0")
    assert app.access_log[1][4] == 404
    assert app.access_log[1][7:9] == ("", "")


def test_access_log_has_the_failed_version(inference) -> None:
    async def fails(call: InferenceRequest) -> InferenceResponse:
        raise HandlerFailed("a traceback")

    app = inference(fails)
    app("POST", "/predictions/m", b"x")
    app("POST", "/predictions/m/2.0", b"x")
    app("POST", "/predictions/m/9", b"x")
    app("POST", "/predictions/none", b"x")
    assert [line[7:9] for line in app.access_log] == [("m", "1.0"), ("m", "2.0"), ("m", "9"), ("none", "")]


@pytest.mark.parametrize(("length", "status"), [("1" * 5000, 413), ("0" * 5000 + "1", 200)])
def test_a_content_length_has_any_number_of_digits(asgi_inference, length: str, status: int) -> None:
    response = asgi_inference()("POST", "/predictions/m", b"x", {"Content-Length": length})
    assert response.status == status

"""The inference API as a TorchServe client sees it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator

import pytest

from serve_app.errors import HandlerFailed, HandlerSaid, NoWorker, QueueFull, WorkerDied
from serve_app.types import Call, Input, ModelRow, Reply, ReplyStream, Table, Timings, VersionRow

NOT_FOUND = (
    b'{\n  "code": 404,\n  "type": "ResourceNotFoundException",\n'
    b'  "message": "Requested resource is not found, please refer to API document."\n}\n'
)
NOT_ALLOWED = (
    b'{\n  "code": 405,\n  "type": "MethodNotAllowedException",\n'
    b'  "message": "Requested method is not allowed, please refer to API document."\n}\n'
)


def table(*rows: VersionRow, generation: int = 1, settled: bool = True) -> Table:
    return Table(generation, {"m": ModelRow(rows[0].version, {row.version: row for row in rows})}, settled)


def test_a_prediction_to_the_byte(inference) -> None:
    answer = inference()("POST", "/predictions/m", b'{"x": 1}', {"Content-Type": "application/json"})
    assert answer.status == 200
    assert answer.body == b'{"x": 1}'
    headers = dict(answer.headers)
    request_id = headers.pop(b"x-request-id").decode()
    assert len(headers) == len(answer.headers) - 1
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


def test_the_call_carries_the_request(inference) -> None:
    app = inference()
    headers = {"Content-Type": "text/plain; charset=utf-8", "X-Who": "me", "x-request-id": "theirs"}
    answer = app("POST", "/predictions/m/2.0/v1/chat/completions", [b"hel", b"lo"], headers)
    [call] = app.target.calls
    assert (call.model, call.version, call.kind, call.deadline) == ("m", "2.0", "predict", None)
    assert call.inputs == (Input("body", b"hello", "text/plain"),)
    assert call.headers == {
        "content-type": "text/plain; charset=utf-8",
        "x-who": "me",
        "x-request-id": "theirs",
        "url_path": "v1/chat/completions",
        "explain": "False",
    }
    assert call.request_id == answer["x-request-id"] != "theirs"


def test_a_client_cannot_set_what_the_server_injects(inference) -> None:
    app = inference()
    app("POST", "/predictions/m", b"", {"url_path": "secret", "explain": "True"})
    assert app.target.calls[0].headers == {"url_path": "", "explain": "False"}


def test_explanations_are_a_kind_of_their_own(inference) -> None:
    app = inference()
    app("POST", "/explanations/m/2.0", b"x")
    [call] = app.target.calls
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
            b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: none"\n}\n',
        ),
        (
            "OPTIONS",
            "/predictions/none",
            404,
            b'{\n  "code": 404,\n  "type": "ModelNotFoundException",\n  "message": "Model not found: none"\n}\n',
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
    answer = inference()(method, path)
    assert (answer.status, answer.body) == (status, body)
    assert answer["content-type"] == "application/json"
    assert answer["content-length"] == str(len(body))
    assert answer["x-request-id"]


@pytest.mark.parametrize(
    ("error", "status", "reason", "retry"),
    [
        (NoWorker("m", None), 503, "no_replica", "10"),
        (QueueFull("m", None), 503, "queue_full", "1"),
        (HandlerFailed("Traceback: secret"), 503, "handler_failed", None),
        (HandlerSaid("my words", 418), 418, "handler_said", None),
        (WorkerDied("killed"), 500, "worker_died", None),
        (ZeroDivisionError("secret"), 500, "internal", None),
    ],
)
def test_errors_carry_their_reason(inference, error: Exception, status: int, reason: str, retry: str | None) -> None:
    async def fail(call: Call) -> Reply:
        raise error

    answer = inference(fail)("POST", "/predictions/m")
    assert (answer.status, answer["x-torchrelay-reason"], answer["retry-after"]) == (status, reason, retry)
    assert json.loads(answer.body)["code"] == status
    assert b"secret" not in answer.body


def test_a_fault_of_ours_is_logged_with_its_traceback(inference, caplog) -> None:
    async def fail(call: Call) -> Reply:
        raise ZeroDivisionError("secret")

    answer = inference(fail)("POST", "/predictions/m")
    assert json.loads(answer.body)["type"] == "InternalServerException"
    assert answer["x-request-id"] in json.loads(answer.body)["message"]
    [record] = caplog.records
    assert "ZeroDivisionError: secret" in caplog.text
    assert answer["x-request-id"] in record.getMessage()


def test_what_the_handler_set_goes_out(inference) -> None:
    async def reply(call: Call) -> Reply:
        headers = (
            ("X-Mine", "1"),
            ("Pragma", "cache"),
            ("Content-Length", "99"),
            ("bad name", "x"),
            ("X-Two", "a\r\nb: c"),
        )
        return Reply(b"hi", "text/plain", 599, "Odd", headers)

    answer = inference(reply)("POST", "/predictions/m")
    assert answer.status == 599
    assert answer.headers[:3] == [(b"content-type", b"text/plain"), (b"x-mine", b"1"), (b"x-two", b"a  b: c")]
    assert (answer["pragma"], answer["content-length"], answer["bad name"]) == ("no-cache", "2", None)


def test_a_content_type_among_the_handlers_headers_wins(inference) -> None:
    async def reply(call: Call) -> Reply:
        return Reply(b"", "text/plain", headers=(("Content-Type", "text/html"),))

    assert inference(reply)("POST", "/predictions/m")["content-type"] == "text/html"


@pytest.mark.parametrize(("set_", "sent"), [(204, 204), (304, 304), (100, 500), (700, 500)])
def test_statuses_that_http_has_its_own_rules_for(inference, set_: int, sent: int) -> None:
    async def reply(call: Call) -> Reply:
        return Reply(b"hi", status=set_)

    answer = inference(reply)("POST", "/predictions/m")
    assert answer.status == sent
    assert (answer.body, answer["content-length"]) == ((b"", None) if sent < 400 else (b"hi", "2"))


def test_timings_are_shown(inference) -> None:
    async def reply(call: Call) -> Reply:
        return Reply(b"", timings=Timings(0.0015, 0.25, 4))

    answer = inference(reply)("POST", "/predictions/m")
    assert answer["server-timing"] == "queue;dur=1.500, inference;dur=250.000, batch;desc=4"


def test_a_form_reaches_the_handler_by_field(inference) -> None:
    app = inference()
    app("POST", "/predictions/m", b"data=1&target=2", {"Content-Type": "application/x-www-form-urlencoded"})
    assert app.target.calls[0].inputs == (Input("data", b"1"), Input("target", b"2"))


def test_a_malformed_form_is_refused(inference) -> None:
    answer = inference()("POST", "/predictions/m", b"x", {"Content-Type": "multipart/form-data; boundary=XX"})
    assert (answer.status, answer["x-torchrelay-reason"]) == (400, "invalid_body")
    assert json.loads(answer.body)["type"] == "BadRequestException"


@pytest.mark.parametrize(
    ("body", "headers"), [(b"x" * 11, {}), ([b"x" * 6, b"x" * 5], {}), (b"", {"Content-Length": "11"})]
)
def test_a_body_over_the_limit_is_refused_without_a_word(inference, body: bytes | list[bytes], headers: dict) -> None:
    app = inference(max_request_size=10)
    answer = app("POST", "/predictions/m", body, headers)
    assert (answer.status, answer.body, answer["content-length"]) == (413, b"", "0")
    assert answer["content-type"] is None
    assert app.target.calls == []


def test_a_body_at_the_limit_is_served(inference) -> None:
    answer = inference(max_request_size=10)("POST", "/predictions/m", b"x" * 10, {"Content-Length": "10"})
    assert answer.status == 200


def test_a_client_that_leaves_in_its_body_is_not_answered(inference) -> None:
    app = inference()
    scope = {"path": "/predictions/m"}
    answer = app("POST", "/predictions/m", [], scope=scope, leaves=True)
    assert answer.status == 0
    assert app.target.calls == []
    assert app.access[0][4] == 499


def test_the_callers_deadline_reaches_the_call(inference) -> None:
    app = inference()
    before = time.time()
    app("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "2.5"})
    assert before + 2.5 <= app.target.calls[0].deadline <= time.time() + 2.5


def test_the_callers_priority_reaches_the_call(inference) -> None:
    seen: list[Call] = []

    async def note(call: Call) -> Reply:
        seen.append(call)
        return Reply(b"")

    app = inference(note)
    for headers in ({}, *({"x-request-priority": word} for word in ("high", "normal", "low"))):
        assert app("POST", "/predictions/m", b"", headers).status == 200
    assert [call.priority for call in seen] == ["normal", "high", "normal", "low"]
    for word in ("urgent", "shadow", "", "HIGH"):
        refused = app("POST", "/predictions/m", b"", {"x-request-priority": word})
        assert (refused.status, refused["x-torchrelay-reason"]) == (400, "bad_request")
        assert f"x-request-priority must be high, normal or low; got {word!r}." in json.loads(refused.body)["message"]


def test_the_models_client_timeout_is_a_deadline_too(inference) -> None:
    app = inference(table=table(VersionRow("1.0", "ready", 1, client_timeout=500), VersionRow("2.0", "ready", 1)))
    before = time.time()
    app("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "10"})
    app("POST", "/predictions/m/1.0")
    app("POST", "/predictions/m/2.0")
    first, second, third = (call.deadline for call in app.target.calls)
    assert before + 0.5 <= first <= second <= time.time() + 0.5
    assert third is None


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", ""])
def test_a_deadline_that_is_no_number_is_named(inference, value: str) -> None:
    answer = inference()("POST", "/predictions/m", b"", {"x-request-timeout-seconds": value})
    assert answer.status == 400
    assert json.loads(answer.body)["message"] == (
        f"Header x-request-timeout-seconds must be a number of seconds, 0 for no limit; got {value!r}."
    )


def test_a_deadline_that_passes_is_answered(inference) -> None:
    answer = inference()("POST", "/predictions/m", b"", {"x-request-timeout-seconds": "1e-12"})
    assert (answer.status, answer["x-torchrelay-reason"]) == (504, "deadline")
    assert json.loads(answer.body)["type"] == "RequestTimeoutException"


class Pieces:
    """A stream of ``pieces`` that says whether it was closed; an exception among them is raised."""

    def __init__(self, *pieces: bytes | Exception, head: Reply | None = None) -> None:
        self._pieces = pieces
        self._head = head or Reply(b"")
        self.closed = False

    async def infer(self, call: Call) -> ReplyStream:
        return ReplyStream(self._head, self._iterate())

    async def _iterate(self) -> AsyncIterator[bytes]:
        try:
            for piece in self._pieces:
                if isinstance(piece, Exception):
                    raise piece
                yield piece
        finally:
            self.closed = True


def test_each_piece_of_a_stream_is_one_message(inference) -> None:
    stream = Pieces(b"a", b"", b"bc", head=Reply(b"", "text/plain", headers=(("X-Mine", "1"),)))
    app = inference(stream.infer)
    answer = app("POST", "/predictions/m")
    assert answer.pieces == [b"a", b"", b"bc", b""]
    assert answer.ended
    assert answer.headers[:3] == [(b"content-type", b"text/plain"), (b"x-mine", b"1"), (b"ts_stream_next", b"true")]
    assert answer["content-length"] is None
    assert answer["x-request-id"]
    assert stream.closed


@pytest.mark.parametrize("error", [WorkerDied("killed"), OSError("ours")])
def test_an_error_in_mid_stream_leaves_the_body_without_an_end(inference, error: Exception, caplog) -> None:
    stream = Pieces(b"a", error)
    answer = inference(stream.infer)("POST", "/predictions/m", raises=True)
    assert answer.error is error
    assert answer.pieces == [b"a"]
    assert not answer.ended
    assert answer["x-request-id"] in caplog.text


@pytest.mark.parametrize(("healthy", "status", "word"), [(True, 200, "Healthy"), (False, 500, "Unhealthy")])
def test_ping(inference, healthy: bool, status: int, word: str) -> None:
    answer = inference(table=table(VersionRow("1.0", "ready", 1, healthy=healthy)))("GET", "/ping")
    assert (answer.status, answer.body) == (status, b'{\n  "status": "%s"\n}\n' % word.encode())


def test_live(inference) -> None:
    answer = inference(table=Table())("GET", "/health/live")
    assert (answer.status, json.loads(answer.body)) == (200, {"live": True})


def test_ready_names_what_is_not_there_yet(inference) -> None:
    rows = [
        VersionRow("1.0", "loading", 0),
        VersionRow("2.0", "failed", 0, last_error="secret"),
        VersionRow("3.0", "ready", 1),
    ]
    answer = inference(table=table(*rows, settled=False))("GET", "/health/ready")
    assert answer.status == 503
    assert json.loads(answer.body) == {"ready": False, "loading": ["m/1.0"], "failed": ["m/2.0"]}
    answer = inference(table=table(*rows))("GET", "/health/ready")
    assert (answer.status, json.loads(answer.body)["ready"]) == (200, True)
    answer = inference(table=Table())("GET", "/health/ready")
    assert answer.status == 503
    assert json.loads(answer.body)["reason"] == "no routing table has reached this process yet"


def test_every_answer_is_counted_and_logged(inference) -> None:
    app = inference()
    answer = app("POST", "/predictions/m?a=b", b"x")
    app("GET", "/nothing")
    counts = {
        dict(labels)["code"]: value
        for name, labels, value in app.meters.samples()
        if name == "torchrelay_http_responses_total"
    }
    assert counts == {"200": 1.0, "404": 1.0}
    client, method, path, http_version, status, milliseconds, request_id, model, version, _ = app.access[0]
    assert (client, method, path, http_version, status) == ("127.0.0.1:40000", "POST", "/predictions/m?a=b", "1.1", 200)
    assert 0 < milliseconds < 1000
    assert (request_id, model, version) == (answer["x-request-id"], "m", "1.0")
    assert app.access[1][4] == 404
    assert app.access[1][7:9] == ("", "")


def test_the_access_log_says_which_version_failed(inference) -> None:
    async def fails(call: Call) -> Reply:
        raise HandlerFailed("a traceback")

    app = inference(fails)
    app("POST", "/predictions/m", b"x")
    app("POST", "/predictions/m/2.0", b"x")
    app("POST", "/predictions/m/9", b"x")
    app("POST", "/predictions/none", b"x")
    assert [line[7:9] for line in app.access] == [("m", "1.0"), ("m", "2.0"), ("m", "9"), ("none", "")]

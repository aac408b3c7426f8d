"""Errors of the inference port, and the details that an operator lets them contain."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app import errors
from serve_app.dataplane.data_plane import DataPlane, RoutingTableReader
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.protocols.http.server import ray_bypass
from serve_app.protocols.http_app import ASGIApp, inference_app
from serve_app.protocols.torchserve import inference
from serve_app.settings import InferenceSettings, Settings
from serve_app.telemetry.metrics import Meters
from tests.support.coroutine_backend import CoroutineBackend

TRACEBACK = (
    "Traceback (most recent call last):\n  File \"handler.py\", line 3, in handle\nKeyError: 'secret'\n"
)


class Target(CoroutineBackend):
    def __init__(self, infer: Any) -> None:
        self.infer = infer


class Lines:
    """An access log that keeps its lines."""

    def __init__(self, json: bool = False) -> None:
        self.json = json
        self.lines: list[tuple[Any, dict[str, Any]]] = []

    def write(self, *line: Any, **named: Any) -> None:
        self.lines.append((line, named))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def __getitem__(self, name: str) -> str | None:
        return self.headers.get(name)


def ask(app: Any, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    """One request over the bare ASGI interface."""
    return asyncio.run(_ask(app, method, path, body, headers or {}))


async def _ask(app: Any, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
    messages: list[Any] = [{"type": "http.request", "body": body}]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app(
        {"type": "http", "method": method, "path": path, "headers": raw, "http_version": "1.1"}, receive, send
    )
    start, *pieces = sent
    names = [name for name, _ in start["headers"]]
    assert len(names) == len(set(names)), "no header is sent twice"
    result = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], result, b"".join(piece["body"] for piece in pieces))


def versions(client_timeout: int = 0) -> RoutingTable:
    """Return a table with one model; ``client_timeout`` is its clientTimeoutInMills."""
    row = VersionRoute("1.0", "ready", 1, client_timeout=client_timeout)
    return RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": row})}, startup_complete=True)


async def echo(call: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(call.inputs[0].value, version="1.0")


def app_of(
    infer: Any, table: RoutingTable | None = None, access: Lines | None = None, **settings: Any
) -> ASGIApp:
    plane = DataPlane(RoutingTableReader(table or versions()), Meters(), lambda ref, row: Target(infer))
    return inference_app(plane, Settings(inference=InferenceSettings(**settings)), Meters(), access)


def raising(error: Exception) -> Any:
    async def infer(call: InferenceRequest) -> InferenceResponse:
        raise error

    return infer


async def late(call: InferenceRequest) -> InferenceResponse:
    assert call.deadline is not None
    await asyncio.sleep(call.deadline - time.time())
    raise errors.DeadlineExceeded(call.model, 0.0)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (errors.ReplicaDied("it was lost"), 500, "replica_died"),
        (errors.ResponseTimeout("no answer within 2 s"), 500, "response_timeout"),
        (errors.QueueFull("m", None, ""), 503, "queue_full"),
        (errors.NoReplica("m", None, ""), 503, "no_replica"),
        (errors.ModelLoading("m", None, ""), 503, "loading"),
        (errors.QuotaExceeded("m", "1.0", 4), 429, "quota_exceeded"),
        (errors.DeadlineExceeded("m", 1.0), 504, "deadline"),
        (errors.CannotMeetDeadline("m", 0.0, 2.0, 1.0), 504, "deadline"),
        (errors.HandlerFailed(TRACEBACK), 503, "handler_failed"),
        (errors.HandlerOutOfMemory(TRACEBACK), 507, "out_of_memory"),
        (errors.OutputTooLarge(2, 1), 503, "response_too_large"),
    ],
)
def test_each_way_to_fail_has_its_own_reason(error: Exception, status: int, reason: str) -> None:
    answer = ask(app_of(raising(error)), "POST", "/predictions/m")
    assert (answer.status, answer["x-torchrelay-reason"]) == (status, reason)
    refused = isinstance(error, (errors.Unavailable, errors.DeadlineExceeded))
    assert answer["retry-after"] == (str(error.retry_after) if refused else None)


def test_retry_after_is_the_measured_time() -> None:
    full = errors.QueueFull("m", None, "")
    full.retry_after = 17
    assert ask(app_of(raising(full)), "POST", "/predictions/m")["retry-after"] == "17"


@pytest.mark.parametrize(
    ("shown", "detail"),
    [("hidden", None), ("message", "KeyError: 'secret'"), ("traceback", TRACEBACK.strip())],
)
def test_handler_errors_are_shown_where_enabled(shown: str, detail: str | None) -> None:
    failed = app_of(raising(errors.HandlerFailed(TRACEBACK)), handler_errors=shown)
    result = json.loads(ask(failed, "POST", "/predictions/m").body)
    assert (result["code"], result["message"], result.get("detail")) == (503, "Prediction failed", detail)
    died = app_of(raising(errors.ResponseTimeout("no answer within 2 s")), handler_errors=shown)
    why = json.loads(ask(died, "POST", "/predictions/m").body).get("detail")
    assert why == (None if shown == "hidden" else "no answer within 2 s")
    own = app_of(raising(errors.HandlerRejected("my words", 418)), handler_errors=shown)
    assert "detail" not in json.loads(ask(own, "POST", "/predictions/m").body)


def test_413_is_empty_and_its_headers_name_the_setting_and_the_limit() -> None:
    answer = ask(app_of(echo, max_request_size=5), "POST", "/predictions/m", b"123456")
    assert (answer.status, answer.body, answer["x-torchrelay-reason"]) == (413, b"", "request_too_large")
    assert answer["x-torchrelay-limit"] == "inference.max_request_size=5"


def test_client_timeout_is_reported() -> None:
    answer = ask(app_of(late, versions(20)), "POST", "/predictions/m")
    assert (answer.status, answer["x-torchrelay-reason"]) == (504, "client_timeout")
    assert json.loads(answer.body)["type"] == "RequestTimeoutException"


def test_late_response_is_held_back_where_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "LATE_RESPONSE_HOLD_S", 0.3)
    began = time.monotonic()
    answer = ask(app_of(late, versions(20), late_response="drop"), "POST", "/predictions/m")
    assert time.monotonic() - began > 0.3
    assert answer.status == 504, "nobody is held for ever"


def test_disconnect_ends_the_hold() -> None:
    lines = Lines()
    app = app_of(late, versions(20), lines, late_response="drop")

    async def leave() -> list[Any]:
        messages: list[Any] = [{"type": "http.request", "body": b""}]
        left, sent = asyncio.Event(), []

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/predictions/m",
            "headers": [],
            "http_version": "1.1",
        }
        request = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0.1)
        assert not request.done() and not sent
        left.set()
        await asyncio.wait([request], timeout=60)
        assert request.cancelled()
        return sent

    assert asyncio.run(leave()) == []
    assert [line[4] for line, _ in lines.lines] == [499]


def test_client_deadline_is_always_answered() -> None:
    app = app_of(late, versions(10_000), late_response="drop")
    answer = ask(app, "POST", "/predictions/m", headers={"x-request-timeout-seconds": "0.02"})
    assert (answer.status, answer["x-torchrelay-reason"]) == (504, "deadline")


def test_ids_that_a_request_brings_are_in_the_json_access_log_alone() -> None:
    came = {"x-request-id": "theirs", "traceparent": "00-1-2-01"}

    for json_form, wanted in ((True, came), (False, None)):
        lines = Lines(json_form)
        answer = ask(app_of(echo, None, lines), "POST", "/predictions/m", b"x", headers=came)
        [(line, _)] = lines.lines
        assert line[9] == wanted
        assert answer["x-request-id"] == line[6] != "theirs"


def through_ray(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
    """Return a response as a client gets it through Ray Serve's proxy."""

    async def ray(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})

    return ask(ray_bypass.BypassMiddleware(ray), "POST", "/predictions/m")


def test_ray_errors_have_torchserves_format() -> None:
    answer = through_ray(
        500, [(b"content-type", b"text/plain"), (b"x-request-id", b"rays")], b"Internal Server Error"
    )
    assert (answer.status, answer["x-torchrelay-reason"], answer["content-type"], answer["x-request-id"]) == (
        500,
        "replica_died",
        "application/json",
        "rays",
    )
    assert json.loads(answer.body) == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Worker died.",
    }
    assert answer["content-length"] == str(len(answer.body))


def test_own_responses_pass_through_rays_proxy_unchanged() -> None:
    route = [(b"x-request-id", b"ours"), (b"pragma", b"no-cache"), (b"x-request-id", b"rays")]
    answer = through_ray(503, route, b"said")
    assert (answer.status, answer.body, answer["x-request-id"]) == (503, b"said", "ours")
    assert through_ray(404, [], b"no such route").body == b"no such route"

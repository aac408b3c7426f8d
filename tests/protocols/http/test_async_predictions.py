"""Async predictions over HTTP: submitting, polling, results and cancellation."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.errors import HandlerRejected, QueueFull
from tests.support.async_server import ASYNC, Server, build_table, echo, locked_database

pytestmark = pytest.mark.integration


TENSORS = b'{"inputs": [{"name": "a", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'


# Submitting, polling, results


def test_result_equals_the_synchronous_response(start: Callable[..., Server]) -> None:
    server = start()
    sync_response = server("POST", "/predictions/m/2.0?a=1", b"x")
    accepted = server(
        "POST", "/predictions/m/2.0?a=1", b"x", {"Prefer": "wait=10, Respond-Async", "x-mine": "7"}
    )
    assert (accepted.status, accepted["preference-applied"]) == (202, "respond-async")
    location = accepted["location"]
    assert (
        accepted.json["self"] == location
        and accepted.json["model"] == "m"
        and accepted.json["version"] == "2.0"
    )
    assert accepted.json["request_id"] == accepted["x-request-id"]
    response = server.result(location)
    assert (response.status, response.body) == (sync_response.status, sync_response.body)
    same = {"content-type", "x-of-handler", "x-model-version", "pragma", "cache-control", "expires"}
    assert {one for one in response.headers if one[0] in same} == {
        one for one in sync_response.headers if one[0] in same
    }
    assert response["x-torchrelay-state"] == "done"
    async_request = server.requests[1]
    assert (async_request.priority, async_request.headers["x-mine"], async_request.request_id) == (
        "low",
        "7",
        accepted["x-request-id"],
    )
    assert "prefer" not in async_request.headers
    document = server("GET", location).json
    assert (document["state"], document["status"], document["result"]) == ("done", 200, f"{location}/result")
    assert document["created"] <= document["started"] <= document["ended"] < document["expires"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/explanations/m", b"x"),
        ("/v1/models/m:predict", b'{"instances": [1]}'),
        ("/models/m/invoke?a=1", b"x"),
        ("/endpoints/m/invocations", b"x"),
        ("/m/predict", b"x"),
        ("/invocations?model_name=m", b"x"),
        ("/v2/models/m/versions/2.0/infer", TENSORS),
    ],
)
def test_every_route_that_names_its_model_accepts_the_preference(
    start: Callable[..., Server], path: str, body: bytes
) -> None:
    server = start()
    sync_response = server("POST", path, body)
    async_response = server.result(server.submit(path, body))
    assert async_response.status == sync_response.status == 200
    strip = ("id",)  # of the request, in the protocol's own answer
    if async_response["content-type"] == "application/json":
        assert {k: v for k, v in async_response.json.items() if k not in strip} == {
            k: v for k, v in sync_response.json.items() if k not in strip
        }
    else:
        assert async_response.body == sync_response.body
    assert server.requests[0].kind == server.requests[1].kind


def test_error_is_stored_as_the_synchronous_error(start: Callable[..., Server]) -> None:
    async def reject(request: InferenceRequest) -> InferenceResponse:
        raise HandlerRejected("not today", 418)

    server = start(reject)
    sync_response = server("POST", "/predictions/m", b"x")
    location = server.submit()
    response = server.result(location)
    assert (response.status, response.body, response["x-torchrelay-state"]) == (
        418,
        sync_response.body,
        "failed",
    )
    assert server.wait_for_state(location, "failed")["status"] == 418


def test_stream_is_stored_as_one_body(start: Callable[..., Server]) -> None:
    async def stream(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for word in (b"a ", b"b ", b"c"):
                yield word

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    server = start(stream)
    assert server.result(server.submit()).body == b"a b c"


def test_result_of_a_running_prediction_is_its_state(start: Callable[..., Server]) -> None:
    go = asyncio.Event()

    async def wait_for_go(request: InferenceRequest) -> InferenceResponse:
        await go.wait()
        return InferenceResponse(b"at last", version="1.0")

    server = start(wait_for_go)
    location = server.submit()
    server.wait_for_state(location, "running")
    response = server("GET", f"{location}/result")
    assert (response.status, response["retry-after"], response.json["state"]) == (202, "1", "running")
    go.set()
    assert server.result(location).body == b"at last"


def test_invalid_requests_are_refused_at_once(start: Callable[..., Server]) -> None:
    server = start(inference={"max_request_size": 10})
    assert server("POST", "/predictions/nobody", b"x", ASYNC).status == 404
    assert server("POST", "/predictions/m/9.9", b"x", ASYNC).status == 404
    assert server("POST", "/predictions/m", b"x" * 11, ASYNC).status == 413
    assert server("POST", "/predictions/m", b"x", {**ASYNC, "x-request-priority": "urgent"}).status == 400
    assert server("POST", "/predictions/m", b"x", {**ASYNC, "idempotency-key": "k" * 256}).status == 400
    assert server.requests == []


def test_other_or_disabled_preferences_are_ignored(start: Callable[..., Server]) -> None:
    server = start()
    for other in ("return=minimal", "respond-asynchronously", "x-respond-async"):
        assert server("POST", "/predictions/m", b"x", {"prefer": other}).status == 200
    off = start(async_predictions={"enabled": False})
    response = off("POST", "/predictions/m", b"x", ASYNC)
    assert (response.status, response.body, response["preference-applied"]) == (200, b"x", None)


# Cancellation, expiry, deletion


def test_running_prediction_is_cancelled(start: Callable[..., Server]) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(request: InferenceRequest) -> InferenceResponse:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    server = start(hang)
    location = server.submit()
    server.loop.run_until_complete(asyncio.wait_for(started.wait(), 60))
    response = server("DELETE", location)
    assert (response.status, response.json["state"]) == (200, "cancelled")
    assert cancelled.is_set()
    assert server("GET", f"{location}/result").status == 410
    assert server("DELETE", location).status == 204
    assert server("GET", location).status == 404


def test_queued_prediction_is_cancelled_and_never_runs(start: Callable[..., Server]) -> None:
    go = asyncio.Event()

    async def wait_for_go(request: InferenceRequest) -> InferenceResponse:
        await go.wait()
        return await echo(request)

    server = start(wait_for_go, async_predictions={"model_concurrency": 1})
    first, second, third = (server.submit(body=body) for body in (b"1", b"2", b"3"))
    server.wait_for_state(first, "running")
    assert server("GET", second).json["state"] == "queued"
    assert server("DELETE", second).json["state"] == "cancelled"
    go.set()
    assert (server.result(first).body, server.result(third).body) == (b"1", b"3")
    assert [request.inputs[0].value for request in server.requests] == [b"1", b"3"]


def test_response_expires(start: Callable[..., Server]) -> None:
    server = start(async_predictions={"retention_s": 0.05})
    location = server.submit()

    async def is_swept() -> bool:
        return await server.service._store.load() == []

    server.wait_until(is_swept)
    for path in (location, f"{location}/result"):
        response = server("GET", path)
        assert (response.status, response["x-torchrelay-reason"]) == (404, "prediction_not_found")
        assert "async_predictions.retention_s" in response.json["message"]


def test_unknown_ids_paths_and_methods_are_refused(start: Callable[..., Server]) -> None:
    server = start()
    location = server.submit()
    assert server("GET", f"/async/{'0' * 32}").status == 404
    assert server("GET", "/async/short").status == 404
    assert server("PUT", location).status == 405
    assert server("GET", f"{location}/other").status == 404


def test_api_document_has_the_routes(start: Callable[..., Server]) -> None:
    server = start()
    paths = [path for path in server("OPTIONS", "/").json["paths"] if path.startswith("/async/")]
    for path in paths:
        location = server.submit()
        server.wait_for_state(location, "done")
        assert server("GET", path.replace("/async/{prediction_id}", location)).status == 200
    assert len(paths) == 2


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        ("1", 200),
        ("0" * 5000 + "1", 200),
        ("1001", 400),
        ("000000001999999", 400),
        ("1" * 5000, 400),
        ("-1", 400),
        ("%D9%A3", 400),
    ],
)
def test_the_limit_of_a_list_is_the_parsed_number(
    start: Callable[..., Server], limit: str, status: int
) -> None:
    assert start()("GET", f"/async?limit={limit}").status == status


# Idempotency


def test_same_key_and_body_return_the_same_prediction(start: Callable[..., Server]) -> None:
    server = start(table=build_table("m", "n"))
    first = server.submit(idempotency_key="k")
    assert server.submit(idempotency_key="k") == first
    server.wait_for_state(first, "done")
    assert server.submit(idempotency_key="k") == first
    other = server("POST", "/predictions/m", b"y", {**ASYNC, "idempotency-key": "k"})
    assert (other.status, other["x-torchrelay-reason"]) == (422, "idempotency_key_reused")
    assert server("POST", "/predictions/m/2.0", b"x", {**ASYNC, "idempotency-key": "k"}).status == 422
    assert server.submit("/predictions/n", idempotency_key="k") != first
    assert server.submit() != server.submit()
    assert server("POST", "/v2/models/m/infer", TENSORS, {**ASYNC, "idempotency-key": "k"}).status == 422


def test_submissions_with_different_keys_are_stored_concurrently(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start()

    async def submit_two() -> set[str]:
        with locked_database(tmp_path):
            calls = [
                asyncio.create_task(
                    server.send("POST", "/predictions/m", b"x", {**ASYNC, "idempotency-key": key})
                )
                for key in "ab"
            ]
            while len(server.service._adding) < 2:
                await asyncio.sleep(0.002)
        return {(await call)["location"] or "" for call in calls}

    assert len(server.loop.run_until_complete(asyncio.wait_for(submit_two(), 60))) == 2


@pytest.mark.slow
def test_a_request_whose_client_has_left_is_stored_once(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start()

    def submit(body: bytes) -> asyncio.Task[Any]:
        headers = {**ASYNC, "idempotency-key": "k"}
        return asyncio.create_task(server.send("POST", "/predictions/m", body, headers))

    async def submit_again() -> list[Any]:
        with locked_database(tmp_path):
            first = submit(b"x")
            while not server.service._adding:
                await asyncio.sleep(0.002)
            first.cancel()
            await asyncio.wait({first})
            others = [submit(body) for body in (b"x", b"x", b"y")]
        responses = [await other for other in others]
        while server.service._adding:
            await asyncio.sleep(0.002)
        return responses

    second, third, other = server.loop.run_until_complete(asyncio.wait_for(submit_again(), 60))
    assert second["location"] == third["location"] and other.status == 422
    assert [one["self"] for one in server("GET", "/async").json["predictions"]] == [second["location"]]


def test_key_is_free_after_its_prediction_is_deleted(start: Callable[..., Server]) -> None:
    server = start()
    first = server.submit(idempotency_key="k")
    server.wait_for_state(first, "done")
    assert server("DELETE", first).status == 204
    assert server.submit(body=b"other", idempotency_key="k") != first


# Restarts, limits, authorization


def test_accepted_predictions_run_after_a_restart(start: Callable[..., Server]) -> None:
    async def hang(request: InferenceRequest) -> InferenceResponse:
        await asyncio.Event().wait()
        raise AssertionError

    before = start(hang, async_predictions={"model_concurrency": 1, "inline_max_bytes": 200})
    running = before.submit(body=b"1", idempotency_key="k")
    waiting, large = before.submit(body=b"2"), before.submit(body=b"3" * 500)
    before.wait_for_state(running, "running")
    before.stop()
    after = start(async_predictions={"inline_max_bytes": 200})
    assert [after.result(location).body for location in (running, waiting, large)] == [b"1", b"2", b"3" * 500]
    assert after.submit(body=b"1", idempotency_key="k") == running
    after.stop()
    last = start()
    assert [last.result(location).body for location in (running, waiting, large)] == [b"1", b"2", b"3" * 500]
    assert last.requests == []


def test_large_bodies_are_files_and_are_deleted_with_their_prediction(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    go = asyncio.Event()

    async def wait_for_go(request: InferenceRequest) -> InferenceResponse:
        await go.wait()
        return await echo(request)

    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "mine.txt").write_text("left alone")
    cancelled, young = (folder / f"{letter * 32}.answer" for letter in "ab")
    cancelled.write_text("of a crash")
    os.utime(cancelled, (0, 0))
    young.write_text("that is just being stored")
    server = start(wait_for_go, async_predictions={"inline_max_bytes": 1000, "results": f"file://{folder}"})

    async def is_swept() -> bool:
        return {file.name for file in folder.iterdir()} == {"mine.txt", young.name}

    server.wait_until(is_swept)
    young.unlink()
    location = server.submit(body=b"x" * 5000)
    id = location.rpartition("/")[2]
    assert {file.name for file in folder.iterdir()} == {"mine.txt", f"{id}.request"}
    go.set()
    assert server.result(location).body == b"x" * 5000
    assert {file.name for file in folder.iterdir()} == {"mine.txt", f"{id}.answer"}
    assert server("DELETE", location).status == 204
    assert {file.name for file in folder.iterdir()} == {"mine.txt"}


def test_prediction_is_retried_until_the_maximum_queue_time(start: Callable[..., Server]) -> None:
    is_full = [True]

    async def fail_once(request: InferenceRequest) -> InferenceResponse:
        if is_full[0]:
            is_full[0] = False
            error = QueueFull("m", None, "its queue is full")
            error.retry_after = 1
            raise error
        return await echo(request)

    server = start(fail_once)
    assert server.result(server.submit()).body == b"x"
    assert len(server.requests) == 2
    is_full[0] = True
    impatient = start(fail_once, async_predictions={"max_queue_time_s": 0})
    location = impatient.submit(body=b"y")
    assert impatient.result(location).status == 503


def test_deadline_counts_from_the_request(start: Callable[..., Server]) -> None:
    server = start()
    before = time.time()
    server.result(server.submit(x_request_timeout_seconds="50"))
    assert before + 49 < server.requests[0].deadline < time.time() + 50


def test_keys_access_predictions_of_their_models_only(start: Callable[..., Server]) -> None:
    def key(word: str, *models: str, right: Any = "infer") -> tuple[bytes, KeyGrant]:
        return hashlib.sha256(word.encode()).digest(), KeyGrant(frozenset({right}), models, name=word)

    keys = dict([key("of-m", "m"), key("of-n", "n"), key("observer", "*", right="observe")])
    server = start(table=build_table("m", "n", access=AccessTable(keys)))
    of_m = {"authorization": "Bearer of-m"}
    assert (
        server("POST", "/predictions/n", b"x", {**ASYNC, **of_m})["x-torchrelay-reason"]
        == "model_not_allowed"
    )
    location = server("POST", "/predictions/m", b"x", {**ASYNC, **of_m})["location"]
    server.wait_for_state(location, "done")
    assert server("GET", f"{location}/result", headers=of_m).body == b"x"
    for method, path in (("GET", location), ("GET", f"{location}/result"), ("DELETE", location)):
        for word, status, reason in (
            ("of-n", 404, "prediction_not_found"),
            ("observer", 400, "missing_permission"),
            ("no", 400, "invalid_token"),
        ):
            response = server(method, path, headers={"authorization": f"Bearer {word}"})
            assert (response.status, response["x-torchrelay-reason"]) == (status, reason)
    assert "authorization" not in server.requests[0].headers
    stored = server.database
    with stored.transaction() as connection:
        rows = connection.exec_driver_sql("SELECT document, body FROM torchrelay_async_predictions").all()
    assert rows and "of-m" not in str(rows)

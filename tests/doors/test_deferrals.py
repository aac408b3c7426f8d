"""Asynchronous predictions, from the header that asks for one to the answer that is fetched."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deferred import ASYNC, Server, echo, lives, table

from serve_app.control.webhooks import Webhooks
from serve_app.errors import ConfigurationError, HandlerSaid, QueueFull
from serve_app.settings import load
from serve_app.types import Access, Call, Grant, Reply, ReplyStream

TENSORS = b'{"inputs": [{"name": "a", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}'


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    with lives(tmp_path) as begin:
        yield begin


# Accepted, looked at, fetched


def test_the_answer_that_is_fetched_is_the_models_own(start: Callable[..., Server]) -> None:
    server = start()
    at_once = server("POST", "/predictions/m/2.0?a=1", b"x")
    accepted = server("POST", "/predictions/m/2.0?a=1", b"x", {"Prefer": "wait=10, Respond-Async", "x-mine": "7"})
    assert (accepted.status, accepted["preference-applied"]) == (202, "respond-async")
    where = accepted["location"]
    assert accepted.json["self"] == where and accepted.json["model"] == "m" and accepted.json["version"] == "2.0"
    assert accepted.json["request_id"] == accepted["x-request-id"]
    answer = server.result(where)
    assert (answer.status, answer.body) == (at_once.status, at_once.body)
    same = {"content-type", "x-of-handler", "x-model-version", "pragma", "cache-control", "expires"}
    assert {one for one in answer.headers if one[0] in same} == {one for one in at_once.headers if one[0] in same}
    assert answer["x-torchrelay-state"] == "done"
    later = server.calls[1]
    assert (later.priority, later.headers["x-mine"], later.request_id) == ("low", "7", accepted["x-request-id"])
    assert "prefer" not in later.headers
    said = server("GET", where).json
    assert (said["state"], said["status"], said["result"]) == ("done", 200, f"{where}/result")
    assert said["created"] <= said["started"] <= said["ended"] < said["expires"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/explanations/m", b"x"),
        ("/v1/models/m:predict", b'{"instances": [1]}'),
        ("/models/m/invoke?a=1", b"x"),
        ("/m/predict", b"x"),
        ("/invocations?model_name=m", b"x"),
        ("/v2/models/m/versions/2.0/infer", TENSORS),
    ],
)
def test_every_route_that_names_its_model_can_wait(start: Callable[..., Server], path: str, body: bytes) -> None:
    server = start()
    at_once = server("POST", path, body)
    later = server.result(server.later(path, body))
    assert later.status == at_once.status == 200
    strip = ("id",)  # of the request, in the protocol's own answer
    if later["content-type"] == "application/json":
        assert {k: v for k, v in later.json.items() if k not in strip} == {
            k: v for k, v in at_once.json.items() if k not in strip
        }
    else:
        assert later.body == at_once.body
    assert server.calls[0].kind == server.calls[1].kind


def test_what_goes_wrong_is_kept_as_it_would_have_been_said(start: Callable[..., Server]) -> None:
    async def refuses(call: Call) -> Reply:
        raise HandlerSaid("not today", 418)

    server = start(refuses)
    at_once = server("POST", "/predictions/m", b"x")
    where = server.later()
    answer = server.result(where)
    assert (answer.status, answer.body, answer["x-torchrelay-state"]) == (418, at_once.body, "failed")
    assert server.until(where, "failed")["status"] == 418


def test_a_stream_is_kept_whole(start: Callable[..., Server]) -> None:
    async def streams(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            for word in (b"a ", b"b ", b"c"):
                yield word

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    server = start(streams)
    assert server.result(server.later()).body == b"a b c"


def test_while_it_runs_the_result_is_its_state(start: Callable[..., Server]) -> None:
    go = asyncio.Event()

    async def waits(call: Call) -> Reply:
        await go.wait()
        return Reply(b"at last", version="1.0")

    server = start(waits)
    where = server.later()
    server.until(where, "running")
    answer = server("GET", f"{where}/result")
    assert (answer.status, answer["retry-after"], answer.json["state"]) == (202, "1", "running")
    go.set()
    assert server.result(where).body == b"at last"


def test_what_would_be_refused_is_refused_now(start: Callable[..., Server]) -> None:
    server = start(inference={"max_request_size": 10})
    assert server("POST", "/predictions/nobody", b"x", ASYNC).status == 404
    assert server("POST", "/predictions/m/9.9", b"x", ASYNC).status == 404
    assert server("POST", "/predictions/m", b"x" * 11, ASYNC).status == 413
    assert server("POST", "/predictions/m", b"x", {**ASYNC, "x-request-priority": "urgent"}).status == 400
    assert server("POST", "/predictions/m", b"x", {**ASYNC, "idempotency-key": "k" * 256}).status == 400
    assert server.calls == []


def test_a_preference_that_is_another_or_switched_off_changes_nothing(start: Callable[..., Server]) -> None:
    server = start()
    for other in ("return=minimal", "respond-asynchronously", "x-respond-async"):
        assert server("POST", "/predictions/m", b"x", {"prefer": other}).status == 200
    off = start(asynchronous={"enabled": False})
    answer = off("POST", "/predictions/m", b"x", ASYNC)
    assert (answer.status, answer.body, answer["preference-applied"]) == (200, b"x", None)


# Cancelled, expired, removed


def test_one_that_runs_is_cancelled_in_the_middle(start: Callable[..., Server]) -> None:
    began, left = asyncio.Event(), asyncio.Event()

    async def hangs(call: Call) -> Reply:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()
        raise AssertionError

    server = start(hangs)
    where = server.later()
    server.loop.run_until_complete(asyncio.wait_for(began.wait(), 10))
    answer = server("DELETE", where)
    assert (answer.status, answer.json["state"]) == (200, "cancelled")
    assert left.is_set()
    assert server("GET", f"{where}/result").status == 410
    assert server("DELETE", where).status == 204
    assert server("GET", where).status == 404


def test_one_that_waits_is_cancelled_and_never_runs(start: Callable[..., Server]) -> None:
    go = asyncio.Event()

    async def waits(call: Call) -> Reply:
        await go.wait()
        return await echo(call)

    server = start(waits, asynchronous={"model_concurrency": 1})
    first, second, third = (server.later(body=body) for body in (b"1", b"2", b"3"))
    server.until(first, "running")
    assert server("GET", second).json["state"] == "queued"
    assert server("DELETE", second).json["state"] == "cancelled"
    go.set()
    assert (server.result(first).body, server.result(third).body) == (b"1", b"3")
    assert [call.inputs[0].value for call in server.calls] == [b"1", b"3"]


def test_an_answer_is_kept_for_a_time(start: Callable[..., Server]) -> None:
    server = start(asynchronous={"keep": 0.05})
    where = server.later()
    server.until(where, "done")

    async def swept() -> bool:
        return await server.owner._stored.load() == []

    server.wait(swept)
    for path in (where, f"{where}/result"):
        answer = server("GET", path)
        assert (answer.status, answer["x-torchrelay-reason"]) == (404, "prediction_not_found")
        assert "asynchronous.keep" in answer.json["message"]


def test_paths_that_are_none_of_ours(start: Callable[..., Server]) -> None:
    server = start()
    where = server.later()
    assert server("GET", f"/async/{'0' * 32}").status == 404
    assert server("GET", "/async/short").status == 404
    assert server("PUT", where).status == 405
    assert server("GET", f"{where}/other").status == 404


def test_the_document_of_the_api_has_its_routes(start: Callable[..., Server]) -> None:
    server = start()
    asked = [path for path in server("OPTIONS", "/").json["paths"] if path.startswith("/async/")]
    for path in asked:
        where = server.later()
        server.until(where, "done")
        assert server("GET", path.replace("/async/{prediction_id}", where)).status == 200
    assert len(asked) == 2


# The same request twice


def test_the_same_key_and_body_are_the_same_prediction(start: Callable[..., Server]) -> None:
    server = start(shown=table("m", "n"))
    first = server.later(idempotency_key="k")
    assert server.later(idempotency_key="k") == first
    server.until(first, "done")
    assert server.later(idempotency_key="k") == first
    other = server("POST", "/predictions/m", b"y", {**ASYNC, "idempotency-key": "k"})
    assert (other.status, other["x-torchrelay-reason"]) == (422, "idempotency_key_reused")
    assert server("POST", "/predictions/m/2.0", b"x", {**ASYNC, "idempotency-key": "k"}).status == 422
    assert server.later("/predictions/n", idempotency_key="k") != first
    assert server.later() != server.later()
    assert server("POST", "/v2/models/m/infer", TENSORS, {**ASYNC, "idempotency-key": "k"}).status == 422


def test_a_key_is_free_again_when_its_prediction_is_forgotten(start: Callable[..., Server]) -> None:
    server = start()
    first = server.later(idempotency_key="k")
    server.until(first, "done")
    assert server("DELETE", first).status == 204
    assert server.later(body=b"other", idempotency_key="k") != first


# What holds it together


def test_what_was_accepted_runs_after_a_restart(start: Callable[..., Server]) -> None:
    async def hangs(call: Call) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    before = start(hangs, asynchronous={"model_concurrency": 1, "inline": 200})
    running = before.later(body=b"1", idempotency_key="k")
    waiting, large = before.later(body=b"2"), before.later(body=b"3" * 500)
    before.until(running, "running")
    before.end()
    after = start(asynchronous={"inline": 200})
    assert [after.result(where).body for where in (running, waiting, large)] == [b"1", b"2", b"3" * 500]
    assert after.later(body=b"1", idempotency_key="k") == running
    after.end()
    last = start()
    assert [last.result(where).body for where in (running, waiting, large)] == [b"1", b"2", b"3" * 500]
    assert last.calls == []


def test_what_is_large_lies_in_the_folder_and_goes_with_its_prediction(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    go = asyncio.Event()

    async def waits(call: Call) -> Reply:
        await go.wait()
        return await echo(call)

    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "mine.txt").write_text("left alone")
    left, young = (folder / f"{letter * 32}.answer" for letter in "ab")
    left.write_text("of a crash")
    os.utime(left, (0, 0))
    young.write_text("that is just being stored")
    server = start(waits, asynchronous={"inline": 1000, "results": f"file://{folder}"})

    async def swept() -> bool:
        return {file.name for file in folder.iterdir()} == {"mine.txt", young.name}

    server.wait(swept)
    young.unlink()
    where = server.later(body=b"x" * 5000)
    id = where.rpartition("/")[2]
    assert {file.name for file in folder.iterdir()} == {"mine.txt", f"{id}.request"}
    go.set()
    assert server.result(where).body == b"x" * 5000
    assert {file.name for file in folder.iterdir()} == {"mine.txt", f"{id}.answer"}
    assert server("DELETE", where).status == 204
    assert {file.name for file in folder.iterdir()} == {"mine.txt"}


def test_it_waits_for_room_and_gives_up_in_the_end(start: Callable[..., Server]) -> None:
    full = [True]

    async def sometimes(call: Call) -> Reply:
        if full[0]:
            full[0] = False
            error = QueueFull("m", None, "its queue is full")
            error.retry_after = 1
            raise error
        return await echo(call)

    server = start(sometimes)
    assert server.result(server.later()).body == b"x"
    assert len(server.calls) == 2
    full[0] = True
    hasty = start(sometimes, asynchronous={"patience": 0})
    where = hasty.later(body=b"y")
    assert hasty.result(where).status == 503


def test_a_deadline_counts_from_the_request(start: Callable[..., Server]) -> None:
    server = start()
    before = time.time()
    server.result(server.later(x_request_timeout_seconds="50"))
    assert before + 49 < server.calls[0].deadline < time.time() + 50


def test_bounds_are_named_by_their_settings(start: Callable[..., Server]) -> None:
    server = start(asynchronous={"max_predictions": 1, "keep": 1000})
    server.later()
    answer = server("POST", "/predictions/m", b"x", ASYNC)
    assert (answer.status, answer["retry-after"]) == (503, "10")
    assert "asynchronous.max_predictions (1)" in answer.json["message"]


def test_bytes_are_bounded_too(start: Callable[..., Server]) -> None:
    server = start(asynchronous={"max_bytes": 1000, "max_result_size": 4})
    answer = server("POST", "/predictions/m", b"x" * 1001, ASYNC)
    assert answer.status == 503 and "asynchronous.max_bytes (1000)" in answer.json["message"]
    large = server.result(server.later(body=b"x" * 5))
    assert large.status == 503 and large["x-torchrelay-reason"] == "response_too_large"
    assert server.result(server.later(body=b"x" * 4)).body == b"x" * 4


def test_models_take_turns(start: Callable[..., Server]) -> None:
    at_once, most = [0, 0], [0, 0]

    async def counts(call: Call) -> Reply:
        i = ("m", "n").index(call.model)
        at_once[i] += 1
        most[i] = max(most[i], at_once[i])
        await asyncio.sleep(0.005)
        at_once[i] -= 1
        return await echo(call)

    server = start(counts, table("m", "n"), asynchronous={"model_concurrency": 2, "concurrency": 3})
    where = [server.later(f"/predictions/{model}") for model in "mmmmmmnnn"]
    for one in where:
        assert server.result(one).status == 200
    assert most[0] <= 2 and most[1] <= 2
    samples = {(name, labels): value for name, labels, value in server.meters.samples()}
    ended = (("model", "m"), ("state", "done"))
    assert samples["torchrelay_asynchronous_ended_total", ended] == 6
    assert samples["torchrelay_asynchronous", (("model", "m"), ("state", "running"))] == 0


def test_keys_reach_the_predictions_of_their_models_alone(start: Callable[..., Server]) -> None:
    def key(word: str, *models: str, right: Any = "infer") -> tuple[bytes, Grant]:
        return hashlib.sha256(word.encode()).digest(), Grant(frozenset({right}), models)

    keys = dict([key("of-m", "m"), key("of-n", "n"), key("looks", "*", right="observe")])
    server = start(shown=table("m", "n", access=Access(keys)))
    of_m = {"authorization": "Bearer of-m"}
    assert server("POST", "/predictions/n", b"x", {**ASYNC, **of_m})["x-torchrelay-reason"] == "wrong_model"
    where = server("POST", "/predictions/m", b"x", {**ASYNC, **of_m})["location"]
    server.until(where, "done")
    assert server("GET", f"{where}/result", headers=of_m).body == b"x"
    for method, path in (("GET", where), ("GET", f"{where}/result"), ("DELETE", where)):
        for word, reason in (("of-n", "wrong_model"), ("looks", "wrong_role"), ("no", "invalid_token")):
            answer = server(method, path, headers={"authorization": f"Bearer {word}"})
            assert (answer.status, answer["x-torchrelay-reason"]) == (400, reason)
    assert "authorization" not in server.calls[0].headers
    stored = server.database
    with stored.transaction() as connection:
        rows = connection.exec_driver_sql("SELECT document, parcel FROM torchrelay_deferrals").all()
    assert rows and "of-m" not in str(rows)


# Told of the end


class Hooked:
    """A server that is told, and refuses the first times."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.told: list[tuple[dict[str, str], bytes]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) if i else (":", line) for i, line in enumerate(head) if line)
        raw = {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in head[1:] if line}
        body = await reader.readexactly(int(headers["content-length"]))
        self.told.append((raw, body))
        status = b"500 no" if len(self.told) <= self.refusals else b"200 OK"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % status)
        await writer.drain()
        writer.close()


def test_a_webhook_is_told_until_it_listens_and_can_see_who_tells_it(start: Callable[..., Server]) -> None:
    loop_server: list[Any] = []
    hook = Hooked(refusals=2)
    environ = {"HOOK_SECRET": "s3cret"}
    allowed = {"webhook_secret": "env:HOOK_SECRET"}
    probe = start()

    async def listen() -> int:
        server = await asyncio.start_server(hook, "127.0.0.1", 0)
        loop_server.append(server)
        return server.sockets[0].getsockname()[1]

    port = probe.loop.run_until_complete(listen())
    url = f"http://127.0.0.1:{port}/ended"
    refused = probe("POST", "/predictions/m", b"x", {**ASYNC, "x-torchrelay-webhook": url})
    assert refused.status == 400 and "asynchronous.webhook_urls names none" in refused.json["message"]
    said = {**allowed, "webhook_urls": [f"http://127.0.0.1:{port}/*"], "webhook_pause": 0.01}
    server = start(environ=environ, asynchronous=said)
    other = server("POST", "/predictions/m", b"x", {**ASYNC, "x-torchrelay-webhook": "http://127.0.0.2/ended"})
    assert other.status == 400
    where = server.later(x_torchrelay_webhook=url)

    async def told() -> None:
        while server.owner._all[where.rpartition("/")[2]].told != "delivered":
            await asyncio.sleep(0.005)

    server.loop.run_until_complete(asyncio.wait_for(told(), 10))
    assert len(hook.told) == 3
    headers, body = hook.told[-1]
    assert json.loads(body)["state"] == "done" and json.loads(body)["result"] == f"{where}/result"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    digest = hmac.digest(b"s3cret", signed, hashlib.sha256)
    assert headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"
    assert server("GET", where).json["webhook"] == {"url": url, "state": "delivered"}

    async def close() -> None:
        loop_server[0].close()
        await loop_server[0].wait_closed()

    server.loop.run_until_complete(close())


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("https://a.example.com/hooks/1", True),
        ("https://a.example.com:443/hooks/1", True),
        ("https://example.com/hooks/1", False),
        ("http://a.example.com/hooks/1", False),
        ("https://a.example.com:8443/hooks/1", False),
        ("https://evil.test/.example.com/hooks/1", False),
        ("https://evil.test#.example.com/hooks/1", False),
        ("https://user@a.example.com/hooks/1", False),
        ("https://a.example.com/other", False),
        ("https://[", False),
        ("", False),
    ],
)
def test_a_star_in_a_host_ends_with_the_host(url: str, allowed: bool) -> None:
    said = load({"asynchronous": {"webhook_urls": ["https://*.example.com/hooks/*"], "webhook_secret": "env:S"}})
    hooks = Webhooks(said.asynchronous, {"S": "s"})
    if allowed:
        hooks.check(url)
    else:
        with pytest.raises(Exception, match="asynchronous.webhook_urls"):
            hooks.check(url)


@pytest.mark.parametrize("url", ["127.0.0.1", "ftp://a/*", "http://a:*/", "http://[", "http://u@a/*", "http://a/?x=1"])
def test_a_pattern_that_is_none_stops_the_start(url: str) -> None:
    said = load({"asynchronous": {"webhook_urls": [url], "webhook_secret": "env:S"}})
    with pytest.raises(ConfigurationError, match=r"asynchronous\.webhook_urls.*is no pattern"):
        Webhooks(said.asynchronous, {"S": "s"})


def test_webhooks_without_a_secret_stop_the_start() -> None:
    said = load({"asynchronous": {"webhook_urls": ["https://a.example.com/*"]}})
    with pytest.raises(Exception, match=r"asynchronous\.webhook_secret.*env:"):
        Webhooks(said.asynchronous, {})

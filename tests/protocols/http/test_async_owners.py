"""Owners of async predictions: each key sees its own ones, has its share of the store, and gets its turn."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.domain.access import ROLES, AccessTable, KeyGrant, Role
from serve_app.domain.request import InferenceRequest, InferenceResponse
from tests.support.async_server import ASYNC, Server, build_table, echo, locked_database
from tests.support.listeners import close_listener
from tests.support.protocol_fakes import send_request

pytestmark = pytest.mark.integration


def key(word: str, *models: str, role: Role = "infer", name: str = "") -> tuple[bytes, KeyGrant]:
    digest = hashlib.sha256(word.encode()).digest()
    return digest, KeyGrant(ROLES[role], models or ("*",), name=name or word)


def bearer(word: str) -> dict[str, str]:
    return {"authorization": f"Bearer {word}"}


ACCESS = AccessTable(
    dict(
        [
            key("a"),
            key("b"),
            key("b-renewed", name="b"),
            key("ops", role="manage"),
            key("ops-n", "n", role="manage"),
        ]
    )
)


def submit(server: Server, word: str, body: bytes = b"x", **headers: str) -> Any:
    extra = {name.replace("_", "-"): value for name, value in headers.items()}
    return server("POST", "/predictions/m", body, {**ASYNC, **bearer(word), **extra})


def test_a_prediction_does_not_exist_for_another_key(start: Callable[..., Server]) -> None:
    server = start(table=build_table("m", "n", access=ACCESS))
    location = submit(server, "a")["location"]
    server.wait_for_state(location, "done")
    unknown = "/async/" + "0" * 32
    for method, suffix in (("GET", ""), ("GET", "/result"), ("DELETE", "")):
        for word in ("b", "ops-n"):
            refused = server(method, location + suffix, headers=bearer(word))
            missing = server(method, unknown + suffix, headers=bearer(word))
            assert refused.status == missing.status == 404
            assert refused.body.replace(location[7:].encode(), b"") == missing.body.replace(b"0" * 32, b"")
    for word in ("a", "ops"):
        assert server("GET", f"{location}/result", headers=bearer(word)).body == b"x"
    assert server("DELETE", location, headers=bearer("ops")).status == 204
    assert server("GET", location, headers=bearer("a")).status == 404


def test_a_later_execution_has_the_cache_salt_of_its_key(start: Callable[..., Server]) -> None:
    received: list[str] = []

    async def record(request: InferenceRequest) -> InferenceResponse:
        received.append(request.headers["cache_salt"])
        return await echo(request)

    server = start(record, table=build_table(access=replace(ACCESS, isolates_prefix_cache=True)))
    server.wait_for_state(submit(server, "a", cache_salt="b")["location"], "done")
    assert received == ["a"]


def test_idempotency_keys_are_those_of_one_key(start: Callable[..., Server]) -> None:
    server = start(table=build_table(access=ACCESS))
    first = submit(server, "b", idempotency_key="k")["location"]
    assert submit(server, "a", idempotency_key="k")["location"] != first
    assert submit(server, "a", b"other", idempotency_key="k").status == 422
    assert submit(server, "b-renewed", idempotency_key="k")["location"] == first


def test_a_renewed_key_and_a_restart_keep_the_owner(start: Callable[..., Server]) -> None:
    before = start(table=build_table(access=ACCESS))
    location = submit(before, "b")["location"]
    before.wait_for_state(location, "done")
    server = start(table=build_table(access=ACCESS))
    assert server("GET", location, headers=bearer("b-renewed")).status == 200
    assert server("GET", location, headers=bearer("a")).status == 404


def test_predictions_without_an_owner_are_for_managers(start: Callable[..., Server]) -> None:
    before = start()
    location = before.submit()
    before.wait_for_state(location, "done")
    assert before("GET", location).status == 200
    server = start(table=build_table(access=ACCESS))
    assert server("GET", location, headers=bearer("ops")).status == 200
    assert server("GET", location, headers=bearer("a")).status == 404


def test_predictions_of_a_revoked_key_are_for_managers(start: Callable[..., Server]) -> None:
    gate = asyncio.Event()

    async def wait(request: InferenceRequest) -> InferenceResponse:
        await gate.wait()
        return await echo(request)

    server = start(wait, table=build_table(access=ACCESS), async_predictions={"concurrency": 1})
    locations = [submit(server, "a", idempotency_key=str(number))["location"] for number in range(3)]
    server.loop.run_until_complete(server.service.remove_owner("a"))
    assert server("DELETE", locations[2], headers=bearer("ops")).json["state"] == "cancelled"
    gate.set()
    server.wait_for_state(locations[1], "done")
    assert {server("GET", location, headers=bearer("a")).status for location in locations} == {404}
    assert submit(server, "a", idempotency_key="1")["location"] not in locations
    assert server("GET", f"{locations[1]}/result", headers=bearer("ops")).body == b"x"


def check_that_nothing_is_owned(server: Server, location: str, start: Callable[..., Server]) -> None:
    """Check that a later key of the name a sees nothing of the earlier one, now and after a restart."""
    for run in (server, start(table=build_table(access=ACCESS))):
        assert run("GET", f"{location}/result", headers=bearer("a")).status == 404
        assert run("GET", "/async", headers=bearer("a")).json == {"predictions": []}
        assert run("GET", f"{location}/result", headers=bearer("ops")).body == b"x"


def test_the_end_of_a_webhook_returns_nothing_to_a_revoked_key(start: Callable[..., Server]) -> None:
    received, answer = asyncio.Event(), asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        received.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await writer.drain()
        writer.close()

    run = start().loop.run_until_complete
    hooks = run(asyncio.start_server(receive, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{hooks.sockets[0].getsockname()[1]}/ended"
    settings = {"webhook_urls": [url], "webhook_secret": "env:S", "max_predictions": 4}
    server = start(table=build_table(access=ACCESS), environ={"S": "s"}, async_predictions=settings)
    location = submit(server, "a", x_torchrelay_webhook=url)["location"]
    run(asyncio.wait_for(received.wait(), 60))
    run(server.service.remove_owner("a"))
    answer.set()

    async def is_delivered() -> bool:
        document = await server.service.get_prediction(location.rpartition("/")[2], None)
        return document["webhook"]["state"] == "delivered"

    server.wait_until(is_delivered)
    check_that_nothing_is_owned(server, location, start)
    assert server("DELETE", location, headers=bearer("ops")).status == 204
    assert [submit(server, "a").status for _ in range(3)] == [202, 429, 429]  # its share is one of four
    run(close_listener(hooks))
    run(hooks.wait_closed())


def test_the_end_of_a_prediction_returns_nothing_to_a_revoked_key(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    async def wait(request: InferenceRequest) -> InferenceResponse:
        entered.set()
        await gate.wait()
        return await echo(request)

    server = start(wait, table=build_table(access=ACCESS))
    location = submit(server, "a")["location"]
    id = location.rpartition("/")[2]

    async def revoke_while_the_response_is_stored() -> None:
        await entered.wait()  # the request has been read from the database
        with locked_database(tmp_path):
            gate.set()
            while not server.service._running[id].done():
                await asyncio.sleep(0.002)
            revocation = asyncio.create_task(server.service.remove_owner("a"))
            while server.service._all[id].owner:
                await asyncio.sleep(0.002)
        await revocation

    server.loop.run_until_complete(asyncio.wait_for(revoke_while_the_response_is_stored(), 60))
    server.wait_for_state(location, "done")
    check_that_nothing_is_owned(server, location, start)


def test_a_prediction_stored_during_a_revocation_is_for_managers(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(table=build_table(access=ACCESS))

    async def revoke_while_the_request_is_stored() -> str:
        with locked_database(tmp_path):
            headers = {**ASYNC, **bearer("a")}
            submission = asyncio.create_task(server.send("POST", "/predictions/m", b"x", headers))
            while not server.service._adding:
                await asyncio.sleep(0.002)
            revocation = asyncio.create_task(server.service.remove_owner("a"))
            await asyncio.sleep(0)
        await revocation
        return str((await submission)["location"])

    location = server.loop.run_until_complete(asyncio.wait_for(revoke_while_the_request_is_stored(), 60))
    server.wait_for_state(location, "done")
    check_that_nothing_is_owned(server, location, start)


def test_a_key_that_is_revoked_while_a_body_arrives_submits_nothing(start: Callable[..., Server]) -> None:
    grants = dict([key("a"), key("ops", role="manage")])
    server = start(table=build_table(access=AccessTable(grants)))

    def revoke() -> bytes:
        del grants[hashlib.sha256(b"a").digest()]
        return b"y"

    headers = {**ASYNC, **bearer("a")}
    response = send_request(server.app, "POST", "/predictions/m", [b"x", revoke], headers, loop=server.loop)
    assert (response.status, response["x-torchrelay-reason"]) == (400, "invalid_token")
    assert server("GET", "/async", headers=bearer("ops")).json == {"predictions": []}


def test_one_key_cannot_fill_the_store(start: Callable[..., Server]) -> None:
    limits = {"max_predictions": 8, "max_bytes": 8000}
    server = start(table=build_table(access=ACCESS), async_predictions=limits)
    assert [submit(server, "a").status for _ in range(3)] == [202, 202, 429]
    refused = submit(server, "a")
    assert (refused["x-torchrelay-reason"], refused["retry-after"]) == ("key_share_exceeded", "10")
    assert submit(server, "b", b"x" * 2000).status == 202
    assert submit(server, "b", b"x").status == 429
    alone = AccessTable(dict([key("a")]))
    server = start(table=build_table(access=alone), async_predictions=limits)
    assert [submit(server, "a").status for _ in range(6)] == [202] * 5 + [503]


def test_deleting_a_prediction_returns_its_share(start: Callable[..., Server]) -> None:
    server = start(table=build_table(access=ACCESS), async_predictions={"max_predictions": 4})
    location = submit(server, "a")["location"]
    assert submit(server, "a").status == 429
    server.wait_for_state(location, "done")
    assert submit(server, "a").status == 429
    assert server("DELETE", location, headers=bearer("a")).status == 204
    assert submit(server, "a").status == 202


def test_a_backlog_of_one_key_does_not_starve_another(start: Callable[..., Server]) -> None:
    order: list[bytes] = []

    async def record(request: InferenceRequest) -> InferenceResponse:
        order.append(request.inputs[0].value)
        await asyncio.sleep(0.002)
        return await echo(request)

    server = start(record, table=build_table(access=ACCESS), async_predictions={"concurrency": 1})
    for _ in range(10):
        submit(server, "a", b"a")
    location = [submit(server, "b", b"b")["location"] for _ in range(3)][-1]
    started = len(order)
    server.wait_for_state(location, "done")
    end = len(order) - order[::-1].index(b"b")  # others may follow before the state is read
    assert order[started:end].count(b"a") <= 4

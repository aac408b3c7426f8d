"""Requests that are answered by callbacks: malformed messages, pipelines, disconnects, slow clients."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from serve_app.dataplane.running_request import RunningRequest
from serve_app.domain.access import AccessTable, KeyGrant, KeyLimits
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable
from serve_app.errors import BatchSizeMismatch
from serve_app.protocols.http.server import http_protocol
from serve_app.protocols.http.server.callback_app import CallbackRequest
from tests.support.callback_port import HEAD, ROUTE, Gate, Port, message, talk
from tests.support.wire_client import RecordingTransport, connect, mask, parse_response, wait_until


@pytest.fixture
def gate() -> Gate:
    return Gate()


def tasks_of(port: Port) -> int:
    return len(port.protocol.tasks)


def test_a_prediction_starts_no_task() -> None:
    async def conversation(port: Port) -> None:
        for count in (1, 2, 3):  # the second one finds the head that the first one has stored
            port.send(message(b"abc"))
            assert not tasks_of(port)
            assert (await port.answered(count))[-1].body == b"abc"

    port = talk(conversation)
    assert len(port.transport.writes) == 3  # a response is one write
    assert [(line[1], line[2], line[4], line[7], line[8]) for line in port.log.lines] == [
        ("POST", "/predictions/m", 200, "m", "1.0")
    ] * 3
    samples = {sample[0]: sample[2] for sample in port.meters.samples()}
    assert samples["torchrelay_requests_total"] == samples["torchrelay_http_responses_total"] == 3


@pytest.mark.parametrize("path", [b"/%70redictions/m", b"/predictions/%6d", b"/predictions/m?q=%20"])
def test_a_path_with_escapes(path: bytes) -> None:
    async def conversation(port: Port) -> None:
        for count in (1, 2):
            port.send(message(b"x").replace(b"/predictions/m", path, 1))
            assert (await port.answered(count))[-1].body == b"x"
        assert not tasks_of(port)

    lines = talk(conversation).log.lines
    assert {(line[2].partition("?")[0], line[7]) for line in lines} == {("/predictions/m", "m")}


def test_an_escaped_path_of_another_route_is_a_tasks() -> None:
    async def conversation(port: Port) -> None:
        port.send(message(b"x").replace(b"/predictions/m", b"/%76x/m", 1))
        assert tasks_of(port) == 1
        assert (await port.answered(1))[-1].status == 404

    talk(conversation)


def test_the_setting_switches_callbacks_off() -> None:
    async def conversation(port: Port) -> None:
        port.send(message())
        assert tasks_of(port) == 1
        await port.answered(1)

    assert talk(conversation, callbacks=False).app.callback_app is None


@pytest.mark.parametrize("parts", [1, 2, 7, 30])
def test_a_message_in_parts(parts: int) -> None:
    data = message(b"0123456789", b"x-more: " + b"y" * 50 + b"\r\n")

    async def conversation(port: Port) -> None:
        for count in (1, 2):
            for i in range(parts):
                port.send(data[i * len(data) // parts : (i + 1) * len(data) // parts])
            assert (await port.answered(count))[-1].body == b"0123456789"
        assert not tasks_of(port)

    talk(conversation)


def test_chunks_and_their_extensions() -> None:
    data = HEAD + b"transfer-encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n2\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"

    async def conversation(port: Port) -> None:
        for count in (1, 2):
            port.send(data)
            assert (await port.answered(count))[-1].body == b"abcde"

    talk(conversation)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"x-folded: a\r\n b\r\ncontent-length: 1\r\n\r\nx", 400),  # obs-fold, RFC 9112 section 5.2
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\nx", 400),
        (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"x-large: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        (HEAD + b"a: b\r\n" * 101 + b"\r\n", 431),
    ],
)
@pytest.mark.parametrize("before", [b"", message()])
def test_malformed_messages(data: bytes, status: int, before: bytes) -> None:
    async def conversation(port: Port) -> None:
        if before:
            port.send(before)
            await port.answered(1)
        start = len(port.transport.written)
        port.send(data)
        await wait_until(lambda: len(port.transport.written) > start)
        assert bytes(port.transport.written[start:]).startswith(b"HTTP/1.1 %d " % status)
        port.send(message())  # is not read any more
        await asyncio.sleep(0)
        port.protocol.connection_lost(None)

    assert len(talk(conversation).responses) >= 1


def test_a_thousand_pipelined_requests_are_answered_in_order() -> None:
    bodies = [b"%d" % i for i in range(1000)]

    async def conversation(port: Port) -> None:
        port.send(b"".join(map(message, bodies)))
        assert [response.body for response in await port.answered(1000)] == bodies

    talk(conversation)


def test_a_task_waits_for_the_callback_before_it_and_the_other_way_round(gate: Gate) -> None:
    other = b"GET /ping HTTP/1.1\r\nhost: localhost\r\n\r\n"

    async def conversation(port: Port) -> None:
        port.send(message(b"first") + other + message(b"second") + other)
        await asyncio.sleep(0.05)
        assert not port.transport.written
        gate.opened.set()
        await port.answered(4)

    bodies = [response.body for response in talk(conversation, gate).responses]
    assert (bodies[0], bodies[2]) == (b"first", b"second")
    assert b"Healthy" in bodies[1] and b"Healthy" in bodies[3]


def test_a_disconnect_withdraws_the_request(gate: Gate) -> None:
    async def conversation(port: Port) -> None:
        port.send(message(b"running"))
        other = connect(port.app, RecordingTransport())
        other.data_received(message(b"waiting"))
        await wait_until(lambda: gate.batches == 1 and port.batcher.pending == 1)
        other.connection_lost(None)
        assert port.batcher.pending == 0
        port.protocol.connection_lost(None)
        gate.opened.set()
        await wait_until(lambda: port.batcher.ongoing == 0)
        assert not port.transport.written

    port = talk(conversation, gate)
    assert gate.batches == 1
    assert [line[4] for line in port.log.lines] == [499, 499]
    statuses = {
        dict(labels)["status"]: value
        for name, labels, value in port.meters.samples()
        if name == "torchrelay_requests_total"
    }
    assert statuses == {"caller_left": 2}


def test_a_disconnect_during_a_batch_leaves_the_others(gate: Gate) -> None:
    async def conversation(port: Port) -> None:
        port.send(message(b"first"))
        await wait_until(lambda: gate.batches == 1)
        others = [(RecordingTransport(), b"%d" % i) for i in range(8)]
        protocols = [connect(port.app, transport) for transport, _ in others]
        for protocol, (_, body) in zip(protocols, others, strict=True):
            protocol.data_received(message(body))
        for protocol in protocols[::2]:
            protocol.connection_lost(ConnectionResetError())
        others[1][0].close()  # the batch's response is written to a closed transport
        gate.opened.set()
        await port.answered(1)
        await wait_until(lambda: all(transport.written for transport, _ in others[3::2]))
        for transport, body in others[3::2]:
            response = parse_response(bytes(transport.written), "POST")
            assert response is not None and response.body == body
        assert not any(transport.written for transport, _ in [*others[::2], others[1]])

    talk(conversation, gate, batch_size=8)


def test_an_unfinished_body_is_refused_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "BODY_TIMEOUT_S", 0.0)

    async def conversation(port: Port) -> None:
        port.send(HEAD + b"content-length: 10\r\n\r\nabc")
        now = asyncio.get_running_loop().time()
        for later in (0, 1, 2):
            port.protocol.check_progress(now + later)
        await wait_until(lambda: port.transport.written)
        assert port.transport.written.startswith(b"HTTP/1.1 408 ")
        port.protocol.connection_lost(None)

    assert [line[4] for line in talk(conversation).log.lines] == [499]


def test_an_idle_connection_is_closed_and_a_busy_one_is_not(gate: Gate) -> None:
    async def conversation(port: Port) -> None:
        now = asyncio.get_running_loop().time()
        port.send(message())
        for later in (0, 100, 200):
            port.protocol.check_progress(now + later)
        assert not port.transport.is_closed
        gate.opened.set()
        await port.answered(1)
        for later in (300, 301, 400):
            port.protocol.check_progress(now + later)
        assert port.transport.is_closed

    talk(conversation, gate)


def test_a_client_that_does_not_read_waits_in_a_task() -> None:
    async def conversation(port: Port) -> None:
        port.send(message())
        await port.answered(1)
        port.protocol.pause_writing()
        port.send(message(b"more"))
        assert tasks_of(port) == 1
        await asyncio.sleep(0.05)
        assert len(port.responses) == 1
        port.protocol.resume_writing()
        await port.answered(2)

    talk(conversation)


def test_a_stopping_server_answers_and_closes(gate: Gate) -> None:
    async def conversation(port: Port) -> None:
        port.send(message(b"last"))
        port.protocol.shutdown()
        assert not port.transport.is_closed
        gate.opened.set()
        [response] = await port.answered(1)
        assert (response["connection"], response.body) == ("close", b"last")
        assert port.transport.is_closed

    talk(conversation, gate)


@pytest.mark.parametrize("received", [0, 20, -3])  # bytes of the message that are here: none, or a part
@pytest.mark.parametrize("size", [8, 1 << 20])  # of the body: for a callback, and for a task
def test_a_stopping_server_receives_the_request_in_progress(received: int, size: int) -> None:
    body = b"x" * size

    async def conversation(port: Port) -> None:
        port.send(message())
        await port.answered(1)
        data = message(body)
        port.send(data[:received])
        port.protocol.shutdown()
        await asyncio.sleep(0.3 if received else 0)
        assert not port.transport.is_closed
        port.send(data[received:])
        response = (await port.answered(2))[1]
        assert (response["connection"], response.body) == ("close", body)
        assert port.transport.is_closed

    talk(conversation)


def test_a_stopping_server_closes_idle_connections() -> None:
    async def conversation(port: Port) -> None:
        port.send(message())
        await port.answered(1)
        port.protocol.shutdown()
        await wait_until(lambda: port.transport.is_closed)

    talk(conversation)


def test_a_large_body_is_parsed_in_a_task() -> None:
    body = b"x" * (1 << 20) + b"y"

    async def conversation(port: Port) -> None:
        data = message(body)
        for i in range(0, len(data), 1 << 16):
            port.send(data[i : i + (1 << 16)])
            await asyncio.sleep(0)
        assert (await port.answered(1))[0].body == body

    talk(conversation)


def test_a_stream_continues_in_a_task() -> None:
    def run(requests: list[InferenceRequest], emit: Any) -> list[Any]:
        emit(0, InferenceResponse(b"a", version="1.0"))
        emit(0, b"b")
        return [InferenceResponse(b"c", version="1.0")]

    async def conversation(port: Port) -> None:
        port.send(message() + message(b"behind it"))
        await wait_until(lambda: port.transport.written.count(b"0\r\n\r\n") == 2)
        assert port.transport.written.count(b"ts_stream_next: true") == 2
        assert port.transport.written.count(b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n") == 2

    port = talk(conversation, run)
    assert [line[4] for line in port.log.lines] == [200, 200]


def test_a_disconnect_ends_a_stream() -> None:
    left = threading.Event()

    def run(requests: list[InferenceRequest], emit: Any) -> list[Any]:
        emit(0, InferenceResponse(b"a", version="1.0"))
        assert left.wait(60)
        return [InferenceResponse(b"", version="1.0")]

    async def conversation(port: Port) -> None:
        port.send(message())
        await wait_until(lambda: port.transport.written.endswith(b"1\r\na\r\n"))
        port.protocol.connection_lost(None)
        await wait_until(lambda: not tasks_of(port))
        left.set()

    port = talk(conversation, run)
    labels = [
        dict(labels) for name, labels, _ in port.meters.samples() if name == "torchrelay_requests_total"
    ]
    assert [label["status"] for label in labels] == ["caller_left"]


def test_a_handler_that_returns_the_wrong_number_of_results() -> None:
    def run(requests: list[InferenceRequest], emit: Any) -> list[Any]:
        return [BatchSizeMismatch("the handler got 1 rows and returned 2 elements")] * len(requests)

    async def conversation(port: Port) -> None:
        for count in (1, 2):
            port.send(message())
            response = (await port.answered(count))[-1]
            assert (response.status, response["x-model-version"]) == (503, "1.0")

    talk(conversation, run)


def test_keys_and_limits_are_checked_for_each_request() -> None:
    limits = KeyLimits(requests_per_second=0.01, burst=4)  # of which a replica and a gateway have half
    grant = KeyGrant(frozenset(("infer",)), ("m",), None, name="k", limits=limits)
    access = AccessTable({sha256(b"good").digest(): grant})
    models = {"m": ModelRoute("1.0", {"1.0": ROUTE})}
    key = b"authorization: Bearer good\r\n"

    async def conversation(port: Port) -> None:
        for count in (1, 2, 3):
            port.send(message(headers=key))
            await port.answered(count)
        port.send(message(headers=b"authorization: Bearer other\r\n"))
        await port.answered(4)
        port.send(message())
        await port.answered(5)
        port.reader.update(replace(port.reader.table, access=AccessTable({})))  # the key is revoked
        port.send(message(headers=key))
        await port.answered(6)

    port = talk(conversation, table=RoutingTable(1, models, True, access))
    assert [(r.status, r["x-torchrelay-reason"]) for r in port.responses] == [
        (200, None),
        (200, None),
        (429, "rate_limited"),
        (400, "invalid_token"),
        (400, "missing_token"),
        (400, "invalid_token"),
    ]
    assert port.responses[2]["retry-after"]


def test_a_new_table_holds_for_the_next_request() -> None:
    async def conversation(port: Port) -> None:
        port.send(message())
        await port.answered(1)
        port.reader.update(RoutingTable(2, {}, True))
        port.send(message())
        assert (await port.answered(2))[1].status == 404
        stopped = ModelRoute("1.0", {"1.0": replace(ROUTE, phase="stopped")})
        port.reader.update(RoutingTable(3, {"m": stopped}, True))
        port.send(message())
        assert (await port.answered(3))[2].status == 503

    talk(conversation)


def test_deadlines_and_priorities(gate: Gate) -> None:
    async def conversation(port: Port) -> None:
        port.send(message())
        await wait_until(lambda: gate.batches == 1)
        late = RecordingTransport()
        protocol = connect(port.app, late)
        protocol.data_received(message(headers=b"x-request-timeout-seconds: 0.01\r\n"))
        await wait_until(lambda: late.written)
        assert late.written.startswith(b"HTTP/1.1 504 ")
        protocol.data_received(message(headers=b"x-request-priority: never\r\n"))
        await wait_until(lambda: late.written.count(b"HTTP/1.1") == 2)
        assert b"HTTP/1.1 400 " in late.written
        gate.opened.set()
        await port.answered(1)

    talk(conversation, gate)


def test_an_internal_error_is_answered_and_logged(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def conversation(port: Port) -> None:
        monkeypatch.setattr(port.meters, "request", lambda *args: 1 / 0)
        port.send(message())
        assert (await port.answered(1))[0].status == 500

    talk(conversation)
    assert "a fault of this server" in caplog.text and "ZeroDivisionError" in caplog.text


def test_heads_with_a_proxys_address_are_stored_apart() -> None:
    async def conversation(port: Port) -> None:
        for count, address in enumerate((b"192.0.2.1", b"192.0.2.2", b"192.0.2.1"), 1):
            port.send(message(headers=b"x-forwarded-for: %s\r\n" % address))
            await port.answered(count)

    port = talk(conversation)
    assert len({mask(write) for write in port.transport.writes}) == 1
    assert http_protocol._heads.find(message(headers=b"x-forwarded-for: 192.0.2.2\r\n")) is not None


def test_a_request_is_freed_without_garbage_collection() -> None:
    types = (RunningRequest, CallbackRequest, InferenceRequest, InferenceResponse)

    def count() -> int:
        return sum(type(thing) in types for thing in gc.get_objects())

    async def conversation(port: Port) -> None:
        gc.collect()
        before = count()
        gc.disable()
        try:
            for number in range(1, 21):
                port.send(message())
                await port.answered(number)
            await wait_until(lambda: count() <= before + 2)  # the handler thread may hold the last batch
        finally:
            gc.enable()

    talk(conversation)

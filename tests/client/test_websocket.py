"""WebSockets of both clients."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_helpers import ClientFactory, failing, stalled_stream
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from parts import Pulse

from serve_app import errors
from serve_app.client import AsyncClient, Client, ServerError
from serve_app.client import errors as client_errors
from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute


async def numbers(request: InferenceRequest) -> InferenceResponse | ResponseStream:
    """Stream ``count`` numbers, and fail after them if it is negative; echo other requests."""
    part = request.inputs[0]
    if part.content_type != "application/json":
        return InferenceResponse(part.value, version="2.0", arm="a")
    count = json.loads(part.value)["count"]

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(abs(count)):
            yield b"%d" % number
        if count < 0:
            raise errors.QueueFull("m", "1.0")

    return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())


def test_responses_follow_the_order_of_requests(make_client: ClientFactory, inference: Any) -> None:
    server = inference(numbers)
    headers = {"x-mine": "1"}
    with make_client(server).connect(
        "m", priority="low", timeout=30, headers=headers, sequence="s"
    ) as websocket:
        assert websocket.end is None
        for count in (3, 2, 0):
            websocket.send(json.dumps({"count": count}))
        first, second, third = list(websocket), list(websocket), list(websocket)
        assert (first, second, third) == ([b"0", b"1", b"2"], [b"0", b"1"], [])
        for body in (b"\xff", b"piece", "text", '{"end": {"chunks": 0}}'):
            websocket.send(body)
        assert [list(websocket) for _ in range(3)] == [[b"\xff"], [b"piece"], [b"text"]]
        assert (websocket.end.status, websocket.end.version, websocket.end.arm, websocket.end.chunks) == (
            200,
            "2.0",
            "a",
            1,
        )
        assert len(websocket.end.request_id) == 36
        with pytest.raises(ServerError):
            list(websocket)  # an object that has no count
        with pytest.raises(RuntimeError, match="No response is pending"):
            list(websocket)
    request = server.backend.requests[0]
    assert (request.priority, request.headers["x-mine"], request.headers["ts_request_sequence_id"]) == (
        "low",
        "1",
        "s",
    )
    assert 0 < request.deadline - time.time() <= 30


def test_version_and_content_type_hold_for_the_connection(make_client: ClientFactory, inference: Any) -> None:
    server = inference()
    with make_client(server).connect("m", "2.0", "application/x-own") as websocket:
        websocket.send("{}")
        assert list(websocket) == [b"{}"]
        assert websocket.end.version == "2.0"
    assert server.backend.requests[0].inputs[0].content_type == "application/x-own"


def test_unfinished_response_is_continued(make_client: ClientFactory, inference: Any) -> None:
    with make_client(inference(numbers)).connect("m") as websocket:
        websocket.send('{"count": 3}')
        for chunk in websocket:
            assert chunk == b"0"
            break
        assert list(websocket) == [b"1", b"2"]


def test_chunks_that_look_like_a_final_message(make_client: ClientFactory, inference: Any) -> None:
    messages = [
        b'{"end":{"status":200,"request_id":"x","version":"","chunks":7}}',
        b'{"end":1}',
        b'{"end":',
        b'{"end":{}}',
    ]

    async def misleading(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            for message in messages:
                yield message

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    with make_client(inference(misleading)).connect("m") as websocket:
        websocket.send("")
        assert list(websocket) == messages


def test_error_is_raised_after_the_chunks_before_it(make_client: ClientFactory, inference: Any) -> None:
    """The next response can be read after the error."""
    with make_client(inference(numbers)).connect("m") as websocket:
        websocket.send('{"count": -1}')
        websocket.send("next")
        chunks = iter(websocket)
        assert next(chunks) == b"0"
        with pytest.raises(client_errors.QueueFullError, match="no worker to serve") as error:
            next(chunks)
        assert (error.value.status, error.value.reason, error.value.retry_after) == (503, "queue_full", 1)
        assert len(error.value.request_id) == 36
        assert (websocket.end.status, websocket.end.chunks) == (503, 1)
        assert list(websocket) == [b"next"]


def test_error_status_of_a_handler_raises(make_client: ClientFactory, inference: Any) -> None:
    async def missing(request: InferenceRequest) -> InferenceResponse:
        return InferenceResponse(b"text", status=404, version="1.0")

    with make_client(inference(missing)).connect("m") as websocket:
        websocket.send("")
        chunks = iter(websocket)
        assert next(chunks) == b"text"
        with pytest.raises(client_errors.NotFoundError):
            next(chunks)


def test_refused_handshake_raises(make_client: ClientFactory, inference: Any) -> None:
    client = make_client(inference())
    with pytest.raises(client_errors.NotFoundError, match="nobody") as error, client.connect("nobody"):
        pass
    assert (error.value.status, error.value.reason) == (404, "model_not_found")
    with pytest.raises(client_errors.BadRequestError, match="priority"), client.connect("m", priority="now"):
        pass


def test_too_large_message_closes_the_connection(make_client: ClientFactory, inference: Any) -> None:
    server = inference(max_request_size=100)
    with make_client(server).connect("m") as websocket:
        websocket.send(b"x" * 100)
        assert list(websocket) == [b"x" * 100]
        websocket.send(b"x" * 101)
        with pytest.raises(client_errors.RequestTooLargeError, match=r"max_request_size \(100 bytes\)"):
            list(websocket)
        with pytest.raises(client_errors.RequestTooLargeError):
            websocket.send("")


def test_too_many_pending_requests_close_the_connection(make_client: ClientFactory, inference: Any) -> None:
    async def client(request: InferenceRequest) -> InferenceResponse:
        await asyncio.sleep(60)
        raise AssertionError("it was cancelled")

    with make_client(inference(client)).connect("m") as websocket:
        deadline = time.monotonic() + 60
        with pytest.raises(client_errors.BadRequestError, match="More than 16 requests"):
            while time.monotonic() < deadline:  # until the server, another thread, has read them
                websocket.send("x")
        with pytest.raises(client_errors.BadRequestError, match="wait for their ends"):
            list(websocket)


def test_response_and_idle_timeouts(make_client: ClientFactory, inference: Any) -> None:
    """The server has a second more to report the timeout itself."""
    server = inference(stalled_stream)
    for idle_timeout, timeout, min_elapsed in ((1.0, None, 1.0), (60, 1.0, 2.0)):
        with make_client(server, timeout=idle_timeout).connect("m", timeout=timeout) as websocket:
            websocket.send("")
            chunks, started_at = iter(websocket), time.monotonic()
            assert next(chunks) == b"one"
            with pytest.raises(httpx.ReadTimeout):
                next(chunks)
            assert min_elapsed <= time.monotonic() - started_at < 50
    unlimited, limited = server.backend.requests
    assert (unlimited.deadline, limited.deadline is None) == (None, False)


def test_deadline_error_of_the_server_raises(make_client: ClientFactory, inference: Any) -> None:
    with make_client(inference(failing(errors.DeadlineExceeded("m", 1.0)))).connect(
        "m", timeout=9
    ) as websocket:
        websocket.send("")
        with pytest.raises(client_errors.DeadlineExceededError):
            list(websocket)


def test_closing_cancels_the_running_request(make_client: ClientFactory, inference: Any) -> None:
    cancelled = threading.Event()

    async def endless(request: InferenceRequest) -> ResponseStream:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 10_000
                    await asyncio.sleep(0)
            finally:
                cancelled.set()

        return ResponseStream(InferenceResponse(b"", version="1.0"), chunks())

    with Pulse() as pulse:
        started_at = time.monotonic()
        with make_client(inference(endless)).connect("m") as websocket:
            websocket.send("")
            assert next(iter(websocket)) == b"x" * 10_000
        assert cancelled.wait(60)
        assert time.monotonic() - started_at - pulse.stalled_seconds(started_at) < 5, (
            "what was not read keeps nobody"
        )


def test_expired_key_is_renewed_before_the_handshake(
    make_client: ClientFactory, inference: Any, management: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "key_file.json"

    def write(key: str) -> None:
        keys.write_text(json.dumps({"inference": {"key": key}, "API": {"key": "api"}}))

    async def renew_key(kind: str) -> None:
        write("new")

    grants = {
        "old": KeyGrant(frozenset({"infer"}), ("*",), time.time() - 1),
        "new": KeyGrant(frozenset({"infer"}), ("*",)),
        "api": KeyGrant(frozenset({"token"}), ("*",)),
    }
    access = AccessTable({sha256(key.encode()).digest(): grant for key, grant in grants.items()})
    table = RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 1)})}, access=access)
    server, control = inference(table=table), management(access=access)
    control.control_api.renew_key = renew_key
    write("old")
    with pytest.raises(client_errors.AuthenticationError), make_client(server, token="old").connect("m"):
        pass
    with make_client(server, control, key_file=keys).connect("m") as websocket:
        websocket.send("a")
        assert list(websocket) == [b"a"]
        server.reader.update(replace(table, generation=2, access=AccessTable({})))
        websocket.send("a")
        with pytest.raises(client_errors.AuthenticationError):
            list(websocket)


def test_tls_connection(inference: Any, over_http: Any, tmp_path: Path) -> None:
    private_key, key = ec.generate_private_key(ec.SECP256R1()), tmp_path / "private_key.key"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    certificate = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(private_key.public_key())
    )
    certificate = (
        certificate.serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + day)
    )
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = (
        certificate.add_extension(address, critical=False)
        .sign(private_key, hashes.SHA256())
        .public_bytes(Encoding.PEM)
    )
    key.write_bytes(pem + private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls_context = ssl.create_default_context(cadata=pem.decode())
    server = over_http(inference().app, ssl_certfile=str(key))

    async def send_async() -> list[bytes]:
        async with AsyncClient(server, verify=tls_context) as client, client.connect("m") as websocket:
            await websocket.send("a")
            return [chunk async for chunk in websocket]

    with Client(server, verify=tls_context) as client, client.connect("m") as websocket:
        websocket.send("a")
        assert list(websocket) == [b"a"] == asyncio.run(send_async())
    with (
        Client(server) as client,
        pytest.raises(httpx.ConnectError, match=r"(?i)certificate"),
        client.connect("m"),
    ):
        pass


def test_interrupted_response_raises(make_client: ClientFactory, over_http: Any) -> None:
    async def restarts(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.send", "text": "a part"})
        await send({"type": "websocket.close", "code": 1012, "reason": "restart"})

    client = make_client()
    getattr(client, "_client", client)._addresses["socket"] = over_http(restarts).replace("http", "ws")
    with client.connect("m") as websocket:
        websocket.send("a")
        chunks = iter(websocket)
        assert next(chunks) == b"a part"
        with pytest.raises(httpx.RemoteProtocolError, match=r"1012.*restart"):
            next(chunks)


def test_server_without_websockets(make_client: ClientFactory, inference: Any, over_http: Any) -> None:
    plain = over_http(inference().app, ws="none")
    client = make_client()
    getattr(client, "_client", client)._addresses["socket"] = plain.replace("http", "ws")
    with pytest.raises(httpx.RemoteProtocolError, match="is no WebSocket"), client.connect("m"):
        pass

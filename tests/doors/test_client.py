"""The client against the doors, both ways: each call, each refusal, and when a request is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from parts import Pulse

from serve_app import client, errors, tensors
from serve_app.client import NEVER, AsyncClient, Client, End, Retries, ServerError
from serve_app.client.errors import _BY_REASON
from serve_app.deferral import Answer
from serve_app.doors.oip.errors import Unsupported
from serve_app.doors.torchserve import forms
from serve_app.types import (
    Access,
    Call,
    Grant,
    Input,
    ModelRow,
    ModelSpec,
    Reply,
    ReplyStream,
    Table,
    VersionRow,
)


class Awaited:
    """An AsyncClient whose calls are waited for, and whose streams are read to their ends."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(self._made(args, named))

    @staticmethod
    async def _made(args: Any, named: Any) -> AsyncClient:
        return AsyncClient(*args, **named)

    def __enter__(self) -> Awaited:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            said = getattr(self._client, name)(*args, **named)
            if hasattr(said, "__aenter__"):
                return AwaitedSocket(said, self._loop.run_until_complete)
            return self._loop.run_until_complete(_collected(said) if hasattr(said, "__aiter__") else said)

        return call


class AwaitedSocket:
    """The connection of an AsyncClient, as that of a Client is."""

    def __init__(self, opening: Any, wait: Callable[[Any], Any]) -> None:
        self._opening = opening
        self._wait = wait

    def __enter__(self) -> AwaitedSocket:
        self._socket = self._wait(self._opening.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._wait(self._opening.__aexit__(*error))

    def __iter__(self) -> Iterator[bytes]:
        pieces = aiter(self._socket)
        while (piece := self._wait(anext(pieces, None))) is not None:
            yield piece

    def send(self, body: bytes | str) -> None:
        self._wait(self._socket.send(body))

    @property
    def end(self) -> End | None:
        return self._socket.end


async def _collected(pieces: AsyncIterator[Any]) -> list[Any]:
    return [piece async for piece in pieces]


Connect = Callable[..., Any]


@pytest.fixture(params=[Client, Awaited], ids=["blocking", "awaited"])
def connect(request: pytest.FixtureRequest, over_http: Any) -> Iterator[Connect]:
    """A client of these apps; both kinds by turns."""
    made = []

    def client_of(inference: Any = None, management: Any = None, **named: Any) -> Any:
        ports = {"inference": inference, "management": management}
        addresses = {name: over_http(port.app) for name, port in ports.items() if port is not None}
        made.append(request.param(**addresses, **named))
        return made[-1]

    yield client_of
    for one in made:
        one.__exit__(None, None, None)


def at_once(error: errors.RelayError) -> errors.RelayError:
    """The same refusal, which asks for no wait."""
    error.retry_after = None
    return error


def refusing(*failures: Exception, then: bytes = b"done") -> Any:
    left = list(failures)

    async def infer(call: Call) -> Reply:
        if left:
            raise left.pop(0)
        return Reply(then)

    return infer


def test_a_prediction_and_what_is_said_of_it(connect: Connect, inference: Any) -> None:
    server = inference()
    client = connect(server)
    assert client.predict("m", "héllo", "text/plain") == "héllo".encode()
    said = client.ask("m", b"x", version="2.0", priority="high", headers={"x-mine": "1"})
    assert (said.body, said.version, said.status) == (b"x", "2.0", 200)
    assert len(said.request_id) == 36
    [first, second] = server.target.calls
    assert (first.inputs[0].value, first.inputs[0].content_type) == ("héllo".encode(), "text/plain")
    assert (second.headers["x-mine"], second.priority, second.request_id) == ("1", "high", said.request_id)


def test_a_sequence_is_named_by_its_first_answer(connect: Connect, inference: Any) -> None:
    async def counted(call: Call) -> Reply:
        name = call.headers.get("ts_request_sequence_id", "s1")
        said = call.headers.get("ts_request_sequence_end", "false").encode()
        return Reply(said, headers=(("ts_request_sequence_id", name),))

    calls = connect(inference(counted))
    first = calls.ask("m", b"")
    last = calls.ask("m", b"", sequence=first.sequence, ends=True)
    assert (first.sequence, first.body, last.sequence, last.body) == ("s1", b"false", "s1", b"true")


def test_json_in_and_out(connect: Connect, inference: Any) -> None:
    client = connect(inference())
    assert client.predict_json("m", {"a": [1, None]}) == {"a": [1, None]}
    assert client.explain_json("m", [1]) == [1]
    assert client.explain("m", b"x") == b"x"


def test_several_named_parts(connect: Connect, inference: Any) -> None:
    """The same parts with each attempt, bytes that look like a boundary's among them."""
    server = inference(refusing(at_once(errors.QueueFull("m", "1.0"))))
    asks = connect(server, retries=quick())
    parts = {"question": "wörds", "data": b"\xff\r\n--", "ä b": ("k.jpg", b"jpeg", "image/jpeg")}
    assert asks.predict("m", parts, headers={"Content-Type": "text/plain"}) == b"done"
    asks.explain("m", parts)
    asks.ask("m", parts, version="2.0")
    list(asks.stream("m", parts))
    assert len(server.target.calls) == 5
    for call in server.target.calls:
        assert [(part.name, part.value, part.content_type) for part in call.inputs] == [
            ("question", "wörds".encode(), None),
            ("data", b"\xff\r\n--", "application/octet-stream"),
            ("ä b", b"jpeg", "image/jpeg"),
        ]


def test_a_form_is_no_json(connect: Connect, inference: Any) -> None:
    server = inference()
    asks = connect(server)
    assert asks.predict_json("m", {"a": "b"}) == {"a": "b"}
    with pytest.raises(ValueError, match="goes by predict_json"):
        asks.predict("m", {})
    with pytest.raises(ValueError, match="send JSON by predict_json"):
        asks.predict("m", {"a": "b"}, "application/json")
    assert len(server.target.calls) == 1


def test_names_need_no_quoting(connect: Connect, inference: Any) -> None:
    with pytest.raises(client.NotFound, match="Model not found: a b"):
        connect(inference()).predict("a b", b"")


def test_a_stream_comes_in_pieces(connect: Connect, inference: Any) -> None:
    async def count(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            for number in range(3):
                yield b"%d" % number
                await asyncio.sleep(0.01)

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    assert list(connect(inference(count)).stream("m", b"")) == [b"0", b"1", b"2"]


def test_a_stream_that_breaks_off_is_no_answer(connect: Connect, inference: Any) -> None:
    async def breaks(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"one"
            raise errors.WorkerDied("killed")

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    with pytest.raises(httpx.RemoteProtocolError):
        list(connect(inference(breaks)).stream("m", b""))


def test_a_refused_stream_is_an_error(connect: Connect, inference: Any) -> None:
    with pytest.raises(client.NotFound):
        list(connect(inference()).stream("nobody", b""))


@pytest.mark.parametrize("binary", [True, False])
def test_tensors(connect: Connect, inference: Any, binary: bool) -> None:
    async def backwards(call: Call) -> Reply:
        [given] = [tensors.received(i.name, i.value, i.content_type or "") for i in call.inputs if i.name == "x"]
        return Reply(tensors.pack([tensors.of("y", given.array()[::-1]), tensors.of("t", ["a"])]), tensors.PACKED)

    said = connect(inference(backwards)).infer("m", {"x": np.array([1.5, 2], np.float32)}, binary=binary)
    assert said["y"].dtype == np.float32
    np.testing.assert_array_equal(said["y"], [2, 1.5])
    assert said["t"].tolist() == [b"a"]


def test_what_the_open_inference_protocol_tells(connect: Connect, inference: Any) -> None:
    client = connect(inference())
    assert client.model_ready("m", "2.0") is True
    assert client.metadata("m")["versions"] == ["1.0", "2.0"]
    assert [row["version"] for row in client.repository()] == ["1.0", "2.0"]
    assert client.config("m")["backend"] == "torchrelay"


async def openai(call: Call) -> Reply | ReplyStream:
    """Answers what it was asked, as OpenAI's API has it."""
    body = json.loads(call.inputs[0].value) if call.inputs[0].content_type == "application/json" else {}
    if call.headers["url_path"].endswith("embeddings"):
        return Reply(b"[0.5, 1.0]", version="1.0")
    if not body.get("stream"):
        return Reply(json.dumps({"choices": [{"text": call.headers["url_path"]}]}).encode(), version="1.0")

    async def pieces() -> AsyncIterator[bytes]:
        for word in ("a", "b"):
            yield b"data: %b\n\n" % json.dumps({"choices": [{"text": word}]}).encode()
        if body.get("fails"):
            raise errors.WorkerDied("killed")
        yield b"data: [DONE]\n\n"

    return ReplyStream(Reply(b"", version="1.0"), pieces())


def test_openai(connect: Connect, inference: Any) -> None:
    asks = connect(inference(openai))
    words = [{"choices": [{"text": word}]} for word in ("a", "b")]
    assert asks.served_models() == ["m", "m:1.0", "m:2.0"]
    assert asks.complete("m", "x")["choices"][0]["text"] == "v1/completions"
    assert asks.chat("m", [{"role": "user", "content": "x"}])["choices"][0]["text"] == "v1/chat/completions"
    assert list(asks.chat_stream("m", [])) == words
    assert list(asks.complete_stream("m", "x")) == words
    assert asks.embed("m", ["x", "y"]) == [[0.5, 1.0]] * 2
    with pytest.raises(client.ServerError, match="Worker died") as error:
        list(asks.complete_stream("m", "x", fails=True))
    assert error.value.reason == "worker_died"


def test_health(connect: Connect, inference: Any) -> None:
    well = connect(inference())
    assert well.live()
    assert well.ready()
    assert well.readiness() == {"ready": True, "loading": [], "failed": []}
    young = connect(inference(table=Table(1, {}, settled=False)))
    assert not young.ready()
    assert young.readiness()["ready"] is False


def test_management(connect: Connect, management: Any) -> None:
    server = management()
    for index in range(120):
        server.shelf.put(ModelSpec(f"m{index:03}", "1.0", "m.mar", "", ""))
    client = connect(None, server)
    assert len(client.models()) == 120, "all pages of them"
    assert "registered" in client.register("new.mar", initial_workers=1, synchronous=True)
    assert client.describe("new")[0]["modelVersion"] == "1.0"
    server.shelf.said = {"labels": 3}
    assert client.describe("new", customized=True)[0]["customizedMetadata"] == {"labels": 3}
    assert "customizedMetadata" not in client.describe("new")[0]
    with pytest.raises(ValueError, match="one version"):
        client.describe("new", "all", customized=True)
    assert client.scale("new", min_worker=2, synchronous=True) == "Workers scaled to 2 for model: new"
    client.register("new-2.0.mar", initial_workers=None)
    assert "2.0" in client.set_default("new", "2.0")
    assert "unregistered" in client.unregister("new", "1.0")
    client.set_traffic("new", {"versions": {"2.0": 10000}})
    client.begin_rollout("new", {"to": "3.0"})
    client.steer_rollout("new", "pause")
    client.forget_experiment("e1")
    questions = [asked[0] for asked in server.shelf.asked]
    assert questions[-4:] == ["set_traffic", "begin_rollout", "steer_rollout", "forget_experiment"]


def test_rewards_by_either_port(connect: Connect, inference: Any, management: Any) -> None:
    told = []

    class Counts:
        async def reward(self, id: str, *_: Any) -> dict[str, int]:
            told.append(id)
            return {"counted": 1, "repeated": 0}

    server = management()
    calls = connect(inference(keeper=Counts()), server)
    assert calls.reward("e1", {"key": "u", "value": 1}, port="inference") == {"counted": 1, "repeated": 0}
    calls.reward("e2", {"key": "u", "value": 1})
    assert told == ["e1"]
    assert [asked[:2] for asked in server.shelf.asked] == [("reward", "e2")]


def test_as_many_connections_as_are_allowed(connect: Connect, inference: Any) -> None:
    """The only one is taken by a stream, and whoever waits for one has so much patience."""
    calls = connect(inference(stuck), limits=httpx.Limits(max_connections=1))
    if isinstance(calls, Client):
        stream = calls.stream("m", b"")
        assert next(stream) == b"one"
        assert not calls.live()
        stream.close()
    else:
        stream, wait = calls._client.stream("m", b""), calls._loop.run_until_complete
        assert wait(anext(stream)) == b"one"
        assert not calls.live()
        wait(stream.aclose())
    assert calls.live()


def test_a_prediction_that_is_put_aside(connect: Connect, inference: Any) -> None:
    class Aside:
        """Keeps one request, and has no answer to it until it is asked twice."""

        def __init__(self) -> None:
            self.request: Any = None
            self.asked = 0

        async def defer(self, request: Any) -> dict[str, Any]:
            self.request = request
            return self._said("queued")

        async def deferral(self, id: str, within: tuple[str, ...]) -> dict[str, Any]:
            return self._said("running")

        async def deferred_answer(self, id: str, within: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
            self.asked += 1
            answer = Answer(200, (("x-model-version", "1.0"),), self.request.body)
            return (self._said("done"), answer) if self.asked > 1 else (self._said("queued"), None)

        async def cancel_deferral(self, id: str, within: tuple[str, ...]) -> None:
            raise errors.DeferralNotFound(id)

        def _said(self, state: str) -> dict[str, Any]:
            return {"id": "0" * 32, "state": state, "model": "m", "version": None, "self": f"/async/{'0' * 32}"}

    aside = Aside()
    calls = connect(inference(keeper=aside))
    id = calls.defer("m", b"later", key="k", webhook="http://127.0.0.1/told", headers={"x-mine": "1"})["id"]
    assert (aside.request.key, aside.request.webhook) == ("k", "http://127.0.0.1/told")
    assert ("x-mine", "1") in aside.request.headers
    calls.defer("m", {"data": ("k.jpg", b"jpeg", "image/jpeg")})
    kind = dict(aside.request.headers)["content-type"]
    assert forms.inputs(kind, aside.request.body) == (Input("data", b"jpeg", "image/jpeg"),)
    assert calls.deferral(id)["state"] == "running"
    assert calls.deferred(id) is None
    said = calls.deferred(id)
    assert (said.body, said.version) == (aside.request.body, "1.0")
    with pytest.raises(client.NotFound, match="asynchronous prediction"):
        calls.cancel(id)


# WebSockets


async def counted(call: Call) -> Reply | ReplyStream:
    """Streams as many numbers as it was asked for, and fails behind a negative number of them; else an echo."""
    given = call.inputs[0]
    if given.content_type != "application/json":
        return Reply(given.value, version="2.0", arm="a")
    count = json.loads(given.value)["count"]

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(abs(count)):
            yield b"%d" % number
        if count < 0:
            raise errors.QueueFull("m", "1.0")

    return ReplyStream(Reply(b"", version="1.0"), pieces())


def test_requests_and_the_pieces_of_their_answers(connect: Connect, inference: Any) -> None:
    server = inference(counted)
    headers = {"x-mine": "1"}
    with connect(server).connect("m", priority="low", timeout=30, headers=headers, sequence="s") as line:
        assert line.end is None
        for count in (3, 2, 0):
            line.send(json.dumps({"count": count}))
        first, second, third = list(line), list(line), list(line)
        assert (first, second, third) == ([b"0", b"1", b"2"], [b"0", b"1"], [])
        for body in (b"\xff", b"piece", "text", '{"end": {"pieces": 0}}'):
            line.send(body)
        assert [list(line) for _ in range(3)] == [[b"\xff"], [b"piece"], [b"text"]]
        assert (line.end.status, line.end.version, line.end.arm, line.end.pieces) == (200, "2.0", "a", 1)
        assert len(line.end.request_id) == 36
        with pytest.raises(ServerError):
            list(line)  # an object that has no count
        with pytest.raises(RuntimeError, match="Nothing was asked"):
            list(line)
    call = server.target.calls[0]
    assert (call.priority, call.headers["x-mine"], call.headers["ts_request_sequence_id"]) == ("low", "1", "s")
    assert 0 < call.deadline - time.time() <= 30


def test_a_version_and_a_content_type(connect: Connect, inference: Any) -> None:
    server = inference()
    with connect(server).connect("m", "2.0", "application/x-own") as line:
        line.send("{}")
        assert list(line) == [b"{}"]
        assert line.end.version == "2.0"
    assert server.target.calls[0].inputs[0].content_type == "application/x-own"


def test_an_answer_that_is_left_is_gone_on_with(connect: Connect, inference: Any) -> None:
    with connect(inference(counted)).connect("m") as line:
        line.send('{"count": 3}')
        for piece in line:
            assert piece == b"0"
            break
        assert list(line) == [b"1", b"2"]


def test_pieces_that_look_like_an_end(connect: Connect, inference: Any) -> None:
    looks = [
        b'{"end":{"status":200,"request_id":"x","version":"","pieces":7}}',
        b'{"end":1}',
        b'{"end":',
        b'{"end":{}}',
    ]

    async def misleads(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            for look in looks:
                yield look

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    with connect(inference(misleads)).connect("m") as line:
        line.send("")
        assert list(line) == looks


def test_an_answer_that_ends_in_an_error(connect: Connect, inference: Any) -> None:
    """It is raised behind the pieces that came before it, and the next answer is read as ever."""
    with connect(inference(counted)).connect("m") as line:
        line.send('{"count": -1}')
        line.send("next")
        pieces = iter(line)
        assert next(pieces) == b"0"
        with pytest.raises(client.QueueFull, match="no worker to serve") as error:
            next(pieces)
        assert (error.value.status, error.value.reason, error.value.retry_after) == (503, "queue_full", 1)
        assert len(error.value.request_id) == 36
        assert (line.end.status, line.end.pieces) == (503, 1)
        assert list(line) == [b"next"]


def test_an_answer_whose_status_is_an_errors(connect: Connect, inference: Any) -> None:
    async def missing(call: Call) -> Reply:
        return Reply(b"words", status=404, version="1.0")

    with connect(inference(missing)).connect("m") as line:
        line.send("")
        pieces = iter(line)
        assert next(pieces) == b"words"
        with pytest.raises(client.NotFound):
            next(pieces)


def test_a_handshake_that_is_refused(connect: Connect, inference: Any) -> None:
    calls = connect(inference())
    with pytest.raises(client.NotFound, match="nobody") as error, calls.connect("nobody"):
        pass
    assert (error.value.status, error.value.reason) == (404, "model_not_found")
    with pytest.raises(client.BadRequest, match="priority"), calls.connect("m", priority="now"):
        pass


def test_a_message_that_is_too_large(connect: Connect, inference: Any) -> None:
    server = inference(max_request_size=100)
    with connect(server).connect("m") as line:
        line.send(b"x" * 100)
        assert list(line) == [b"x" * 100]
        line.send(b"x" * 101)
        with pytest.raises(client.TooLarge, match=r"max_request_size \(100 bytes\)"):
            list(line)
        with pytest.raises(client.TooLarge):
            line.send("")


def test_too_many_messages(connect: Connect, inference: Any) -> None:
    async def waits(call: Call) -> Reply:
        await asyncio.sleep(60)
        raise AssertionError("it was cancelled")

    with connect(inference(waits)).connect("m") as line:
        within = time.monotonic() + 60
        with pytest.raises(client.BadRequest, match="More than 16 requests"):
            while time.monotonic() < within:  # until the server, another thread, has come to read them
                line.send("x")
        with pytest.raises(client.BadRequest, match="wait for their ends"):
            list(line)


async def stuck(call: Call) -> ReplyStream:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        await asyncio.sleep(60)

    return ReplyStream(Reply(b"", version="1.0"), pieces())


def test_the_time_of_each_answer_and_of_silence(connect: Connect, inference: Any) -> None:
    """A second more is left to the server for saying itself that an answer's time is over."""
    server = inference(stuck)
    for silence, within, least in ((1.0, None, 1.0), (60, 1.0, 2.0)):
        with connect(server, timeout=silence).connect("m", timeout=within) as line:
            line.send("")
            pieces, began = iter(line), time.monotonic()
            assert next(pieces) == b"one"
            with pytest.raises(httpx.ReadTimeout):
                next(pieces)
            assert least <= time.monotonic() - began < 50
    untold, told = server.target.calls
    assert (untold.deadline, told.deadline is None) == (None, False)


def test_a_deadline_that_the_server_tells(connect: Connect, inference: Any) -> None:
    with connect(inference(refusing(errors.DeadlineExceeded("m", 1.0)))).connect("m", timeout=9) as line:
        line.send("")
        with pytest.raises(client.DeadlineExceeded):
            list(line)


def test_leaving_cancels_what_is_under_way(connect: Connect, inference: Any) -> None:
    cancelled = threading.Event()

    async def endless(call: Call) -> ReplyStream:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 10_000
                    await asyncio.sleep(0)
            finally:
                cancelled.set()

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    with Pulse() as pulse:
        began = time.monotonic()
        with connect(inference(endless)).connect("m") as line:
            line.send("")
            assert next(iter(line)) == b"x" * 10_000
        assert cancelled.wait(60)
        assert time.monotonic() - began - pulse.stood(began) < 5, "what was not read keeps nobody"


def test_a_key_that_expired_is_renewed_before_the_handshake(
    connect: Connect, inference: Any, management: Any, tmp_path: Path
) -> None:
    keys = tmp_path / "key_file.json"

    def write(key: str) -> None:
        keys.write_text(json.dumps({"inference": {"key": key}, "API": {"key": "api"}}))

    async def renews(kind: str) -> None:
        write("new")

    grants = {
        "old": Grant(frozenset({"infer"}), ("*",), time.time() - 1),
        "new": Grant(frozenset({"infer"}), ("*",)),
        "api": Grant(frozenset({"token"}), ("*",)),
    }
    access = Access({sha256(key.encode()).digest(): grant for key, grant in grants.items()})
    table = Table(1, {"m": ModelRow("1.0", {"1.0": VersionRow("1.0", "ready", 1)})}, access=access)
    server, control = inference(table=table), management(access=access)
    control.shelf.renew_key = renews
    write("old")
    with pytest.raises(client.AccessDenied), connect(server, token="old").connect("m"):
        pass
    with connect(server, control, key_file=keys).connect("m") as line:
        line.send("a")
        assert list(line) == [b"a"]
        server.reader.put(replace(table, generation=2, access=Access({})))
        line.send("a")
        with pytest.raises(client.AccessDenied):
            list(line)


def test_a_secure_connection(inference: Any, over_http: Any, tmp_path: Path) -> None:
    own, key = ec.generate_private_key(ec.SECP256R1()), tmp_path / "own.key"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(own.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = made.add_extension(address, critical=False).sign(own, hashes.SHA256()).public_bytes(Encoding.PEM)
    key.write_bytes(pem + own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    trusting = ssl.create_default_context(cadata=pem.decode())
    server = over_http(inference().app, ssl_certfile=str(key))

    async def talk() -> list[bytes]:
        async with AsyncClient(server, verify=trusting) as calls, calls.connect("m") as line:
            await line.send("a")
            return [piece async for piece in line]

    with Client(server, verify=trusting) as calls, calls.connect("m") as line:
        line.send("a")
        assert list(line) == [b"a"] == asyncio.run(talk())
    with Client(server) as calls, pytest.raises(httpx.ConnectError, match="(?i)certificate"), calls.connect("m"):
        pass


def test_an_answer_that_breaks_off(connect: Connect, over_http: Any) -> None:
    async def restarts(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await receive()
        await send({"type": "websocket.send", "text": "a part"})
        await send({"type": "websocket.close", "code": 1012, "reason": "restart"})

    calls = connect()
    getattr(calls, "_client", calls)._addresses["socket"] = over_http(restarts).replace("http", "ws")
    with calls.connect("m") as line:
        line.send("a")
        pieces = iter(line)
        assert next(pieces) == b"a part"
        with pytest.raises(httpx.RemoteProtocolError, match="1012.*restart"):
            next(pieces)


def test_where_nobody_speaks_it(connect: Connect, inference: Any, over_http: Any) -> None:
    plain = over_http(inference().app, ws="none")
    calls = connect()
    getattr(calls, "_client", calls)._addresses["socket"] = plain.replace("http", "ws")
    with pytest.raises(httpx.RemoteProtocolError, match="is no WebSocket"), calls.connect("m"):
        pass


# Refusals


def test_an_error_has_everything_that_was_said(connect: Connect, inference: Any) -> None:
    calls = connect(inference(refusing(errors.QueueFull("m", "1.0"))), retries=NEVER)
    with pytest.raises(client.QueueFull) as caught:
        calls.predict("m", b"")
    error = caught.value
    assert (error.status, error.reason, error.retry_after) == (503, "queue_full", 1)
    assert len(error.request_id) == 36
    assert "no worker to serve" in error.message
    with pytest.raises(client.NotFound, match="nobody"):
        calls.infer("nobody", {"x": [1.0]})
    with pytest.raises(client.NotFound, match="nobody"):
        calls.chat("nobody", [])


def test_a_body_that_is_too_large(connect: Connect, inference: Any) -> None:
    with pytest.raises(client.TooLarge, match="max_request_size=10"):
        connect(inference(max_request_size=10)).predict("m", b"x" * 11)


def test_every_reason_has_its_class() -> None:
    """And a class is in the client's tree where it is in the server's, for those of one name."""

    def below(kind: type) -> Iterator[type]:
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    def plain(kind: type) -> bool:
        return isinstance(inspect.getattr_static(kind, "reason"), str)

    named = {
        "AccessDenied": client.AccessDenied,
        "BadRequest": client.BadRequest,
        "DeadlineExceeded": client.DeadlineExceeded,
        "Forbidden": client.Forbidden,
        "HandlerFailed": client.HandlerFailed,
        "NotFound": client.NotFound,
        "Unavailable": client.Unavailable,
        "WorkerDied": client.WorkerDied,
    }
    walked = set()
    for kind in (*below(errors.RelayError), Unsupported):
        if kind is errors.RelayError or not plain(kind) or not kind.__module__.startswith("serve_app"):
            continue
        walked.add(kind.reason)
        assert kind.reason in _BY_REASON, kind
        for ancestor in kind.__mro__:
            wanted = named.get(ancestor.__name__)
            if wanted is not None and kind.reason != "out_of_memory":  # of a start, or of a call
                assert issubclass(_BY_REASON[kind.reason], wanted), kind
                break
    assert walked == set(_BY_REASON), "no reason stands for what is gone"


# Sent again


def quick(**more: Any) -> Retries:
    return Retries(first=0.001, **more)


def test_a_refusal_is_asked_again_after_what_it_says(connect: Connect, inference: Any) -> None:
    server = inference(refusing(errors.QuotaExceeded("m", "1.0", 1)))
    began = time.monotonic()
    assert connect(server, retries=quick()).predict("m", b"") == b"done"
    assert len(server.target.calls) == 2
    assert time.monotonic() - began >= 1.0, "Retry-After: 1"


def test_it_is_asked_so_often_and_no_more(connect: Connect, inference: Any) -> None:
    server = inference(refusing(*[at_once(errors.Loading("m", None))] * 3))
    with pytest.raises(client.Loading):
        connect(server, retries=quick(most=2)).predict("m", b"")
    assert len(server.target.calls) == 2


@pytest.mark.parametrize(
    "failure",
    [
        errors.HandlerFailed("boom"),
        errors.WorkerDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_what_may_have_run_is_not_asked_again(connect: Connect, inference: Any, failure: Exception) -> None:
    server = inference(refusing(failure))
    with pytest.raises(ServerError):
        connect(server, retries=quick()).predict("m", b"")
    assert len(server.target.calls) == 1


def test_a_wait_that_is_too_long_is_not_begun(connect: Connect, inference: Any) -> None:
    server = inference(refusing(errors.NoWorker("m", None)))
    with pytest.raises(client.NoReplica) as error:
        connect(server).predict("m", b"")
    assert (error.value.retry_after, len(server.target.calls)) == (10, 1)
    server = inference(refusing(errors.QueueFull("m", None)))
    with pytest.raises(client.QueueFull):
        connect(server, retries=quick(longest=60.0)).predict("m", b"", timeout=0.9)
    assert len(server.target.calls) == 1


def test_the_server_is_told_how_long_its_caller_waits(connect: Connect, inference: Any) -> None:
    server = inference(refusing(errors.QueueFull("m", "1.0")))
    waits = connect(server, timeout=60, retries=quick())
    waits.predict("m", b"", timeout=30)
    waits.predict("m", b"")
    list(waits.stream("m", b""))
    now = time.time()
    first, second, whole, streamed = (call.deadline for call in server.target.calls)
    assert second == pytest.approx(first, abs=0.5), "the wait of a second is part of it"
    assert 0 < second - now < 30
    assert 30 < whole - now <= 60
    assert streamed is None


def test_a_port_that_nobody_listens_on_yet(connect: Connect, inference: Any) -> None:
    with socket.socket() as held:  # bound, so nobody takes it, and refusing
        held.bind(("127.0.0.1", 0))
        calls = connect(retries=quick(most=3))
        target = getattr(calls, "_client", calls)
        target._addresses["inference"] = f"http://127.0.0.1:{held.getsockname()[1]}"
        target._addresses["socket"] = f"ws://127.0.0.1:{held.getsockname()[1]}"
        with Pulse() as pulse:
            began = time.monotonic()
            with pytest.raises(httpx.ConnectError):
                calls.predict("m", b"")
            with pytest.raises(httpx.ConnectError), calls.connect("m"):
                pass
            assert time.monotonic() - began - pulse.stood(began) < 1
        assert not calls.live()


def test_what_broke_off_after_it_was_sent_is_not_sent_again(connect: Connect) -> None:
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as port:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the port is shut
                while True:
                    line, _ = port.accept()
                    with line:
                        asked.append(line.recv(10_000))

        thread = threading.Thread(target=hang_up)
        thread.start()
        calls = connect(retries=quick(most=3))
        getattr(calls, "_client", calls)._addresses["inference"] = f"http://127.0.0.1:{port.getsockname()[1]}"
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
            calls.predict("m", b"")
        port.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(asked) == 1, "it may have run"

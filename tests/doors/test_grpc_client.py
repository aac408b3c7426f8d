"""The client by gRPC against the gRPC doors, both ways: each call, each refusal, and when a call is sent again."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from parts import free_port

from serve_app import client, errors, tensors
from serve_app.client import NEVER, Client, Retries, ServerError
from serve_app.client.grpc import AsyncGrpcClient, GrpcClient
from serve_app.controlplane import ControlPlane
from serve_app.dataplane import DataPlane, TableReader
from serve_app.doors.grpc.app import inference_server
from serve_app.settings import load
from serve_app.telemetry.metrics import Meters
from serve_app.types import Access, Call, Grant, ModelSpec, Reply, ReplyStream, Table

DATATYPES = {
    "BOOL": np.array([True, False]),
    **{name: np.array([1, 2], name.lower()) for size in (8, 16, 32, 64) for name in (f"INT{size}", f"UINT{size}")},
    "FP16": np.array([1.5, -2], np.float16),
    "FP32": np.array([1.5, -2], np.float32),
    "FP64": np.array([1.5, -2], np.float64),
    "BYTES": np.array([b"\xff", b""], np.object_),
}


class Awaited:
    """An AsyncGrpcClient whose calls are waited for, and whose streams are read piece by piece."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncGrpcClient(*args, **named)

    def close(self) -> None:
        self._loop.run_until_complete(self._client.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            said = getattr(self._client, name)(*args, **named)
            return self._pieces(said) if hasattr(said, "__aiter__") else self._loop.run_until_complete(said)

        return call

    def _pieces(self, said: Any) -> Iterator[Any]:
        try:
            while True:
                try:
                    yield self._loop.run_until_complete(anext(said))
                except StopAsyncIteration:
                    return
        finally:
            self._loop.run_until_complete(said.aclose())


Connect = Callable[..., Any]


@pytest.fixture(params=[GrpcClient, Awaited], ids=["blocking", "awaited"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """A client of these ports; both kinds by turns."""
    made = []

    def client_of(inference: Any = None, management: Any = None, **named: Any) -> Any:
        ports = {"inference": inference, "management": management}
        at = {name: getattr(port, "address", port) for name, port in ports.items() if port is not None}
        made.append(request.param(**at, **named))
        return made[-1]

    yield client_of
    for one in made:
        one.close()


def at_once(error: errors.RelayError) -> errors.RelayError:
    """The same refusal, which asks for no wait."""
    error.retry_after = None
    return error


def quick(**more: Any) -> Retries:
    return Retries(first=0.001, **more)


def refusing(*failures: Exception, then: bytes = b"done") -> Any:
    left = list(failures)

    async def infer(call: Call) -> Reply:
        if left:
            raise left.pop(0)
        return Reply(then)

    return infer


def streams(*pieces: bytes, failure: Exception | None = None) -> Any:
    async def infer(call: Call) -> ReplyStream:
        async def chunks() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece
            if failure is not None:
                raise failure

        return ReplyStream(Reply(b"", version="1.0"), chunks())

    return infer


class Endless:
    """Streams pieces, the first of them at once, until its caller leaves."""

    def __init__(self, pause: float = 0.01) -> None:
        self.left = threading.Event()
        self._pause = pause

    async def __call__(self, call: Call) -> ReplyStream:
        async def chunks() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(self._pause)
            finally:
                self.left.set()

        return ReplyStream(Reply(b"", version="1.0"), chunks())


# Predictions


def test_a_prediction_and_what_is_said_of_it(connect: Connect, over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply:
        headers = (("kind", "cat"),)
        return Reply(call.inputs[0].value, "text/plain", 203, "Odd", headers, version="2.0", arm="t/a")

    server = over_grpc(infer)
    asks = connect(server)
    assert asks.predict("m", "héllo", "text/plain") == "héllo".encode()
    headers = {"X-Mine": "1", "Content-Type": "a/b"}
    said = asks.ask("m", b"x", version="2.0", priority="high", headers=headers, timeout=30)
    assert (said.body, said.status, said.version, said.arm) == (b"x", 203, "2.0", "t/a")
    assert (said.content_type, said.headers["kind"]) == ("text/plain", "cat")
    first, second = server.target.calls
    assert [(i.name, i.value, i.content_type) for i in first.inputs] == [("body", "héllo".encode(), "text/plain")]
    assert (second.version, second.headers["x-mine"], second.priority) == ("2.0", "1", "high")
    assert (second.request_id, second.inputs[0].content_type) == (said.request_id, "a/b")
    assert 0 < second.deadline - time.time() < 31, "gRPC rounds it"
    assert 31 < first.deadline - time.time() < 123, "the client's own"


def test_json_in_and_out(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc()
    assert connect(server).predict_json("m", {"a": [1, None]}) == {"a": [1, None]}
    assert server.target.calls[0].inputs[0].content_type == "application/json"


def test_several_named_parts(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc()
    asks = connect(server)
    asks.predict("m", {"question": "wörds", "data": b"\xff"})
    assert {i.name: i.value for i in server.target.calls[0].inputs} == {"question": "wörds".encode(), "data": b"\xff"}
    for body, kind, words in (
        ({}, "", "predict_json"),
        ({"a": "b"}, "application/json", "predict_json"),
        ({"a": ("k.jpg", b"", "image/jpeg")}, "", "over HTTP"),
    ):
        with pytest.raises(ValueError, match=words):
            asks.predict("m", body, kind)
    assert len(server.target.calls) == 1


def test_a_sequence_is_named_by_its_first_answer(connect: Connect, over_grpc: Any) -> None:
    async def counted(call: Call) -> Reply:
        name = call.headers.get("ts_request_sequence_id", "s1")
        said = call.headers.get("ts_request_sequence_end", "false").encode()
        return Reply(said, headers=(("ts_request_sequence_id", name),))

    calls = connect(over_grpc(counted))
    first = calls.ask("m", b"")
    last = calls.ask("m", b"", sequence=first.sequence, ends=True)
    assert (first.sequence, first.body, last.sequence, last.body) == ("s1", b"false", "s1", b"true")


def test_a_stream_comes_in_pieces(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc(streams(b"0", b"1", b"2"))
    asks = connect(server)
    assert list(asks.stream("m", b"", version="2.0")) == [b"0", b"1", b"2"]
    assert list(asks.stream("m", b"", timeout=30)) == [b"0", b"1", b"2"]
    untold, told = server.target.calls
    assert (untold.version, untold.deadline, told.deadline is None) == ("2.0", None, False)


def test_a_stream_that_breaks_off_is_no_answer(connect: Connect, over_grpc: Any) -> None:
    """And is not begun again, whatever its reason."""
    server = over_grpc(streams(b"one", failure=at_once(errors.QueueFull("m", "1.0"))))
    pieces = connect(server, retries=quick()).stream("m", b"")
    assert next(pieces) == b"one"
    with pytest.raises(client.QueueFull):
        next(pieces)
    assert len(server.target.calls) == 1


def test_who_leaves_a_stream_cancels_it(connect: Connect, over_grpc: Any) -> None:
    endless = Endless()
    asks = connect(over_grpc(endless))
    pieces = asks.stream("m", b"")
    assert next(pieces) == b"x"
    pieces.close()
    if isinstance(asks, Awaited):
        asks.live()  # its loop goes on
    assert endless.left.wait(60)


def test_a_stream_of_which_nothing_comes(connect: Connect, over_grpc: Any) -> None:
    """Its silence is measured while its reader waits, and not while it does something else."""
    endless = Endless(pause=60)
    asks = connect(over_grpc(endless), timeout=1.5)
    asks.ping()
    began = time.monotonic()
    pieces = asks.stream("m", b"")
    assert next(pieces) == b"x"
    with pytest.raises(client.DeadlineExceeded, match=r"Nothing came for 1\.5 seconds"):
        next(pieces)
    assert time.monotonic() - began >= 1.5
    assert endless.left.wait(60)
    slow = connect(over_grpc(streams(b"a", b"b")), timeout=2)
    pieces = slow.stream("m", b"")
    assert next(pieces) == b"a"
    time.sleep(2.5)
    assert list(pieces) == [b"b"]


# A stream of requests


def test_a_sequence_over_one_stream(connect: Connect, over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply:
        [word] = [part.value for part in call.inputs if not part.name.startswith("ts_")]
        if word == b"bad":
            raise errors.HandlerSaid("no such word", 422)
        return Reply(call.headers.get("ts_request_sequence_end", "").encode() + word, version="1.0")

    server = over_grpc(infer)
    asks = connect(server)
    bodies = [b"a", "bad", {"data": b"c", "ts_request_sequence_end": "true"}]
    first, second, third = asks.stream_sequence("m", bodies, version="2.0", sequence="s", headers={"x-mine": "1"})
    assert (first.body, first.sequence, first.error) == (b"a", "s", None)
    assert (third.body, third.error) == (b"truec", None)
    assert isinstance(second.error, client.HandlerFailed)
    assert (second.error.status, second.error.message, second.error.reason) == (422, "no such word", "handler_said")
    assert second.error.request_id == server.target.calls[1].request_id
    assert {(call.version, call.headers["x-mine"]) for call in server.target.calls} == {("2.0", "1")}
    [alone] = asks.stream_sequence("m", [b"x"])
    assert server.target.calls[-1].headers["ts_request_sequence_id"] == alone.sequence != ""


def test_each_request_goes_as_it_is_given(connect: Connect, over_grpc: Any) -> None:
    asks = connect(over_grpc())
    if isinstance(asks, Awaited):
        given: Any = asyncio.Queue()

        async def bodies() -> AsyncIterator[bytes]:
            while (body := await given.get()) is not None:
                yield body

        said = asks.stream_sequence("m", bodies())
        put = given.put_nowait
    else:
        given = queue.SimpleQueue()
        said, put = asks.stream_sequence("m", iter(given.get, None)), given.put
    for word in (b"a", b"b"):
        put(word)
        assert next(said).body == word
    put(None)
    assert list(said) == []


def test_what_fails_in_the_callers_own_requests_is_its_own(connect: Connect, over_grpc: Any) -> None:
    def bodies() -> Iterator[bytes]:
        yield b"a"
        raise KeyError("mine")

    said = connect(over_grpc()).stream_sequence("m", bodies())
    assert next(said).body == b"a"
    with pytest.raises(KeyError, match="mine"):
        next(said)


# Tensors


async def backwards(call: Call) -> Reply:
    """Each input from its end, under its name; and a text."""
    given = [tensors.received(i.name, i.value, i.content_type or "") for i in call.inputs]
    made = [t.name.endswith("parameters") or tensors.of(t.name, t.array()[::-1], t.datatype) for t in given]
    return Reply(tensors.pack([t for t in made if t is not True] + [tensors.of("t", ["a"])]), tensors.PACKED)


@pytest.mark.parametrize("binary", [True, False])
def test_every_datatype(connect: Connect, over_grpc: Any, binary: bool) -> None:
    inputs = {name: value for name, value in DATATYPES.items() if binary or name != "FP16"}
    asks = connect(over_grpc(backwards))
    said = asks.infer("m", inputs, binary=binary)
    assert said.pop("t").tolist() == [b"a"]
    for name, value in inputs.items():
        assert said[name].dtype == value.dtype, name
        np.testing.assert_array_equal(said[name], value[::-1])
    if binary:
        said = asks.infer("m", {"x": np.array([1.5, 2], np.float32)}, ["x"], datatypes={"x": "BF16"})
        assert {name: value.tolist() for name, value in said.items()} == {"x": [2, 1.5]}
    else:
        with pytest.raises(ValueError, match="FP16, which has no typed contents"):
            asks.infer("m", {"x": DATATYPES["FP16"]}, binary=False)
        with pytest.raises(ValueError, match="parameter p is list"):
            asks.infer("m", {"x": [1]}, parameters={"p": []})


def test_what_a_model_is_told_beside_tensors(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc(backwards)
    connect(server).infer("m", {"x": [1]}, version="2.0", headers={"X-Mine": "1"}, timeout=30, parameters={"p": True})
    [call] = server.target.calls
    assert (call.version, call.headers["x-mine"]) == ("2.0", "1")
    assert 0 < call.deadline - time.time() < 31


def test_many_inferences_over_one_stream(connect: Connect, over_grpc: Any) -> None:
    async def infer(call: Call) -> Reply | ReplyStream:
        count = int(tensors.received("x", call.inputs[0].value, call.inputs[0].content_type or "").array()[0])
        if count < 0:
            raise errors.QueueFull("m", "1.0")
        if not count:
            return Reply(tensors.pack([tensors.of("y", [0])]), tensors.PACKED)

        async def pieces() -> AsyncIterator[bytes]:
            for number in range(count):
                yield b"%d" % number

        return ReplyStream(Reply(b"", version="1.0"), pieces())

    said = list(connect(over_grpc(infer)).infer_stream("m", [{"x": [count]} for count in (0, -1, 2)]))
    assert [(one.request, one.final) for one in said] == [(0, True), (1, True), (2, False), (2, False), (2, True)]
    assert isinstance(said[1].error, client.QueueFull)
    assert (said[1].error.reason, said[1].error.retry_after, len(said[1].error.request_id)) == ("queue_full", 1, 36)
    assert [one.error for one in said if one is not said[1]] == [None] * 4
    assert said[0].arrays["y"].tolist() == [0]
    assert [one.arrays["output-0"].tolist() for one in said[2:4]] == [[b"0"], [b"1"]]
    assert said[4].arrays == {}


def test_it_tells_what_is_told_over_http(
    connect: Connect, over_grpc: Any, inference: Any, over_http: Any, managed_by_grpc: Any, management: Any
) -> None:
    """The same calls with the same answers, to the last key."""
    ports = managed_by_grpc(), management()
    for port in ports:
        for name in ("a", "b"):
            port.shelf.put(ModelSpec(name, "1.0", f"{name}.mar", "", ""))
        port.shelf.said = {"labels": 3}
    asks = connect(over_grpc(), ports[0])
    with Client(over_http(inference().app), over_http(ports[1].app)) as other:
        for question in (
            lambda calls: calls.metadata("m"),
            lambda calls: calls.metadata("m", "2.0"),
            lambda calls: calls.repository(),
            lambda calls: calls.repository(ready=True),
            lambda calls: calls.statistics(),
            lambda calls: calls.statistics("m"),
            lambda calls: calls.model_ready("m", "2.0"),
            lambda calls: {
                **calls.config("m"),
                **dict.fromkeys(("dynamic_batching", "instance_group", "version_policy")),
            },
            lambda calls: calls.live(),
            lambda calls: calls.ready(),
            lambda calls: calls.models(),
            lambda calls: calls.describe("a"),
            lambda calls: calls.describe("a", "1.0"),
            lambda calls: calls.describe("a", customized=True),
            lambda calls: calls.register("new.mar", initial_workers=1, synchronous=True, batch_size=None),
            lambda calls: calls.register("new-2.0.mar", batch_size=4),
            lambda calls: calls.scale("new", min_worker=2, synchronous=True),
            lambda calls: calls.set_default("new", "2.0"),
            lambda calls: calls.unregister("new", "1.0"),
        ):
            assert question(asks) == question(other)
    for grpcs, https in zip(*(port.shelf.asked for port in ports), strict=True):
        assert grpcs[0] == https[0]
        if grpcs[0] == "register":
            assert grpcs == https


# Management and health


def test_pages_of_models(connect: Connect, managed_by_grpc: Any) -> None:
    server = managed_by_grpc()
    for index in range(120):
        server.shelf.put(ModelSpec(f"m{index:03}", "1.0", "m.mar", "", ""))
    assert len(connect(None, server).models()) == 120


def test_what_management_refuses(connect: Connect, managed_by_grpc: Any) -> None:
    server = managed_by_grpc()
    asks = connect(None, server)
    asks.register("m-1.0.mar")
    with pytest.raises(client.Conflict, match=r"1\.0 is already registered") as error:
        asks.register("m-1.0.mar")
    assert error.value.status == 409
    for call in (lambda: asks.describe("x"), lambda: asks.unregister("x"), lambda: asks.set_default("m", "9")):
        with pytest.raises(client.NotFound):
            call()
    with pytest.raises(ValueError, match="no colour, only batch_size, handler"):
        asks.register("m-2.0.mar", colour="red")
    with pytest.raises(ValueError, match="one version"):
        asks.describe("m", "all", customized=True)


def test_the_model_repository(connect: Connect, over_grpc: Any, inference: Any) -> None:
    class Loads:
        def __init__(self) -> None:
            self.asked: list[tuple] = []

        def __getattr__(self, question: str) -> Any:
            async def answer(*args: Any) -> Any:
                self.asked.append((question, *args))
                raise errors.ModelNotFound("x")

            return answer

    asks = connect(over_grpc(keeper=Loads()))
    for call in (lambda: asks.load("x", url="x.mar", workers=1), lambda: asks.unload("x")):
        with pytest.raises(client.NotFound, match="x"):
            call()
    with pytest.raises(ValueError, match="parameter p is float"):
        asks.load("x", p=1.5)


def test_health(connect: Connect, over_grpc: Any, managed_by_grpc: Any) -> None:
    server = over_grpc(table=Table())
    asks = connect(server, managed_by_grpc())
    watched = asks.watch_health()
    assert (next(watched), asks.live(), asks.ready(), asks.health()) == ("NOT_SERVING", True, False, "NOT_SERVING")
    server.reader.put(Table(1, {}, settled=True, access=Access({})))  # probes show no key
    assert next(watched) == "SERVING"
    watched.close()
    service = "inference.GRPCInferenceService"
    assert (asks.ready(), asks.ping(), asks.health(service)) == (True, "Healthy", "SERVING")
    assert asks.health(port="management") == "SERVING"
    with pytest.raises(client.NotFound, match="nothing"):
        asks.health("nothing")


# Refusals


@pytest.mark.parametrize(
    "failure",
    [
        errors.QueueFull("m", "1.0"),
        errors.QuotaExceeded("m", "1.0", 1),
        errors.Loading("m", None),
        errors.NoWorker("m", None),
        errors.HandlerFailed("boom"),
        errors.WorkerDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.InvalidInput("the input is wrong"),
        errors.SequenceLost("m", "s", "idle"),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
        errors.HandlerSaid("teapot", 418),
        RuntimeError("secret"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_an_error_is_the_one_that_it_is_over_http(
    connect: Connect, over_grpc: Any, inference: Any, over_http: Any, failure: Exception
) -> None:
    async def fails(call: Call) -> Reply:
        raise failure

    told = []
    with Client(over_http(inference(fails).app), retries=NEVER) as other:
        asks = connect(over_grpc(fails), retries=NEVER)
        for call in (
            lambda: other.predict("m", b""),
            lambda: asks.predict("m", b""),
            lambda: asks.infer("m", {"x": [1]}),
        ):
            with pytest.raises(ServerError) as caught:
                call()
            told.append(caught.value)
    first, second, tensor = told
    assert type(first) is type(second) is type(tensor)
    assert first.reason == second.reason == tensor.reason
    assert first.retry_after == second.retry_after == tensor.retry_after
    assert first.version == second.version == tensor.version
    assert all(len(error.request_id) == 36 for error in told)
    assert isinstance(second.__cause__, grpc.RpcError)
    assert second.status == tensor.status
    if isinstance(failure, errors.RelayError):
        assert (first.message, first.detail) == (second.message, second.detail)
        assert isinstance(failure, (errors.HandlerFailed, errors.InvalidInput)) or first.status == second.status


def test_whom_a_caller_asks_for(connect: Connect, over_grpc: Any) -> None:
    asks = connect(over_grpc())
    for call in (
        lambda: asks.predict("nobody", b""),
        lambda: asks.infer("nobody", {"x": [1.0]}),
        lambda: list(asks.stream("nobody", b"")),
        lambda: asks.metadata("nobody"),
        lambda: asks.predict("m", b"", version="9.9"),
    ):
        with pytest.raises(client.NotFound, match=r"nobody|9\.9") as error:
            call()
        assert error.value.status == 404


def test_what_the_server_itself_refuses(connect: Connect, over_grpc: Any) -> None:
    asks = connect(over_grpc(inference={"max_request_size": 1000}))
    with pytest.raises(client.TooLarge, match=r"inference\.max_request_size, 1000 bytes") as error:
        asks.predict("m", b"x" * 2000)
    assert (error.value.status, error.value.reason) == (413, "too_large")
    large = connect(over_grpc(refusing(then=b"x" * 2000), runtime={"max_response_size": 1000}))
    with pytest.raises(client.HandlerFailed, match=r"runtime\.max_response_size") as error:
        large.predict("m", b"")
    assert (error.value.reason, len(error.value.request_id)) == ("response_too_large", 36)


def test_a_method_that_is_not_there(connect: Connect, managed_by_grpc: Any) -> None:
    """The inference API is asked at the management port."""
    with pytest.raises(ServerError, match="There is no method") as error:
        connect(managed_by_grpc()).predict("m", b"")
    assert error.value.status == 501


def test_an_answer_that_is_larger_than_the_client_takes(connect: Connect, over_grpc: Any) -> None:
    large = over_grpc(refusing(then=b"x" * 5_000_000))
    assert len(connect(large).predict("m", b"")) == 5_000_000, "gRPC's own default is 4 MiB"
    with pytest.raises(ServerError, match="larger than max"):
        connect(large, options={"grpc.max_receive_message_length": 1000}).predict("m", b"")


# Time


def test_the_deadline_is_the_calls(connect: Connect, over_grpc: Any) -> None:
    """The client waits no longer, and the server drops what it was doing."""
    ended = threading.Event()

    async def slow(call: Call) -> Reply:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Reply(b"")

    server = over_grpc(slow)
    asks = connect(server, retries=quick())
    asks.ping()
    began = time.monotonic()
    with pytest.raises(client.DeadlineExceeded) as error:
        asks.predict("m", b"", timeout=1.5)
    assert error.value.status == 504
    assert 1.5 <= time.monotonic() - began < 30
    assert ended.wait(60)
    assert len(server.target.calls) == 1
    with pytest.raises(client.DeadlineExceeded):
        connect(server, timeout=0.5).infer("m", {"x": [1]})
    with pytest.raises(client.DeadlineExceeded):
        list(asks.stream("m", b"", timeout=0.5))


def test_a_call_that_is_cancelled_frees_its_place(over_grpc: Any) -> None:
    began, ended = threading.Event(), threading.Event()

    async def slow(call: Call) -> Reply:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return Reply(b"")

    server = over_grpc(slow, grpc={"max_concurrent_calls": 1})

    async def leave() -> str:
        async with AsyncGrpcClient(server.address) as asks:
            call = asyncio.ensure_future(asks.predict("m", b""))
            while not began.is_set():
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while not ended.is_set():
                await asyncio.sleep(0.01)
            return await asks.ping()

    assert asyncio.run(asyncio.wait_for(leave(), 60)) == "Healthy"


# Sent again


def test_a_refusal_is_asked_again_after_what_it_says(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc(refusing(errors.QuotaExceeded("m", "1.0", 1)))
    began = time.monotonic()
    assert connect(server, retries=quick()).predict("m", b"") == b"done"
    assert len(server.target.calls) == 2
    assert time.monotonic() - began >= 1.0, "retry-after: 1"


def test_a_refused_stream_is_asked_again(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc(refusing(at_once(errors.QueueFull("m", "1.0"))))
    assert list(connect(server, retries=quick()).stream("m", b"")) == [b"done"]


def test_it_is_asked_so_often_and_no_more(connect: Connect, over_grpc: Any) -> None:
    server = over_grpc(refusing(*[at_once(errors.Loading("m", None))] * 3))
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
def test_what_may_have_run_is_not_asked_again(connect: Connect, over_grpc: Any, failure: Exception) -> None:
    server = over_grpc(refusing(failure))
    with pytest.raises(ServerError):
        connect(server, retries=quick()).predict("m", b"")
    assert len(server.target.calls) == 1


def test_a_wait_that_is_too_long_is_not_begun(connect: Connect, over_grpc: Any) -> None:
    with pytest.raises(client.NoReplica) as error:
        connect(over_grpc(refusing(errors.NoWorker("m", None)))).predict("m", b"")
    assert error.value.retry_after == 10
    refusal = errors.QueueFull("m", None)
    refusal.retry_after = 4
    with pytest.raises(client.QueueFull):
        connect(over_grpc(refusing(refusal))).predict("m", b"", timeout=3.9)


def test_the_waits_are_part_of_a_calls_time(connect: Connect, over_grpc: Any) -> None:
    refusal = errors.QueueFull("m", "1.0")
    refusal.retry_after = 2
    server = over_grpc(refusing(refusal))
    connect(server, retries=quick()).predict("m", b"", timeout=30)
    first, second = (call.deadline for call in server.target.calls)
    assert second == pytest.approx(first, abs=1), "gRPC rounds them"


def test_the_servers_own_limit_of_calls(connect: Connect, over_grpc: Any) -> None:
    """Nothing ran of what it refuses, so it is asked again."""
    endless = Endless()

    async def infer(call: Call) -> Reply | ReplyStream:
        return await endless(call) if call.inputs[0].value == b"stream" else Reply(b"done")

    server = over_grpc(infer, grpc={"max_concurrent_calls": 1})
    with GrpcClient(server.address) as other:
        pieces = other.stream("m", b"stream")
        assert next(pieces) == b"x"
        with pytest.raises(client.QuotaExceeded, match=r"grpc\.max_concurrent_calls") as error:
            connect(server, retries=NEVER).predict("m", b"")
        assert (error.value.status, error.value.retry_after) == (429, 1)
        threading.Timer(0.5, pieces.close).start()
        assert connect(server, retries=Retries(most=50)).predict("m", b"", timeout=60) == b"done"


def test_a_port_that_nobody_listens_on_yet(connect: Connect, grpc_listening: Any) -> None:
    port = free_port()
    asks = connect(f"127.0.0.1:{port}", retries=quick(most=3))
    for call in (lambda: asks.predict("m", b""), lambda: list(asks.stream("m", b""))):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not asks.live()


def test_a_server_that_comes_while_it_is_asked(connect: Connect) -> None:
    """A further attempt finds out anew whether somebody listens."""
    answers = GrpcEcho(free_port())
    asks = connect(f"127.0.0.1:{answers.port}", retries=Retries(most=200, first=0.05, longest=5))
    threading.Timer(0.7, answers.start).start()
    try:
        assert asks.predict("m", b"here", timeout=60) == b"here"
    finally:
        answers.stop()


class GrpcEcho:
    """gRPC's own server, which answers as ``Predictions`` does."""

    def __init__(self, port: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.port = port
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(lambda data, context: b"\x0a\x04here")
        service = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Predictions": method}),))

    def start(self) -> None:
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


def test_what_broke_off_after_it_was_sent_is_not_sent_again(connect: Connect) -> None:
    """The peer speaks as much HTTP/2 as to be sent a call."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as port:

        def hang_up() -> None:
            while True:
                try:
                    line, _ = port.accept()
                except OSError:
                    return
                with line:
                    line.sendall(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS
                    data = b""
                    while b"Predictions" not in data:
                        more = line.recv(10_000)
                        if not more:
                            break
                        data += more
                    else:
                        sent.append(data)

        thread = threading.Thread(target=hang_up)
        thread.start()
        asks = connect(f"127.0.0.1:{port.getsockname()[1]}", retries=quick(most=3))
        with pytest.raises(grpc.RpcError) as error:
            asks.predict("m", b"", timeout=60)
        port.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(sent) == 1, "it may have run"


# Keys and TLS


def access_of(**grants: Grant) -> Access:
    return Access({sha256(key.encode()).digest(): grant for key, grant in grants.items()})


def test_a_key(connect: Connect, over_grpc: Any, managed_by_grpc: Any) -> None:
    server = over_grpc()
    may = Grant(frozenset({"infer"}), ("m",))
    server.reader.put(Table(2, server.reader.table.models, True, access_of(good=may)))
    assert connect(server, token="good").predict("m", b"x") == b"x"
    for token, reason in (("", "missing_token"), ("bad", "invalid_token"), ("good", "wrong_model")):
        asks = connect(server, token=token)
        with pytest.raises(client.AccessDenied) as first:
            asks.predict("other", b"")
        with pytest.raises(client.AccessDenied) as second:
            asks.infer("other", {"x": [1]})
        assert [(error.value.reason, error.value.status) for error in (first, second)] == [(reason, 401)] * 2
        for _ in range(20):  # gRPC forgets the reason where the requests go out at the same moment
            with pytest.raises(client.AccessDenied):
                list(asks.stream("other", b"") if token == "good" else asks.stream_sequence("other", [b"x" * 1000]))
        assert asks.live()
    managed = managed_by_grpc(access_of(good=Grant(frozenset({"manage", "observe"}), ("*",))))
    assert connect(None, managed, token="good").models() == []
    with pytest.raises(client.AccessDenied):
        connect(None, managed).models()


def test_a_key_that_expired_is_renewed(
    connect: Connect, over_grpc: Any, management: Any, over_http: Any, tmp_path: Path
) -> None:
    """Over HTTP, as gRPC has no call for it; a stream of requests gets the new one with its next call."""
    keys = tmp_path / "key_file.json"
    renewed: list[str] = []

    def write(key: str) -> None:
        keys.write_text(json.dumps({"inference": {"key": key}, "API": {"key": "api"}}))

    async def renews(kind: str) -> None:
        renewed.append(kind)
        write("new")

    grants = {
        "old": Grant(frozenset({"infer"}), ("*",), time.time() - 1),
        "new": Grant(frozenset({"infer"}), ("*",)),
        "api": Grant(frozenset({"token"}), ("*",)),
    }
    access = access_of(**grants)
    server, control = over_grpc(), management(access=access)
    server.reader.put(replace(server.reader.table, generation=2, access=access))
    control.shelf.renew_key = renews
    asks = connect(server, key_file=keys, tokens=over_http(control.app))
    with pytest.raises(client.AccessDenied):
        asks.predict("m", b"")  # the file is not there yet
    write("old")
    assert asks.predict("m", b"x") == b"x"
    write("old")
    assert list(asks.stream("m", b"x")) == [b"x"]
    write("old")
    with pytest.raises(client.AccessDenied):
        list(asks.stream_sequence("m", [b"x"]))
    assert [piece.body for piece in asks.stream_sequence("m", [b"x"])] == [b"x"]
    assert renewed == ["inference"] * 3
    write("old")
    with pytest.raises(client.AccessDenied) as error:
        connect(server, key_file=keys, tokens="http://127.0.0.1:1").predict("m", b"")
    assert error.value.reason == "expired_token"


def test_a_secure_connection(connect: Connect, grpc_listening: Any, tmp_path: Path) -> None:
    own, key, roots = ec.generate_private_key(ec.SECP256R1()), tmp_path / "own.key", tmp_path / "roots.pem"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now, day = datetime.now(timezone.utc), timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(own.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - day).not_valid_after(now + day)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    pem = made.add_extension(address, critical=False).sign(own, hashes.SHA256()).public_bytes(Encoding.PEM)
    roots.write_bytes(pem)
    key.write_bytes(pem + own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(key)
    settings = load({})

    def server() -> Any:
        plane = DataPlane(TableReader(Table(1, {}, settled=True)), Meters(), lambda ref, row: None)
        return inference_server(plane, ControlPlane(None, settings, lambda: None), settings, Meters())

    with grpc_listening(server, tls) as where:
        assert connect(f"https://{where}", root_certificates=roots).ping() == "Healthy"
        with pytest.raises(grpc.RpcError, match="CERTIFICATE_VERIFY_FAILED"):
            connect(f"https://{where}", retries=NEVER).ping()
        assert not connect(f"http://{where}").live()


def test_what_is_no_address() -> None:
    for said in ("https://", "https://there/v1"):
        with pytest.raises(ValueError, match="https://HOST:PORT"):
            GrpcClient(said)


def test_who_speaks_http_alone_does_not_load_grpc() -> None:
    code = "import sys, serve_app.client; sys.exit('grpc' in sys.modules or 'google.protobuf' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0

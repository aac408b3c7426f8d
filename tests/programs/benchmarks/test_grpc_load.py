"""The generator of gRPC calls against real gRPC servers: what it counts is what was answered."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest

from serve_app.load_test import LoadProfile
from serve_app.proto.inference_pb2 import PredictionsRequest
from tests.benchmarks.grpc_load import PREDICTIONS, Call, prediction, run

pytestmark = pytest.mark.nightly


Answer = Callable[[bytes, Any], Any]
MESSAGE = prediction("m", body=b"x" * 300)


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Start a server whose one method is the function; return its address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers = []

    def run_(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    def started(answer: Answer) -> str:
        async def start() -> int:
            server = grpc.aio.server()
            service, _, method = PREDICTIONS[1:].partition("/")
            handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            servers.append(server)
            return port

        return f"127.0.0.1:{run_(start())}"

    yield started
    for server in servers:
        run_(server.stop(0))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_message_is_torchserves() -> None:
    request = PredictionsRequest.FromString(MESSAGE)
    assert (request.model_name, dict(request.input)) == ("m", {"body": b"x" * 300})


def test_every_good_answer_is_counted(serve: Callable[[Answer], str]) -> None:
    seen = []

    async def echo(data: bytes, context: Any) -> bytes:
        seen.append(data)
        return data

    began = time.perf_counter()
    result = run(
        Call(serve(echo), MESSAGE, b"xxx"), LoadProfile(connections=8, seconds=0.5, warmup=0.02, timeout=60.0)
    )
    assert result.errors == {}
    assert set(seen) == {MESSAGE}
    assert 0 < result.requests <= len(seen)
    assert 0 < result.p50 <= result.p99 <= result.max < time.perf_counter() - began
    assert abs(result.completed - result.requests) <= 8


def test_errors_are_no_answers(serve: Callable[[Answer], str]) -> None:
    async def refuse(data: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.INTERNAL, "no")

    result = run(
        Call(serve(refuse), MESSAGE), LoadProfile(connections=4, seconds=0.2, warmup=0.0, timeout=60.0)
    )
    assert (result.requests, result.completed) == (0, 0)
    assert set(result.errors) == {"refused"}


def test_another_answer_than_is_wanted(serve: Callable[[Answer], str]) -> None:
    async def other(data: bytes, context: Any) -> bytes:
        return b"other"

    result = run(
        Call(serve(other), MESSAGE, b"xxx"), LoadProfile(connections=1, seconds=0.2, warmup=0.0, timeout=60.0)
    )
    assert set(result.errors) == {"body"}


def test_what_is_never_answered(serve: Callable[[Answer], str]) -> None:
    async def sleep(data: bytes, context: Any) -> bytes:
        await asyncio.sleep(30)
        return b""

    load = LoadProfile(connections=3, seconds=0.1, warmup=0.0, timeout=0.2)
    assert run(Call(serve(sleep), MESSAGE), load).errors == {"unanswered": 3}


def test_windows_are_kept_to(serve: Callable[[Answer], str]) -> None:
    """More bytes than a connection may send before the server asks for more."""

    async def short(data: bytes, context: Any) -> bytes:
        return b"ok"

    load = LoadProfile(connections=32, seconds=0.3, warmup=0.0, timeout=60.0)
    result = run(Call(serve(short), prediction("m", body=b"x" * 15_000), b"ok"), load)
    assert result.errors == {}
    assert result.requests >= 32


def test_what_it_cannot_send() -> None:
    with pytest.raises(ValueError, match="16000 at most"):
        Call("127.0.0.1:1", b"x" * 20_000)
    with pytest.raises(ValueError, match="closed loop"):
        run(Call("127.0.0.1:1", b""), LoadProfile(rate=3.0))

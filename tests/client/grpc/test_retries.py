"""Timeouts of gRPC calls, and the rules by which they are retried."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import grpc
import pytest
from client_helpers import ClientFactory, EndlessStream, failing, quick_retries, without_retry_after
from parts import free_port

from serve_app import errors
from serve_app.client import NO_RETRIES, Retries, ServerError
from serve_app.client import errors as client_errors
from serve_app.client.grpc import AsyncGrpcClient, GrpcClient
from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream


def test_timeout_is_the_deadline_of_the_call(make_client: ClientFactory, over_grpc: Any) -> None:
    """The client stops waiting, and the server cancels the request."""
    ended = threading.Event()

    async def slow(request: InferenceRequest) -> InferenceResponse:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return InferenceResponse(b"")

    server = over_grpc(slow)
    client = make_client(server, retries=quick_retries())
    client.ping()
    started_at = time.monotonic()
    with pytest.raises(client_errors.DeadlineExceededError) as error:
        client.predict("m", b"", timeout=1.5)
    assert error.value.status == 504
    assert 1.5 <= time.monotonic() - started_at < 30
    assert ended.wait(60)
    assert len(server.backend.requests) == 1
    with pytest.raises(client_errors.DeadlineExceededError):
        make_client(server, timeout=0.5).infer("m", {"x": [1]})
    with pytest.raises(client_errors.DeadlineExceededError):
        list(client.stream("m", b"", timeout=0.5))


def test_cancelled_call_is_cancelled_on_the_server(over_grpc: Any) -> None:
    started_at, ended = threading.Event(), threading.Event()

    async def slow(request: InferenceRequest) -> InferenceResponse:
        started_at.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return InferenceResponse(b"")

    server = over_grpc(slow, grpc={"max_concurrent_calls": 1})

    async def cancel_call() -> str:
        async with AsyncGrpcClient(server.address) as client:
            call = asyncio.ensure_future(client.predict("m", b""))
            while not started_at.is_set():
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while not ended.is_set():
                await asyncio.sleep(0.01)
            return await client.ping()

    assert asyncio.run(asyncio.wait_for(cancel_call(), 60)) == "Healthy"


def test_refused_request_is_retried_after_retry_after(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc(failing(errors.QuotaExceeded("m", "1.0", 1)))
    started_at = time.monotonic()
    assert make_client(server, retries=quick_retries()).predict("m", b"") == b"done"
    assert len(server.backend.requests) == 2
    assert time.monotonic() - started_at >= 1.0, "retry-after: 1"


def test_refused_stream_is_retried(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc(failing(without_retry_after(errors.QueueFull("m", "1.0"))))
    assert list(make_client(server, retries=quick_retries()).stream("m", b"")) == [b"done"]


def test_number_of_attempts_is_limited(make_client: ClientFactory, over_grpc: Any) -> None:
    server = over_grpc(failing(*[without_retry_after(errors.ModelLoading("m", None))] * 3))
    with pytest.raises(client_errors.ModelLoadingError):
        make_client(server, retries=quick_retries(max_attempts=2)).predict("m", b"")
    assert len(server.backend.requests) == 2


@pytest.mark.parametrize(
    "failure",
    [
        errors.HandlerFailed("boom"),
        errors.ReplicaDied("killed"),
        errors.DeadlineExceeded("m", 1.0),
        errors.StepUnavailable("w", "first", "full", "queue_full", 0, ""),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_requests_that_may_have_run_are_not_retried(
    make_client: ClientFactory, over_grpc: Any, failure: Exception
) -> None:
    server = over_grpc(failing(failure))
    with pytest.raises(ServerError):
        make_client(server, retries=quick_retries()).predict("m", b"")
    assert len(server.backend.requests) == 1


def test_too_long_waits_raise_at_once(make_client: ClientFactory, over_grpc: Any) -> None:
    with pytest.raises(client_errors.NoReplicaError) as error:
        make_client(over_grpc(failing(errors.NoReplica("m", None)))).predict("m", b"")
    assert error.value.retry_after == 10
    refusal = errors.QueueFull("m", None)
    refusal.retry_after = 4
    with pytest.raises(client_errors.QueueFullError):
        make_client(over_grpc(failing(refusal))).predict("m", b"", timeout=3.9)


def test_waits_count_toward_the_timeout(make_client: ClientFactory, over_grpc: Any) -> None:
    refusal = errors.QueueFull("m", "1.0")
    refusal.retry_after = 2
    server = over_grpc(failing(refusal))
    make_client(server, retries=quick_retries()).predict("m", b"", timeout=30)
    first, second = (request.deadline for request in server.backend.requests)
    assert second == pytest.approx(first, abs=1), "gRPC rounds them"


def test_concurrency_limit_of_the_server_is_retried(make_client: ClientFactory, over_grpc: Any) -> None:
    """Nothing of a refused call has run, so it is retried."""
    endless = EndlessStream()

    async def infer(request: InferenceRequest) -> InferenceResponse | ResponseStream:
        return await endless(request) if request.inputs[0].value == b"stream" else InferenceResponse(b"done")

    server = over_grpc(infer, grpc={"max_concurrent_calls": 1})
    with GrpcClient(server.address) as other_client:
        chunks = other_client.stream("m", b"stream")
        assert next(chunks) == b"x"
        with pytest.raises(client_errors.QuotaExceededError, match=r"grpc\.max_concurrent_calls") as error:
            make_client(server, retries=NO_RETRIES).predict("m", b"")
        assert (error.value.status, error.value.retry_after) == (429, 1)
        threading.Timer(0.5, chunks.close).start()
        assert make_client(server, retries=Retries(max_attempts=50)).predict("m", b"", timeout=60) == b"done"


def test_refused_connections_are_retried(make_client: ClientFactory, grpc_listening: Any) -> None:
    port = free_port()
    client = make_client(f"127.0.0.1:{port}", retries=quick_retries(max_attempts=3))
    for call in (lambda: client.predict("m", b""), lambda: list(client.stream("m", b""))):
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not client.live()


def test_retries_reach_a_server_that_starts_late(make_client: ClientFactory) -> None:
    """Each attempt connects again."""
    server = GrpcEcho(free_port())
    client = make_client(
        f"127.0.0.1:{server.port}", retries=Retries(max_attempts=200, initial_delay=0.05, max_delay=5)
    )
    threading.Timer(0.7, server.start).start()
    try:
        assert client.predict("m", b"here", timeout=60) == b"here"
    finally:
        server.stop()


class GrpcEcho:
    """gRPC's own server with the method ``Predictions``."""

    def __init__(self, port: int) -> None:
        from concurrent.futures import ThreadPoolExecutor

        self.port = port
        self._server = grpc.server(ThreadPoolExecutor(1))
        method = grpc.unary_unary_rpc_method_handler(lambda data, context: b"\x0a\x04here")
        service = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Predictions": method}),)
        )

    def start(self) -> None:
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()


def test_interrupted_request_is_not_retried(make_client: ClientFactory) -> None:
    """The server speaks enough HTTP/2 to receive a request."""
    sent: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as port:

        def close_connections() -> None:
            while True:
                try:
                    connection, _ = port.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"\0\0\0\4\0\0\0\0\0")  # SETTINGS
                    data = b""
                    while b"Predictions" not in data:
                        more = connection.recv(10_000)
                        if not more:
                            break
                        data += more
                    else:
                        sent.append(data)

        thread = threading.Thread(target=close_connections)
        thread.start()
        client = make_client(f"127.0.0.1:{port.getsockname()[1]}", retries=quick_retries(max_attempts=3))
        with pytest.raises(grpc.RpcError) as error:
            client.predict("m", b"", timeout=60)
        port.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert error.value.code() == grpc.StatusCode.UNAVAILABLE
    assert len(sent) == 1, "it may have run"

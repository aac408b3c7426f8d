"""Malformed and excessive input: the port stays open, others are served, memory is bounded."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from typing import Any

import grpc
import psutil
import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def assert_serves(server: Any) -> None:
    stub = InferenceAPIsServiceStub(server.channel)
    request = PredictionsRequest(model_name="m", input={"data": b"x"})
    assert stub.Predictions(request, timeout=60).prediction == b"x"


def send_bytes(address: str, data: bytes) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.settimeout(0.02)
        try:
            client.sendall(data)
            while client.recv(4096):
                pass
        except OSError:  # closed by the server, or no answer in time
            pass


def test_random_bytes_do_no_harm(over_grpc: Any) -> None:
    server = over_grpc()
    rng = random.Random(0)
    before = psutil.Process().memory_info().rss
    for i in range(60):
        noise = rng.randbytes(rng.randrange(1, 5000))
        send_bytes(server.address, (b"", PREFACE, b"GET / HTTP/1.1\r\n\r\n")[i % 3] + noise)
    assert_serves(server)
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert not server.backend.requests[1:]


def test_malformed_messages_are_rejected(over_grpc: Any) -> None:
    server = over_grpc()
    rng = random.Random(1)
    predict = server.channel.unary_unary(PREDICTIONS)
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as raised:
            predict(b"\x1a\x7f" + rng.randbytes(rng.randrange(1, 100)), timeout=60)  # a truncated part
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "is no PredictionsRequest" in raised.value.details()
    assert_serves(server)


def test_unknown_methods_are_unimplemented(over_grpc: Any) -> None:
    server = over_grpc()
    with pytest.raises(grpc.RpcError) as raised:
        server.channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Guess")(
            b"", timeout=60
        )
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_idle_connections_do_not_block_others(over_grpc: Any) -> None:
    server = over_grpc()
    host, port = server.address.split(":")
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
    assert_serves(server)
    for client in idle:
        client.close()


def test_calls_over_the_limit_are_rejected(over_grpc: Any) -> None:
    released = threading.Event()

    async def wait(call: InferenceRequest) -> InferenceResponse:
        while not released.is_set():
            await asyncio.sleep(0.005)
        return InferenceResponse(b"", version="1.0")

    server = over_grpc(wait, grpc={"max_concurrent_calls": 2})
    stub = InferenceAPIsServiceStub(server.channel)
    request = PredictionsRequest(model_name="m")
    calls = [stub.Predictions.future(request, timeout=60) for _ in range(6)]
    while sum(call.done() for call in calls) < 4:
        time.sleep(0.005)
    released.set()
    assert Counter(call.code().name for call in calls) == {"RESOURCE_EXHAUSTED": 4, "OK": 2}

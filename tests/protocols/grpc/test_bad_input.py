"""What is no gRPC, or too much of it: the port stays, others are answered, memory is bounded."""

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

from serve_app.proto.inference_pb2 import PredictionsRequest
from serve_app.proto.inference_pb2_grpc import InferenceAPIsServiceStub
from serve_app.types import Call, Reply

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def answers(server: Any) -> None:
    stub = InferenceAPIsServiceStub(server.channel)
    request = PredictionsRequest(model_name="m", input={"data": b"x"})
    assert stub.Predictions(request, timeout=60).prediction == b"x"


def spoken_at(address: str, data: bytes) -> None:
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.settimeout(0.02)
        try:
            client.sendall(data)
            while client.recv(4096):
                pass
        except OSError:  # it had enough, or says nothing
            pass


def test_random_bytes(over_grpc: Any) -> None:
    server = over_grpc()
    dice = random.Random(0)
    before = psutil.Process().memory_info().rss
    for i in range(60):
        noise = dice.randbytes(dice.randrange(1, 5000))
        spoken_at(server.address, (b"", PREFACE, b"GET / HTTP/1.1\r\n\r\n")[i % 3] + noise)
    answers(server)
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert not server.target.calls[1:]


def test_messages_that_are_none(over_grpc: Any) -> None:
    server = over_grpc()
    dice = random.Random(1)
    send = server.channel.unary_unary(PREDICTIONS)
    for _ in range(100):
        with pytest.raises(grpc.RpcError) as raised:
            send(b"\x1a\x7f" + dice.randbytes(dice.randrange(1, 100)), timeout=60)  # a part that ends too soon
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "is no PredictionsRequest" in raised.value.details()
    answers(server)


def test_a_method_that_is_not_there(over_grpc: Any) -> None:
    server = over_grpc()
    with pytest.raises(grpc.RpcError) as raised:
        server.channel.unary_unary("/org.pytorch.serve.grpc.inference.InferenceAPIsService/Guess")(b"", timeout=60)
    assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_connections_that_say_nothing_are_in_nobodys_way(over_grpc: Any) -> None:
    server = over_grpc()
    host, port = server.address.split(":")
    idle = [socket.create_connection((host, int(port)), timeout=60) for _ in range(50)]
    answers(server)
    for client in idle:
        client.close()


def test_more_calls_at_once_than_the_setting_allows(over_grpc: Any) -> None:
    free = threading.Event()

    async def held(call: Call) -> Reply:
        while not free.is_set():
            await asyncio.sleep(0.005)
        return Reply(b"", version="1.0")

    server = over_grpc(held, grpc={"max_concurrent_calls": 2})
    stub = InferenceAPIsServiceStub(server.channel)
    request = PredictionsRequest(model_name="m")
    calls = [stub.Predictions.future(request, timeout=60) for _ in range(6)]
    while sum(call.done() for call in calls) < 4:
        time.sleep(0.005)
    free.set()
    assert Counter(call.code().name for call in calls) == {"RESOURCE_EXHAUSTED": 4, "OK": 2}

"""The Unix-socket transport: both ends on one event loop, over a real socket, with a real batcher."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from serve_app.deployments.uds_transport import (
    ConnectionLost,
    UdsClient,
    UdsClientPool,
    UdsServer,
    socket_path,
)
from serve_app.domain.model import ModelRef
from serve_app.domain.request import InferenceRequest, InferenceResponse, InputPart, ResponseStream
from serve_app.errors import HandlerRejected, QueueFull, RelayError, ReplicaDied
from serve_app.runtime.batching.batcher import Batcher
from serve_app.telemetry.metrics import Meters

BATCHES: list[int] = []
GATE = threading.Event()


def handler(requests, emit) -> list[InferenceResponse | RelayError]:
    """Answers with the body; what the body says may be ``wait``, ``fail`` or ``stream``."""
    BATCHES.append(len(requests))
    answers: list[InferenceResponse | RelayError] = []
    for i, request in enumerate(requests):
        body = request.inputs[0].value
        if body == b"wait":
            GATE.wait(60)
        if body in (b"stream", b"breaks"):
            emit(i, InferenceResponse(b"one", content_type="text/plain"))
            emit(i, b"two")
        answers.append(
            HandlerRejected("no", 422)
            if body in (b"fail", b"breaks")
            else InferenceResponse(body, headers=(("a", "b"),))
        )
    return answers


def make_request(body: bytes, **more) -> InferenceRequest:
    return InferenceRequest("m", "1", (InputPart("body", body),), {"X-Case": "kept"}, **more)


def over_a_socket(tmp_path: Path, check, queue_size: int = 100, max_batch_size: int = 8) -> None:
    async def main() -> None:
        batcher = Batcher(
            handler,
            ModelRef("m", "1"),
            Meters(),
            max_batch_size=max_batch_size,
            queue_size=queue_size,
            retries=False,
        )
        server = UdsServer(batcher.submit_nowait)
        path = tmp_path / "r.sock"
        await server.open(path)
        client = await UdsClient.connect(path)
        assert client is not None
        try:
            await asyncio.wait_for(check(client, batcher, server), 60)
        finally:
            GATE.set()
            client.close()
            server.close()
            await batcher.close()
            while server._connections:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the transport that was closed last

    BATCHES.clear()
    GATE.clear()
    asyncio.run(main())


def test_rows_travel_together_and_answers_are_each_their_own(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        bodies = [b"fail" if i == 3 else b"%d" % i for i in range(16)]
        answers = await asyncio.gather(
            *(client.infer(make_request(body)) for body in bodies), return_exceptions=True
        )
        assert [a.body if isinstance(a, InferenceResponse) else (str(a), a.code) for a in answers] == [
            ("no", 422) if body == b"fail" else body for body in bodies
        ]
        assert answers[0].headers == (("a", "b"),) and answers[0].timings.batch_size == 8
        assert BATCHES == [8, 8], "what left in one turn of the loop met in full batches"
        assert client.pending_count == 0

    over_a_socket(tmp_path, check)


def test_a_large_body_comes_whole(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        body = os.urandom(5_000_000)
        assert (await client.infer(make_request(body))).body == body

    over_a_socket(tmp_path, check)


def test_streams_travel_beside_other_rows(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        stream, reply = await asyncio.gather(
            client.infer(make_request(b"stream")), client.infer(make_request(b"x"))
        )
        assert isinstance(stream, ResponseStream) and stream.head.content_type == "text/plain"
        assert [chunk async for chunk in stream] == [b"one", b"two", b"stream"]
        assert reply.body == b"x"
        broken = await client.infer(make_request(b"breaks"))
        pieces = []
        with pytest.raises(HandlerRejected):
            async for chunk in broken:
                pieces.append(chunk)
        assert pieces == [b"one", b"two"]
        left = await client.infer(make_request(b"stream"))
        await left.aclose()
        assert client.pending_count == 0

    over_a_socket(tmp_path, check)


def test_a_caller_that_leaves_takes_its_row_out_of_the_queue(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        first = asyncio.create_task(client.infer(make_request(b"wait")))
        second = asyncio.create_task(client.infer(make_request(b"left")))
        while batcher.pending != 1:
            await asyncio.sleep(0)
        second.cancel()
        while batcher.pending:
            await asyncio.sleep(0)
        GATE.set()
        assert (await first).body == b"wait"
        assert BATCHES == [1], "the row of the caller that left never ran"

    over_a_socket(tmp_path, check, max_batch_size=1)


def test_a_full_queue_is_refused_at_once(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        rows = [asyncio.create_task(client.infer(make_request(b"wait")))]
        while not BATCHES:
            await asyncio.sleep(0)
        rows += [asyncio.create_task(client.infer(make_request(b"x"))) for _ in range(2)]
        while batcher.pending != 2:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await client.infer(make_request(b"x"))
        GATE.set()
        await asyncio.gather(*rows)

    over_a_socket(tmp_path, check, queue_size=2, max_batch_size=1)


def test_a_lost_replica_fails_every_caller(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        stream = await client.infer(make_request(b"stream"))
        await stream.__aiter__().__anext__()
        waiting = asyncio.create_task(client.infer(make_request(b"wait")))
        while not BATCHES[1:]:
            await asyncio.sleep(0)
        server.close()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await client.infer(make_request(b"x"))
        assert client.is_lost

    over_a_socket(tmp_path, check)


def test_a_stream_whose_replica_is_lost_ends_in_an_error(tmp_path: Path) -> None:
    def half(requests, emit):
        emit(0, InferenceResponse(b"one"))
        GATE.wait(60)
        return [InferenceResponse(b"end")]

    async def main() -> None:
        batcher = Batcher(half, ModelRef("m", "1"), Meters())
        server = UdsServer(batcher.submit_nowait)
        await server.open(tmp_path / "s.sock")
        client = await UdsClient.connect(tmp_path / "s.sock")
        stream = await client.infer(make_request(b"x"))
        server.close()
        with pytest.raises(ReplicaDied):
            async for _ in stream:
                pass
        GATE.set()
        client.close()
        await batcher.close()

    GATE.clear()
    asyncio.run(main())


def test_sockets_are_used_only_when_every_replica_is_within_reach(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def main() -> None:
        batcher = Batcher(handler, ModelRef("m", "1"), Meters())
        server = UdsServer(batcher.submit_nowait)
        await server.open(socket_path("here"))
        transfers = UdsClientPool()
        assert transfers.least_busy(()) is None
        while transfers.least_busy(("here",)) is None:
            await asyncio.sleep(0.01)
        assert transfers.least_busy(("here", "elsewhere")) is None
        assert (await transfers.least_busy(("here",)).infer(make_request(b"x"))).body == b"x"
        transfers.retain(())
        assert transfers.least_busy(("here",)) is None, "it was let go"
        assert UdsClientPool(enabled=False).least_busy(("here",)) is None
        server.close()
        await batcher.close()

    asyncio.run(main())


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    directory = socket_path("r").parent
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="only its owner"):
        socket_path("r")


def test_sockets_of_replicas_that_were_killed_are_swept(tmp_path: Path) -> None:
    dead, alive = tmp_path / "dead.sock", tmp_path / "alive.sock"
    with socket.socket(socket.AF_UNIX) as killed, socket.socket(socket.AF_UNIX) as living:
        killed.bind(str(dead))
        living.bind(str(alive))
        living.listen()

        async def check(client, batcher, server) -> None:
            assert not dead.exists() and alive.exists()
            assert (await client.infer(make_request(b"x"))).body == b"x"

        over_a_socket(tmp_path, check)

"""The short hop: both ends on one event loop, over a real socket, with a real batcher behind it."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from serve_app.deployments.hop import HopClient, HopLost, HopServer, ShortHops, socket_path
from serve_app.errors import HandlerSaid, QueueFull, RelayError, WorkerDied
from serve_app.runtime.batcher import Batcher
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, Input, ModelRef, Reply, ReplyStream

BATCHES: list[int] = []
GATE = threading.Event()


def handler(calls, emit) -> list[Reply | RelayError]:
    """Answers with the body; what the body says may be ``wait``, ``fail`` or ``stream``."""
    BATCHES.append(len(calls))
    answers: list[Reply | RelayError] = []
    for i, call in enumerate(calls):
        body = call.inputs[0].value
        if body == b"wait":
            GATE.wait(60)
        if body in (b"stream", b"breaks"):
            emit(i, Reply(b"one", content_type="text/plain"))
            emit(i, b"two")
        answers.append(HandlerSaid("no", 422) if body in (b"fail", b"breaks") else Reply(body, headers=(("a", "b"),)))
    return answers


def call(body: bytes, **more) -> Call:
    return Call("m", "1", (Input("body", body),), {"X-Case": "kept"}, **more)


def over_a_socket(tmp_path: Path, check, queue_size: int = 100, max_batch_size: int = 8) -> None:
    async def main() -> None:
        batcher = Batcher(
            handler, ModelRef("m", "1"), Meters(), max_batch_size=max_batch_size, queue_size=queue_size, retries=False
        )
        server = HopServer(batcher.enqueue)
        path = tmp_path / "r.sock"
        await server.open(path)
        client = await HopClient.connect(path)
        assert client is not None
        try:
            await asyncio.wait_for(check(client, batcher, server), 60)
        finally:
            GATE.set()
            client.close()
            server.close()
            await batcher.close()
            while server._wires:
                await asyncio.sleep(0)
            await asyncio.sleep(0)  # the transport that was closed last

    BATCHES.clear()
    GATE.clear()
    asyncio.run(main())


def test_rows_travel_together_and_answers_are_each_their_own(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        bodies = [b"fail" if i == 3 else b"%d" % i for i in range(16)]
        answers = await asyncio.gather(*(client.infer(call(body)) for body in bodies), return_exceptions=True)
        assert [a.body if isinstance(a, Reply) else (str(a), a.code) for a in answers] == [
            ("no", 422) if body == b"fail" else body for body in bodies
        ]
        assert answers[0].headers == (("a", "b"),) and answers[0].timings.batch_size == 8
        assert BATCHES == [8, 8], "what left in one turn of the loop met in full batches"
        assert client.busy == 0

    over_a_socket(tmp_path, check)


def test_a_large_body_comes_whole(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        body = os.urandom(5_000_000)
        assert (await client.infer(call(body))).body == body

    over_a_socket(tmp_path, check)


def test_streams_travel_beside_other_rows(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        stream, reply = await asyncio.gather(client.infer(call(b"stream")), client.infer(call(b"x")))
        assert isinstance(stream, ReplyStream) and stream.head.content_type == "text/plain"
        assert [piece async for piece in stream] == [b"one", b"two", b"stream"]
        assert reply.body == b"x"
        broken = await client.infer(call(b"breaks"))
        pieces = []
        with pytest.raises(HandlerSaid):
            async for piece in broken:
                pieces.append(piece)
        assert pieces == [b"one", b"two"]
        left = await client.infer(call(b"stream"))
        await left.aclose()
        assert client.busy == 0

    over_a_socket(tmp_path, check)


def test_a_caller_that_leaves_takes_its_row_out_of_the_queue(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        first = asyncio.create_task(client.infer(call(b"wait")))
        second = asyncio.create_task(client.infer(call(b"left")))
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
        rows = [asyncio.create_task(client.infer(call(b"wait")))]
        while not BATCHES:
            await asyncio.sleep(0)
        rows += [asyncio.create_task(client.infer(call(b"x"))) for _ in range(2)]
        while batcher.pending != 2:
            await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await client.infer(call(b"x"))
        GATE.set()
        await asyncio.gather(*rows)

    over_a_socket(tmp_path, check, queue_size=2, max_batch_size=1)


def test_a_replica_that_is_lost_is_told_to_every_caller(tmp_path: Path) -> None:
    async def check(client, batcher, server) -> None:
        stream = await client.infer(call(b"stream"))
        await stream.__aiter__().__anext__()
        waiting = asyncio.create_task(client.infer(call(b"wait")))
        while not BATCHES[1:]:
            await asyncio.sleep(0)
        server.close()
        with pytest.raises(HopLost):
            await waiting
        with pytest.raises(HopLost):
            await client.infer(call(b"x"))
        assert client.lost

    over_a_socket(tmp_path, check)


def test_a_stream_whose_replica_is_lost_ends_in_an_error(tmp_path: Path) -> None:
    def half(calls, emit):
        emit(0, Reply(b"one"))
        GATE.wait(60)
        return [Reply(b"end")]

    async def main() -> None:
        batcher = Batcher(half, ModelRef("m", "1"), Meters())
        server = HopServer(batcher.enqueue)
        await server.open(tmp_path / "s.sock")
        client = await HopClient.connect(tmp_path / "s.sock")
        stream = await client.infer(call(b"x"))
        server.close()
        with pytest.raises(WorkerDied):
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
        server = HopServer(batcher.enqueue)
        await server.open(socket_path("here"))
        hops = ShortHops()
        assert hops.best(()) is None
        while hops.best(("here",)) is None:
            await asyncio.sleep(0.01)
        assert hops.best(("here", "elsewhere")) is None
        assert (await hops.best(("here",)).infer(call(b"x"))).body == b"x"
        hops.keep(())
        assert hops.best(("here",)) is None, "it was let go"
        assert ShortHops(allowed=False).best(("here",)) is None
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
            assert (await client.infer(call(b"x"))).body == b"x"

        over_a_socket(tmp_path, check)

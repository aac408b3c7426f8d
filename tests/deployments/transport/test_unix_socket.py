"""The Unix-socket transport: both ends on one event loop, over a real socket, with a real batcher."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.dataplane.backends import ConnectionLost
from serve_app.deployments.transport import unix_socket
from serve_app.deployments.transport.unix_socket import UdsClient, UdsClientPool, UdsServer, socket_path
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
        server = UdsServer(batcher.submit)
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
        server = UdsServer(batcher.submit)
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
        server = UdsServer(batcher.submit)
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


def test_a_socket_is_not_swept_before_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listen = socket.socket.listen

    def sweep_first(listener: socket.socket, *backlog: int) -> None:
        """Listen after another replica has removed the sockets that refuse connections."""
        unix_socket._remove_stale_sockets(tmp_path)
        listen(listener, *backlog)

    monkeypatch.setattr(socket.socket, "listen", sweep_first)

    async def check(client, batcher, server) -> None:
        assert (await client.infer(make_request(b"x"))).body == b"x"

    over_a_socket(tmp_path, check)


class Faulty:
    """A ``submit`` that answers by the body; some bodies meet faults of the server."""

    def __init__(self) -> None:
        self.withdrawn: list[bytes] = []

    def __call__(self, request: InferenceRequest, on_done) -> Callable[[], None]:
        body = request.inputs[0].value
        if body == b"raises":
            raise ValueError("unexpected")
        if body == b"stream fails":
            on_done(ResponseStream(InferenceResponse(b"one"), self._chunks()))
        elif body == b"fails":
            on_done(ValueError("unexpected"))
        elif body == b"unsendable":
            on_done(InferenceResponse(body, headers=(("a", threading.Lock()),)))  # type: ignore[arg-type]
        elif body != b"never":
            on_done(InferenceResponse(body))
        return lambda: self.withdrawn.append(body)

    async def _chunks(self):
        yield b"one"
        raise ValueError("unexpected")


def with_faults(tmp_path: Path, check) -> None:
    """Run ``check(client, submit, server)`` with a server whose requests meet unexpected errors."""

    async def main() -> None:
        submit = Faulty()
        server = UdsServer(submit)
        await server.open(tmp_path / "f.sock")
        client = await UdsClient.connect(tmp_path / "f.sock")
        assert client is not None
        await asyncio.wait_for(check(client, submit, server), 30)
        client.close()
        server.close()
        while server._connections:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # the transport that was closed last

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"raises", b"fails", b"unsendable"])
def test_an_unexpected_error_in_the_replica_is_that_of_its_row(tmp_path: Path, body: bytes) -> None:
    async def check(client, submit, server) -> None:
        bodies = [b"1", body, b"2", b"never"]
        *rows, open_row = [asyncio.ensure_future(client.infer(make_request(body))) for body in bodies]
        first, failed, second = await asyncio.gather(*rows, return_exceptions=True)
        assert (first.body, second.body) == (b"1", b"2")
        assert type(failed) is RelayError and str(failed) == "A fault of this server."
        assert (await client.infer(make_request(b"3"))).body == b"3"
        assert not open_row.done() and not submit.withdrawn and not client.is_lost
        open_row.cancel()
        while not submit.withdrawn:
            await asyncio.sleep(0)

    with_faults(tmp_path, check)


def test_an_unexpected_error_in_mid_stream_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    async def check(client, submit, server) -> None:
        stream = await client.infer(make_request(b"stream fails"))
        chunks = stream.__aiter__()
        assert await chunks.__anext__() == b"one"
        with pytest.raises(RelayError, match="A fault of this server"):
            await chunks.__anext__()
        assert (await client.infer(make_request(b"1"))).body == b"1"

    with_faults(tmp_path, check)


def test_a_request_that_cannot_be_encoded_fails_alone(tmp_path: Path) -> None:
    async def check(client, submit, server) -> None:
        broken = InferenceRequest("m", "1", (), {"x": threading.Lock()})  # type: ignore[dict-item]
        first, failed, second = await asyncio.gather(
            client.infer(make_request(b"1")),
            client.infer(broken),
            client.infer(make_request(b"2")),
            return_exceptions=True,
        )
        assert (first.body, type(failed), second.body) == (b"1", RelayError, b"2")
        assert client.pending_count == 0

    with_faults(tmp_path, check)


def test_a_callback_that_fails_concerns_no_other_row(tmp_path: Path) -> None:
    async def check(client, submit, server) -> None:
        def fail(outcome) -> None:
            raise ValueError("unexpected")

        client.submit(make_request(b"1"), fail)
        assert (await client.infer(make_request(b"2"))).body == b"2"
        client.submit(make_request(b"never"), fail)  # it fails when the replica is lost
        waiting = asyncio.ensure_future(client.infer(make_request(b"never")))
        await asyncio.sleep(0)
        server.close()
        with pytest.raises(ConnectionLost):
            await waiting

    with_faults(tmp_path, check)


@pytest.mark.parametrize("frame", [b"no pickle", pickle.dumps([1, 2]), pickle.dumps(None)])
def test_an_unreadable_frame_loses_the_replica(tmp_path: Path, frame: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(4)
            writer.write(len(frame).to_bytes(4, "big") + frame)
            await writer.drain()
            await reader.read()
            writer.close()
            closed.set()

        closed = asyncio.Event()
        server = await asyncio.start_unix_server(serve, tmp_path / "g.sock")
        client = await UdsClient.connect(tmp_path / "g.sock")
        assert client is not None
        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(client.infer(make_request(b"x")), 30)
        assert client.is_lost
        with pytest.raises(ConnectionLost):
            await client.infer(make_request(b"x"))
        server.close()
        await asyncio.wait_for(closed.wait(), 30)
        await asyncio.sleep(0)  # the transport that was closed last

    asyncio.run(main())


def test_an_unreadable_frame_from_a_gateway_withdraws_its_rows(tmp_path: Path) -> None:
    async def check(client, submit, server) -> None:
        row = asyncio.ensure_future(client.infer(make_request(b"never")))
        await client.infer(make_request(b"1"))  # both have arrived
        client._connection._writer.write((3).to_bytes(4, "big") + b"abc")
        with pytest.raises(ConnectionLost):
            await row
        assert submit.withdrawn == [b"never"]

    with_faults(tmp_path, check)


def test_a_closed_client_accepts_no_request(tmp_path: Path) -> None:
    async def check(client, submit, server) -> None:
        waiting = asyncio.ensure_future(client.infer(make_request(b"never")))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(ConnectionLost):
            await waiting
        with pytest.raises(ConnectionLost):
            await client.infer(make_request(b"x"))

    with_faults(tmp_path, check)

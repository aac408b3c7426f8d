"""The short hop: rows to a replica on the same machine travel over a Unix socket.

A call through Ray's handle costs most of a millisecond of CPU on both sides, most of it in threads that
hand each other the interpreter. Where a replica runs on this machine a socket does the same for a few
microseconds a row: what is written in one turn of the event loop travels as one frame, either way, and
streams travel beside everything else.

A frame is four bytes of length and a pickled list. To the replica: ``(row, Call)``, or ``(row, None)``
when the caller left. From it: ``(row, Reply | RelayError)``, or ``(row, Chunk)`` until a chunk is the last.
``(row, name)`` asks whether the state of the sequence of this name is there; the answer is ``(row, bool)``.
Pickle is trusted here: the sockets lie in a directory that only this user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import stat
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from serve_app.errors import RelayError, WorkerDied
from serve_app.runtime.answer import Pieces
from serve_app.types import Call, Chunk, Reply, ReplyStream

Message = tuple[int, Any]


class HopLost(Exception):
    """The replica, or its socket, is gone; what it had not answered may be sent to another."""


def socket_path(replica: str) -> Path:
    """Where a replica of this machine listens, in a directory that belongs to this user alone."""
    directory = Path(tempfile.gettempdir()) / f"torchrelay-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{directory} must be a directory that only its owner can enter; remove it")
    return directory / f"{replica}.sock"


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)


def _sweep(directory: Path) -> None:
    """Remove the sockets of replicas that were killed."""
    for path in directory.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                _forget(path)
            except OSError:
                continue


class _Wire:
    """One connection: whole messages in, and out once a turn of the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._out: list[Message] = []

    def say(self, message: Message) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(message)

    def _flush(self) -> None:
        body = pickle.dumps(self._out, pickle.HIGHEST_PROTOCOL)
        self._out = []
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "big") + body)

    async def hear(self) -> list[Message]:
        """The next frame's messages. Raises EOFError when the other side is gone."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return pickle.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError from error

    def close(self) -> None:
        self._writer.close()


class HopServer:
    """A replica's end. ``enqueue`` takes a call in and gives the future of its answer; cancelling it withdraws it.

    ``holds`` says whether the state of a sequence is here.
    """

    def __init__(
        self,
        enqueue: Callable[[Call], asyncio.Future[Reply | ReplyStream]],
        holds: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._enqueue = enqueue
        self._holds = holds
        self._wires: set[_Wire] = set()
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None

    async def open(self, path: Path) -> None:
        await asyncio.to_thread(_sweep, path.parent)
        self._server = await asyncio.start_unix_server(self._serve, path)
        self._path = path

    def close(self) -> None:
        """Take no more connections, and let go of those that are open."""
        if self._server is not None and self._path is not None:
            self._server.close()
            _forget(self._path)
        for wire in self._wires:
            wire.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = _Wire(reader, writer)
        rows: dict[int, asyncio.Future[Any]] = {}
        self._wires.add(wire)
        try:
            while True:
                for number, call in await wire.hear():
                    if isinstance(call, str):
                        wire.say((number, self._holds(call)))
                    elif call is not None:
                        self._take(wire, rows, number, call)
                    elif number in rows:
                        rows[number].cancel()
        except EOFError:
            pass
        finally:
            self._wires.discard(wire)
            for row in rows.values():
                row.cancel()
            wire.close()

    def _take(self, wire: _Wire, rows: dict[int, asyncio.Future[Any]], number: int, call: Call) -> None:
        try:
            row = self._enqueue(call)
        except RelayError as error:
            wire.say((number, error))
            return
        rows[number] = row
        row.add_done_callback(partial(self._answered, wire, rows, number))

    def _answered(
        self, wire: _Wire, rows: dict[int, asyncio.Future[Any]], number: int, row: asyncio.Future[Any]
    ) -> None:
        del rows[number]
        if row.cancelled():
            return
        answer = row.exception() or row.result()
        if isinstance(answer, ReplyStream):
            rows[number] = stream = asyncio.ensure_future(_pour(wire, number, answer))
            stream.add_done_callback(partial(_poured, rows, number, answer))
        else:
            wire.say((number, answer))


async def _pour(wire: _Wire, number: int, stream: ReplyStream) -> None:
    head: Reply | None = stream.head
    try:
        async for piece in stream:
            wire.say((number, Chunk(piece, head=head)))
            head = None
        wire.say((number, Chunk(b"", last=True)))
    except RelayError as error:
        wire.say((number, error))
    finally:
        await stream.aclose()


def _poured(rows: dict[int, asyncio.Future[Any]], number: int, stream: ReplyStream, task: asyncio.Future[None]) -> None:
    rows.pop(number, None)
    if task.cancelled():  # maybe before its first step
        asyncio.ensure_future(stream.aclose())


class HopClient:
    """The other end, in a gateway or in a replica that forwards."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._rows: dict[int, asyncio.Future[Reply | ReplyStream] | Pieces] = {}
        self._next = 0
        self.lost = False
        self._task = asyncio.ensure_future(self._listen())

    @classmethod
    async def connect(cls, path: Path) -> HopClient | None:
        """A connection to the replica behind ``path``; None where none listens."""
        try:
            return await cls.reach(path)
        except HopLost:
            _forget(path)
            return None

    @classmethod
    async def reach(cls, path: Path) -> HopClient | None:
        """The same, but raises HopLost where a replica listened that is dead."""
        try:
            return cls(_Wire(*await asyncio.open_unix_connection(path)))
        except ConnectionRefusedError:
            raise HopLost from None
        except OSError:
            return None

    @property
    def busy(self) -> int:
        """Rows that it has not answered."""
        return len(self._rows)

    async def infer(self, call: Call) -> Reply | ReplyStream:
        """The replica's answer. Raises RelayError, and HopLost."""
        return await self._ask(call)

    async def holds(self, sequence: str) -> bool:
        """Whether the replica has the state of this sequence. Raises HopLost."""
        return await self._ask(sequence)

    async def _ask(self, question: Call | str) -> Any:
        if self.lost:
            raise HopLost
        number = self._next
        self._next += 1
        answer: asyncio.Future[Reply | ReplyStream] = asyncio.get_running_loop().create_future()
        self._rows[number] = answer
        self._wire.say((number, question))
        try:
            return await answer
        except asyncio.CancelledError:
            self._leave(number)
            raise

    def close(self) -> None:
        self._task.cancel()
        self._wire.close()

    def _leave(self, number: int) -> None:
        if self._rows.pop(number, None) is not None and not self.lost:
            self._wire.say((number, None))

    async def _listen(self) -> None:
        try:
            while True:
                for number, answer in await self._wire.hear():
                    self._answered(number, answer)
        except EOFError:
            self.lost = True
            self._wire.close()
            for row in self._rows.values():
                if isinstance(row, Pieces):
                    row.end(WorkerDied("the replica was lost in mid-stream"))
                elif not row.done():
                    row.set_exception(HopLost())
            self._rows.clear()

    def _answered(self, number: int, answer: Reply | RelayError | Chunk) -> None:
        row = self._rows.get(number)
        if row is None:
            return  # its caller left
        if not isinstance(answer, Chunk):
            del self._rows[number]
            if isinstance(row, Pieces):
                row.end(answer if isinstance(answer, RelayError) else None)
            elif not row.done():
                if isinstance(answer, RelayError):
                    row.set_exception(answer)
                else:
                    row.set_result(answer)
            return
        if not isinstance(row, Pieces):
            assert answer.head is not None
            pieces = Pieces(partial(self._leave, number))
            self._rows[number] = pieces
            if not row.done():
                row.set_result(ReplyStream(answer.head, pieces))
            row = pieces
        if answer.last:
            del self._rows[number]
            row.end()
        else:
            row.put(answer.body)


class ShortHops:
    """The sockets to one version's replicas, as far as they run on this machine."""

    def __init__(self, allowed: bool = True) -> None:
        self._allowed = allowed
        self._clients: dict[str, HopClient] = {}
        self._connecting: dict[str, asyncio.Future[None]] = {}
        self._reaching: dict[str, asyncio.Future[HopClient | None]] = {}

    def best(self, replicas: tuple[str, ...]) -> HopClient | None:
        """The least busy of exactly these replicas; None unless every one of them is within reach."""
        if not replicas or not self._allowed:
            return None
        best: HopClient | None = None
        for replica in replicas:
            client = self._clients.get(replica)
            if client is None or client.lost:
                self._connect(replica)
                return None
            if best is None or client.busy < best.busy:
                best = client
        return best

    async def to(self, replica: str) -> HopClient | None:
        """The way to this very replica; None where it does not run on this machine. Raises HopLost where it is dead."""
        if not self._allowed:
            return None
        client = self._clients.get(replica)
        if client is None:
            # Whoever asks meanwhile waits for the same connection, so that calls stay in the order in which they came.
            reaching = self._reaching.get(replica)
            if reaching is None:
                reaching = self._reaching[replica] = asyncio.ensure_future(HopClient.reach(socket_path(replica)))
                reaching.add_done_callback(lambda _: self._reaching.pop(replica, None))
            client = await asyncio.shield(reaching)
            if client is not None:
                kept = self._clients.setdefault(replica, client)
                if kept is not client:
                    client.close()
                return kept
        return client

    def keep(self, replicas: tuple[str, ...]) -> None:
        """Forget the replicas that are no more."""
        for replica in self._clients.keys() - set(replicas):
            client = self._clients[replica]
            if client.lost or not client.busy:
                client.close()
                del self._clients[replica]

    def _connect(self, replica: str) -> None:
        if replica not in self._connecting:
            task = self._connecting[replica] = asyncio.ensure_future(self._open(replica))
            task.add_done_callback(lambda _: self._connecting.pop(replica, None))

    async def _open(self, replica: str) -> None:
        with contextlib.suppress(PermissionError):
            client = await HopClient.connect(socket_path(replica))
            if client is not None:
                self._clients[replica] = client
            else:
                await asyncio.sleep(0.5)  # it may be on another machine: do not look at every call

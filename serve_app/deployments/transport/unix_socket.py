"""Unix-socket transport: rows to a replica on the same machine.

A call through Ray's handle costs most of a millisecond of CPU on both sides, most of it in threads that hand
each other the interpreter. On one machine a socket does the same for a few microseconds a row. All messages
of one turn of the event loop share a frame, in both directions, and streams are multiplexed with everything
else.

Messages to the replica: ``(row, request)``, or ``(row, None)`` when the client disconnected. From it:
``(row, response)``, ``(row, RelayError)``, or ``(row, ResponseChunk)`` until a chunk is the last.
``(row, name)`` queries whether the replica has the state of the sequence of this name; the answer is
``(row, bool)``.

An unexpected error in one row is that row's. One in the connection closes it: unanswered rows are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from serve_app.dataplane.backends import ConnectionLost
from serve_app.deployments.transport.frames import (
    FrameConnection,
    Message,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseChunk,
    ResponseStream,
    Submit,
)
from serve_app.errors import RelayError, ReplicaDied
from serve_app.net.private_files import get_runtime_directory, listen_at
from serve_app.runtime.backends import Backend, infer
from serve_app.runtime.batching.request_queue import StreamBuffer

_LOST = "the replica was lost in mid-stream"
_FAULT = "A fault of this server."

log = logging.getLogger(__name__)

_closing_streams: set[asyncio.Future[None]] = set()  # the event loop keeps only weak references


def socket_path(replica: str) -> Path:
    """Return the socket of a replica of this machine, in a directory that belongs to this user alone."""
    return get_runtime_directory() / f"{replica}.sock"


def _remove_stale_sockets(directory: Path) -> None:
    """Remove the sockets of replicas that were killed."""
    for path in directory.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


class UdsServer:
    """A replica's server. ``submit`` starts a request, and returns a function that withdraws it.

    ``holds`` returns whether the state of a sequence is here.
    """

    def __init__(self, submit: Submit, holds: Callable[[str], bool] = lambda name: False) -> None:
        self._submit = submit
        self._holds = holds
        self._connections: set[_ServerConnection] = set()
        self._server: asyncio.AbstractServer | None = None
        self._path: Path | None = None

    async def open(self, path: Path) -> None:
        await asyncio.to_thread(_remove_stale_sockets, path.parent)
        self._server = await asyncio.start_unix_server(self._serve, sock=listen_at(path))
        self._path = path

    def close(self) -> None:
        """Refuse new connections, and close the open ones."""
        if self._server is not None and self._path is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        for connection in self._connections:
            connection.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _ServerConnection(reader, writer)
        self._connections.add(connection)
        try:
            await connection.serve(self._submit, self._holds)
        finally:
            self._connections.discard(connection)


class _ServerConnection(FrameConnection):
    """A replica's end of a connection, with the client's unanswered rows."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer, self._replace_unsendable)
        self._withdraw: dict[int, Callable[[], object]] = {}  # functions that withdraw the open rows

    async def serve(self, submit: Submit, holds: Callable[[str], bool]) -> None:
        """Answer requests until the client disconnects."""
        try:
            while True:
                for number, message in await self.receive():
                    try:
                        self._process(submit, holds, number, message)
                    except Exception:
                        log.exception("A request of another process failed: a fault of this server")
                        self.send((number, RelayError(_FAULT)))
        except EOFError:
            pass
        except Exception:
            log.exception("The connection to another process failed: a fault of this server")
        finally:
            self.close()
            for number in tuple(self._withdraw):
                self._withdraw_row(number)

    def _process(self, submit: Submit, holds: Callable[[str], bool], number: int, message: Any) -> None:
        if isinstance(message, str):
            self.send((number, holds(message)))
        elif message is not None:
            self._start(submit, number, decode_request(message))
        else:
            self._withdraw_row(number)

    def _withdraw_row(self, number: int) -> None:
        if withdraw := self._withdraw.pop(number, None):
            try:
                withdraw()
            except Exception:
                log.exception("A request could not be withdrawn: a fault of this server")

    def _replace_unsendable(self, number: int) -> Message:
        self._withdraw_row(number)
        return number, RelayError(_FAULT)

    def _start(self, submit: Submit, number: int, request: InferenceRequest) -> None:
        is_answered = False

        def on_done(outcome: Outcome) -> None:
            nonlocal is_answered
            is_answered = True
            self._on_response(number, outcome)

        try:
            withdraw = submit(request, on_done)
        except RelayError as error:
            self.send((number, error))
            return
        if not is_answered:
            self._withdraw[number] = withdraw

    def _on_response(self, number: int, outcome: Outcome) -> None:
        self._withdraw.pop(number, None)
        if isinstance(outcome, ResponseStream):
            task = asyncio.ensure_future(self._forward_stream(number, outcome))
            self._withdraw[number] = task.cancel
            task.add_done_callback(partial(self._on_stream_done, number, outcome))
        elif isinstance(outcome, InferenceResponse):
            self.send((number, encode_response(outcome)), len(outcome.body))
        else:
            self.send((number, _to_sendable(outcome)))

    async def _forward_stream(self, number: int, stream: ResponseStream) -> None:
        try:
            async for chunk in write_chunks(stream):
                self.send((number, chunk))
            self.send((number, ResponseChunk(b"", last=True)))
        except Exception as error:
            self.send((number, _to_sendable(error)))
        finally:
            await stream.aclose()

    def _on_stream_done(self, number: int, stream: ResponseStream, task: asyncio.Future[None]) -> None:
        self._withdraw.pop(number, None)
        if task.cancelled():  # possibly before its first step
            closing = asyncio.ensure_future(stream.aclose())
            _closing_streams.add(closing)
            closing.add_done_callback(_closing_streams.discard)


def _to_sendable(error: Exception) -> Exception:
    """Return an error that every process can read; an unexpected one is logged here."""
    if isinstance(error, RelayError | ConnectionLost):
        return error
    log.error("A request failed: a fault of this server", exc_info=error)
    return RelayError(_FAULT)


async def write_chunks(stream: ResponseStream) -> AsyncIterator[ResponseChunk]:
    """Yield a stream's chunks; the first has the head."""
    head: InferenceResponse | None = stream.head
    async for body in stream:
        yield ResponseChunk(body, head=head)
        head = None


class UdsClient(Backend):
    """A client in a gateway, or in a replica that forwards requests."""

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection
        # The callbacks of rows without a response, and the streams that continue.
        self._pending: dict[int, Callable[[Any], None] | StreamBuffer] = {}
        self._next_number = 0
        self.is_lost = False
        connection.replace_unsendable = self._fail_unsendable
        self._task = asyncio.ensure_future(self._receive_responses())

    @classmethod
    async def connect(cls, path: Path) -> UdsClient | None:
        """Return a connection, None without a socket. Raises ConnectionLost where the replica is dead."""
        try:
            return cls(FrameConnection(*await asyncio.open_unix_connection(path)))
        except ConnectionRefusedError:
            raise ConnectionLost from None
        except OSError:
            return None

    @property
    def pending_count(self) -> int:
        """Rows that the replica has not answered."""
        return len(self._pending)

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        """Send a request; ``on_done`` receives its outcome, also ConnectionLost. Raises ConnectionLost."""
        return self._submit(encode_request(request), on_done)

    async def holds(self, sequence: str) -> bool:
        """Return whether the replica has the state of this sequence. Raises ConnectionLost."""
        query: Any = sequence
        return bool(await infer(self._submit, query))

    def _submit(self, message: Any, on_done: Callable[[Any], None]) -> Cancel:
        if self.is_lost:
            raise ConnectionLost
        number = self._next_number
        self._next_number += 1
        self._pending[number] = on_done
        self._connection.send((number, message))
        return partial(self._cancel, number)

    def close(self) -> None:
        self._task.cancel()
        self._on_lost()

    def _cancel(self, number: int) -> None:
        if self._pending.pop(number, None) is not None and not self.is_lost:
            self._connection.send((number, None))

    async def _receive_responses(self) -> None:
        try:
            while True:
                for number, response in await self._connection.receive():
                    try:
                        self._on_response(number, response)
                    except Exception:  # of the row's callback, or a response of another form
                        log.exception("A response of a replica failed: a fault of this server")
                        self._fail(number, ReplicaDied("its response could not be read"))
        except EOFError:
            pass
        except Exception:
            log.exception("The connection to a replica failed: a fault of this server")
        finally:
            self._on_lost()

    def _on_lost(self) -> None:
        """Fail the open rows, and accept no others."""
        self.is_lost = True
        self._connection.close()
        for number in tuple(self._pending):
            self._fail(number, ConnectionLost())

    def _fail_unsendable(self, number: int) -> None:
        self._fail(number, RelayError(_FAULT))

    def _fail(self, number: int, error: Exception) -> None:
        row = self._pending.pop(number, None)
        try:
            if isinstance(row, StreamBuffer):
                row.finish(error if isinstance(error, RelayError) else ReplicaDied(_LOST))
            elif row is not None:
                row(error)
        except Exception:
            log.exception("An error could not be delivered: a fault of this server")

    def _on_response(self, number: int, response: Any) -> None:
        row = self._pending.get(number)
        if row is None:
            return None  # its client disconnected
        if isinstance(response, Exception):
            return self._fail(number, response)
        if not isinstance(response, ResponseChunk):
            result = decode_response(response) if isinstance(response, tuple) else response
            del self._pending[number]
            if isinstance(row, StreamBuffer):
                row.finish()
            else:
                row(result)
            return None
        if not isinstance(row, StreamBuffer):
            assert response.head is not None
            buffer = StreamBuffer(partial(self._cancel, number))
            self._pending[number] = buffer
            row(ResponseStream(response.head, buffer))
            row = buffer
        if response.last:
            del self._pending[number]
            row.finish()
        else:
            row.append(response.body)
        return None


class UdsClientPool:
    """The clients of one version's replicas that run on this machine."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._clients: dict[str, UdsClient] = {}
        self._connecting: dict[str, asyncio.Future[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def least_busy(self, replicas: tuple[str, ...]) -> UdsClient | None:
        """Return the client with the fewest pending rows; None unless all ``replicas`` are connected."""
        if not replicas or not self._enabled:
            return None
        best: UdsClient | None = None
        for replica in replicas:
            client = self._clients.get(replica)
            if client is None or client.is_lost:
                self._connect(replica)
                return None
            if best is None or client.pending_count < best.pending_count:
                best = client
        return best

    async def get(self, replica: str) -> UdsClient | None:
        """Return the client of one replica; None where it does not run on this machine.

        Raises ConnectionLost where it is dead.
        """
        if not self._enabled:
            return None
        # The lock is fair, so concurrent callers share one connection and their requests keep their order.
        async with self._locks.setdefault(replica, asyncio.Lock()):
            client = self._clients.get(replica)
            if client is None and (client := await UdsClient.connect(socket_path(replica))) is not None:
                self._clients[replica] = client
            return client

    def retain(self, replicas: tuple[str, ...]) -> None:
        """Close the clients of all other replicas."""
        for replica in self._clients.keys() - set(replicas):
            client = self._clients[replica]
            if client.is_lost or not client.pending_count:
                client.close()
                del self._clients[replica]

    def _connect(self, replica: str) -> None:
        """Start to connect for later requests, unless an attempt is under way."""
        if replica not in self._connecting:
            self._clients.pop(replica, None)  # it is lost
            task = self._connecting[replica] = asyncio.ensure_future(self._open(replica))
            task.add_done_callback(lambda _: self._connecting.pop(replica, None))

    async def _open(self, replica: str) -> None:
        client: UdsClient | None = None
        with contextlib.suppress(PermissionError, ConnectionLost):
            client = await self.get(replica)
        if client is None:
            await asyncio.sleep(0.5)  # it may run on another machine: do not look for it at every request

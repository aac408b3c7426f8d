"""A version elsewhere: over sockets where all its replicas run on this machine, else through Ray's handle.

A handle call costs most of a millisecond of CPU however little it carries, so rows are sent, not calls:
at most two handle calls a replica are under way, and what arrives meanwhile travels together in the next.
Nothing waits while the way is free, so there is no timer. A call that streams goes alone.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections.abc import AsyncIterator
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import BackPressureError

from serve_app.dataplane import TableReader
from serve_app.deployments.direct import Direct
from serve_app.deployments.hop import HopLost, ShortHops
from serve_app.errors import DeadlineExceeded, HandlerFailed, Loading, NoWorker, QueueFull, RelayError, WorkerDied
from serve_app.runtime.queue import Queue
from serve_app.settings import Settings
from serve_app.types import Call, Chunk, ModelRef, Reply, ReplyStream, VersionRow

log = logging.getLogger("torchrelay.remote")

HOPS_PER_REPLICA = 2
MAX_ROWS = 64  # rows of one hop; a batch rarely holds more
MAX_BYTES = 8 << 20  # bytes of one hop, unless one row alone is larger


class _Row:
    __slots__ = ("arrived", "attempts", "call", "future", "hop", "size")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream]) -> None:
        self.call = call
        self.arrived = time.monotonic()
        self.hop: _Hop | None = None
        self.size = sum(len(part.value) for part in call.inputs)
        self.future = future
        self.attempts = 0


class _Hop:
    """Rows that travel together."""

    __slots__ = ("rows", "task")

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self.task: asyncio.Task[None] | None = None


class RemoteTarget:
    """One version's replicas, as this process reaches them.

    Rows wait here by priority (see runtime/queue.py) while the way is taken; a shadow travels when no other row waits.
    """

    def __init__(self, ref: ModelRef, row: VersionRow, short_hops: bool) -> None:
        handle = serve.get_deployment_handle(ref.app, ref.app)
        self._unary = handle.infer
        self._streaming = handle.options(stream=True).stream
        self._direct = Direct(ref.app)
        self._ref = ref
        self._near = ShortHops(short_hops)
        self._row = row
        self._awake = handle.awake
        self._waking: asyncio.Task[None] | None = None
        self._streams: bool | None = None  # whether its handler streams: unknown until the first reply
        self._rows: Queue[_Row] = Queue()
        self._hops = 0
        self._sending = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def row(self) -> VersionRow:
        return self._row

    @row.setter
    def row(self, row: VersionRow) -> None:
        if row is not self._row:
            self._row = row
            self._near.keep(row.ids)

    async def infer(self, call: Call) -> Reply | ReplyStream:
        for attempt in (1, 2):
            near = self._near.best(self._row.ids)
            if near is None:
                break
            try:
                return await near.infer(call)
            except HopLost:
                if not self._row.retries or attempt == 2:
                    raise WorkerDied(f"a replica of {self._ref.app} was lost") from None
            except Loading:
                break  # it is stopping, or being replaced: the handle knows who else there is
        return await self._far(call)

    async def infer_at(self, replica: str, call: Call) -> Reply | ReplyStream:
        """The answer of this very replica. Raises RelayError, and HopLost where it is dead."""
        near = await self._near.to(replica)
        return await (self._direct.infer(replica, call) if near is None else near.infer(call))

    async def holds(self, replica: str, sequence: str) -> bool:
        """Whether this replica has the state of a sequence. Raises HopLost where it is dead."""
        near = await self._near.to(replica)
        return await (self._direct.holds(replica, sequence) if near is None else near.holds(sequence))

    def wake(self) -> None:
        """Let one call wait for a replica: Ray Serve starts one for it. Whoever waits hears of it from the table."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._awake.remote()
        except Exception as error:  # why it does not start, Management says
            log.info("%s did not wake up: %s", self._ref.app, type(error).__name__)

    async def _far(self, call: Call) -> Reply | ReplyStream:
        if self._streams is not False:
            return await self._alone(call)
        limit = max(self.row.job_queue_size, self.row.max_batch_size) * max(1, self.row.replicas)
        waiting = len(self._rows.shadows) if call.priority == "shadow" else self._rows.live
        if waiting >= limit:
            raise QueueFull(self._ref.name, call.version, f"{waiting} rows wait for its replicas")
        loop = asyncio.get_running_loop()
        row = _Row(call, loop.create_future())
        self._rows.put(row)
        self._send_soon()
        expiry = None
        if call.deadline is not None:
            expiry = loop.call_later(call.deadline - time.time(), self._expire, row)
        try:
            return await row.future
        except asyncio.CancelledError:
            self._leave(row)
            raise
        finally:
            if expiry is not None:
                expiry.cancel()

    def _expire(self, row: _Row) -> None:
        """The row's time is over. One that travels is answered by its replica, which knows as well."""
        if self._rows.remove(row) and not row.future.done():
            row.future.set_exception(DeadlineExceeded(self._ref.name, time.monotonic() - row.arrived))

    def _leave(self, row: _Row) -> None:
        """The caller left: its place is free, and a hop that nobody waits for ends."""
        hop = row.hop
        if not self._rows.remove(row) and hop is not None and all(other.future.done() for other in hop.rows):
            assert hop.task is not None
            hop.task.cancel()

    def _send_soon(self) -> None:
        """Send at the end of the loop's turn: rows that were read in the same turn travel together."""
        if not self._sending and self._hops < self._allowed:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    @property
    def _allowed(self) -> int:
        return HOPS_PER_REPLICA * max(1, self.row.replicas)

    def _send(self) -> None:
        """Start hops while the way is free and rows wait."""
        self._sending = False
        rows = self._rows
        while (rows.live or rows.shadows) and self._hops < self._allowed:
            hop = _Hop(self._next_rows() if rows.live else [rows.shadows.popleft()])
            for row in hop.rows:
                row.hop = hop
            if hop.rows:
                self._hops += 1
                hop.task = asyncio.get_running_loop().create_task(self._travel(hop))
                self._tasks.add(hop.task)  # the loop itself holds its tasks weakly
                hop.task.add_done_callback(self._tasks.discard)

    def _next_rows(self) -> list[_Row]:
        """As many rows as one hop takes, the most urgent first."""
        waiting = self._rows
        rows: list[_Row] = []
        size = 0
        while waiting.live and len(rows) < MAX_ROWS and (not rows or size + waiting.first().size <= MAX_BYTES):
            row = waiting.pop()
            if row.future.done():
                continue
            if row.call.expired:
                row.future.set_exception(DeadlineExceeded(self._ref.name, time.monotonic() - row.arrived))
                continue
            size += row.size
            rows.append(row)
        return rows

    async def _travel(self, hop: _Hop) -> None:
        response: Any = None
        try:
            # Pickled here and unpickled there, as bytes to Ray: its own pickler asks Python about every object.
            sent = pickle.dumps([row.call for row in hop.rows], pickle.HIGHEST_PROTOCOL)
            response = self._unary.remote(sent)
            results = pickle.loads(await response)
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            for row in hop.rows:
                row.future.cancel()
            raise
        except Exception as error:
            self._failed(hop.rows, error)
        else:
            for row, result in zip(hop.rows, results):
                if row.future.done():
                    continue
                if isinstance(result, RelayError):
                    row.future.set_exception(result)
                elif isinstance(result, list):  # it streamed after all: give the pieces, and know better next time
                    self._streams = True
                    row.future.set_result(_replay(result))
                else:
                    row.future.set_result(result)
        finally:
            self._hops -= 1
            self._send_soon()

    def _failed(self, rows: list[_Row], error: Exception) -> None:
        again = self.row.retries and _replica_lost(error)
        for row in reversed(rows):
            row.attempts += 1
            if again and row.attempts < 2 and not row.future.done():
                row.hop = None
                self._rows.put_back(row)
            elif not row.future.done():
                row.future.set_exception(_in_our_words(error, self._ref, row.call))

    async def _alone(self, call: Call) -> Reply | ReplyStream:
        for attempt in (1, 2):
            answers = self._streaming.remote(call)
            try:
                first: Chunk | RelayError = await answers.__anext__()
            except asyncio.CancelledError:
                answers.cancel()
                raise
            except StopAsyncIteration:
                raise WorkerDied("the replica ended the stream before it began") from None
            except Exception as error:
                if attempt == 1 and self.row.retries and _replica_lost(error):
                    continue
                raise _in_our_words(error, self._ref, call) from None
            if isinstance(first, RelayError):
                raise first
            assert first.head is not None
            if first.last:
                self._streams = bool(self._streams)
                return first.head
            self._streams = True
            return ReplyStream(first.head, self._rest(call, first, answers))
        raise AssertionError("unreachable")

    async def _rest(self, call: Call, first: Chunk, answers: Any) -> AsyncIterator[bytes]:
        try:
            yield first.body
            async for chunk in answers:
                if isinstance(chunk, RelayError):
                    raise chunk
                yield chunk.body
        except RelayError:
            raise
        except (asyncio.CancelledError, GeneratorExit):
            answers.cancel()  # the caller left
            raise
        except Exception as error:
            raise _in_our_words(error, self._ref, call) from None


def _replay(pieces: list[Chunk]) -> ReplyStream:
    async def bodies() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece.body

    assert pieces[0].head is not None
    return ReplyStream(pieces[0].head, bodies())


def _replica_lost(error: Exception) -> bool:
    """Whether the replica, or the way to it, is gone, so that another may still answer."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return False
    return isinstance(error, ray.exceptions.RayError | ConnectionError) or type(error).__name__ == "AioRpcError"


def _in_our_words(error: Exception, ref: ModelRef, call: Call) -> RelayError:
    cause = getattr(error, "cause", None)
    if isinstance(error, RelayError):
        return error
    if isinstance(cause, RelayError):
        return cause
    if isinstance(error, BackPressureError):
        return QueueFull(ref.name, call.version, "its replicas hold as many requests as they may")
    if isinstance(error, ray.serve.exceptions.DeploymentUnavailableError):
        return NoWorker(ref.name, call.version, "its replicas could not be started")
    if _replica_lost(error):
        return WorkerDied(f"a replica of {ref.app} was lost: {type(error).__name__}")
    log.error("a hop to %s failed (request %s)", ref.app, call.request_id, exc_info=error)
    return HandlerFailed(f"{type(error).__name__}: {error}")


class Remotes:
    """The RemoteTargets of this process, one a version, made when first needed."""

    def __init__(self, reader: TableReader, settings: Settings) -> None:
        self._reader = reader
        self._short_hops = settings.inference.short_hops
        self._targets: dict[ModelRef, RemoteTarget] = {}

    def __call__(self, ref: ModelRef, row: VersionRow) -> RemoteTarget:
        target = self._targets.get(ref)
        if target is None:
            self._forget_removed()
            try:
                target = self._targets[ref] = RemoteTarget(ref, row, self._short_hops)
            except Exception as error:  # the application is not there (yet): its replicas are on their way
                raise Loading(ref.name, ref.version, f"{type(error).__name__}: {error}") from None
        target.row = row
        return target

    def wake(self, ref: ModelRef, row: VersionRow) -> None:
        """See to it that a version which sleeps gets a replica. Raises Loading while its application is not there."""
        self(ref, row).wake()

    def _forget_removed(self) -> None:
        models = self._reader.table.models
        for ref in list(self._targets):
            if ref.name not in models or ref.version not in models[ref.name].versions:
                del self._targets[ref]

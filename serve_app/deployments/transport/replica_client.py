"""Clients of versions in other processes: over Unix sockets on one host, else through Ray's handles.

A handle call costs most of a millisecond of CPU however little it carries, so rows are coalesced: at most two
handle calls for each replica are in flight, and rows that arrive meanwhile share the next one. A free replica
gets a row at once, so there is no timer. A request that streams has a call of its own.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray.exceptions
from ray import serve
from ray.serve.exceptions import BackPressureError

from serve_app.dataplane.backends import ConnectionLost, ReplicaBackend
from serve_app.dataplane.data_plane import RoutingTableReader
from serve_app.deployments.ray_internals.actor_client import ActorClient
from serve_app.deployments.transport.unix_socket import UdsClient, UdsClientPool
from serve_app.domain.model import ModelRef
from serve_app.domain.pool import POOLS
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseChunk,
    ResponseStream,
)
from serve_app.domain.routing_table import VersionRoute
from serve_app.errors import (
    DeadlineExceeded,
    HandlerFailed,
    ModelLoading,
    NoReplica,
    QueueFull,
    RelayError,
    ReplicaDied,
)
from serve_app.runtime.backends import TaskRequest
from serve_app.runtime.batching.request_queue import RequestQueue
from serve_app.settings import Settings
from serve_app.telemetry import tracing

log = logging.getLogger(__name__)

MAX_CALLS_PER_REPLICA = 2
MAX_ROWS = 64  # rows of one call; a batch rarely holds more
MAX_BYTES = 8 << 20  # bytes of one call, unless one row alone is larger

# The calls of this process to replicas that Ray Serve counts in its metrics (see ray_internals/metrics.py).
calls_counted_by_ray: Counter[ModelRef] = Counter()


@dataclass(slots=True, eq=False)
class _RemoteRow:
    request: InferenceRequest
    future: asyncio.Future[InferenceResponse | ResponseStream]
    arrived: float = field(default_factory=time.monotonic)
    group: _RowGroup | None = None
    attempts: int = 0

    @property
    def size(self) -> int:
        """Bytes of its inputs."""
        return sum(len(part.value) for part in self.request.inputs)


@dataclass(slots=True, eq=False)
class _RowGroup:
    """Rows that share a handle call."""

    rows: list[_RemoteRow]
    task: asyncio.Task[None] | None = None


class RemoteBackend(ReplicaBackend):
    """A backend for the replicas of one version, as this process reaches them.

    Rows wait here by priority (see ``runtime/batching/request_queue.py``) while all calls are in flight; a
    shadow is sent when no other row waits.
    """

    def __init__(self, ref: ModelRef, route: VersionRoute, use_sockets: bool) -> None:
        handle = serve.get_deployment_handle(ref.app, ref.app)
        self._unary = handle.infer
        self._streaming = handle.options(stream=True).stream
        self._actor = ActorClient(ref.app)
        self._ref = ref
        self._sockets = UdsClientPool(use_sockets)
        self._route = route
        self._awake = handle.awake
        self._waking: asyncio.Task[None] | None = None
        self._streams: bool | None = None  # whether its handler streams: unknown until the first response
        self._rows: RequestQueue[_RemoteRow] = RequestQueue()
        self._calls_in_flight = 0
        self._sending = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def route(self) -> VersionRoute:
        return self._route

    @route.setter
    def route(self, route: VersionRoute) -> None:
        if route is not self._route:
            self._route = route
            self._sockets.retain(route.replica_ids)

    def is_connected(self, replicas: tuple[str, ...]) -> bool:
        """Return whether every one of ``replicas`` is reached over a socket; connect those that are not."""
        return self._sockets.least_busy(replicas) is not None

    def submit(self, request: InferenceRequest, on_done: OnDone, replicas: tuple[str, ...] = ()) -> Cancel:
        """Send a request over a socket where all replicas are connected, else through Ray's handle.

        Only the sockets of ``replicas`` are considered where they are given.
        """
        request, span = tracing.begin(request, "transport", "CLIENT")
        if span is not None:
            on_done = tracing.end_with(span, on_done)
        client = self._sockets.least_busy(replicas or self._route.replica_ids)
        cancel: Cancel
        if client is None:
            cancel = TaskRequest(self._infer_by_handle(request), on_done).cancel
        else:
            cancel = _SocketRequest(self, request, on_done).start(client)
        return cancel if span is None else partial(_cancel_traced, span, cancel)

    @property
    def retries(self) -> bool:
        """Return whether a request of a lost replica may run again."""
        return self._route.retries

    def lost_error(self) -> ReplicaDied:
        """Return the error of a request whose replica was lost."""
        return ReplicaDied(f"a replica of {self._ref.app} was lost")

    async def infer_again(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response to a request whose first replica was lost, or is stopping or being replaced."""
        client = self._sockets.least_busy(self._route.replica_ids)
        if client is not None:
            try:
                return await client.infer(request)
            except ConnectionLost:
                raise self.lost_error() from None
            except ModelLoading:
                pass  # the handle knows the other replicas
        return await self._infer_by_handle(request)

    async def infer_at(self, replica: str, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        """Return the response of one replica.

        Raises RelayError, and ConnectionLost where the replica is dead.
        """
        client = await self._sockets.get(replica)
        calls_counted_by_ray[self._ref] += client is None
        request, span = tracing.begin(request, "transport", "CLIENT")
        with tracing.ended(span):
            return await (self._actor.infer(replica, request) if client is None else client.infer(request))

    async def holds(self, replica: str, sequence: str) -> bool:
        """Return whether a replica has the state of a sequence.

        Raises ConnectionLost where the replica is dead.
        """
        client = await self._sockets.get(replica)
        calls_counted_by_ray[self._ref] += client is None
        return await (self._actor.holds(replica, sequence) if client is None else client.holds(sequence))

    def wake(self) -> None:
        """Queue one call in Ray Serve, which starts a replica for it.

        Waiting requests see the replica in the routing table.
        """
        if self._waking is None or self._waking.done():
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        calls_counted_by_ray[self._ref] += 1
        try:
            await self._awake.remote()
        except Exception as error:  # Management reports why it does not start
            log.info("%s did not wake up: %s", self._ref.app, type(error).__name__)

    async def _infer_by_handle(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        if self._streams is not False:
            return await self._infer_streaming(request)
        limit = max(self.route.job_queue_size, self.route.max_batch_size) * max(1, self.route.replicas)
        waiting = len(self._rows.shadows) if request.priority == "shadow" else self._rows.live
        if waiting >= limit:
            raise QueueFull(self._ref.name, request.version, f"{waiting} rows wait for its replicas")
        loop = asyncio.get_running_loop()
        row = _RemoteRow(request, loop.create_future())
        self._rows.put(row)
        self._schedule_send()
        expiry = None
        if request.deadline is not None:
            expiry = loop.call_later(request.deadline - time.time(), self._expire, row)
        try:
            return await row.future
        except asyncio.CancelledError:
            self._on_disconnect(row)
            raise
        finally:
            if expiry is not None:
                expiry.cancel()

    def _expire(self, row: _RemoteRow) -> None:
        """Fail a waiting row whose deadline has passed. The replica answers a row that was sent."""
        if self._rows.remove(row) and not row.future.done():
            row.future.set_exception(DeadlineExceeded(self._ref.name, time.monotonic() - row.arrived))

    def _on_disconnect(self, row: _RemoteRow) -> None:
        """Free the place of a disconnected client, and cancel its call."""
        if self._rows.remove(row) or row.group is None:
            return
        if row.group.task is not None and all(other.future.done() for other in row.group.rows):
            row.group.task.cancel()

    def _schedule_send(self) -> None:
        """Send at the end of this turn of the event loop, so that rows of one turn share a call."""
        if not self._sending and self._calls_in_flight < self._max_calls:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    @property
    def _max_calls(self) -> int:
        return MAX_CALLS_PER_REPLICA * max(1, self.route.replicas)

    def _send(self) -> None:
        """Start calls while they are allowed and rows wait."""
        self._sending = False
        rows = self._rows
        while (rows.live or rows.shadows) and self._calls_in_flight < self._max_calls:
            group = _RowGroup(self._next_rows() if rows.live else [rows.shadows.popleft()])
            for row in group.rows:
                row.group = group
            if group.rows:
                self._calls_in_flight += 1
                group.task = asyncio.get_running_loop().create_task(self._send_group(group))
                self._tasks.add(group.task)  # the event loop keeps only weak references
                group.task.add_done_callback(self._tasks.discard)

    def _next_rows(self) -> list[_RemoteRow]:
        """Take as many rows as one call carries, the highest priority first."""
        waiting = self._rows
        rows: list[_RemoteRow] = []
        size = 0
        while waiting.live and len(rows) < MAX_ROWS and (not rows or size + waiting.peek().size <= MAX_BYTES):
            row = waiting.pop()
            if row.future.done():
                continue
            if row.request.expired:
                row.future.set_exception(DeadlineExceeded(self._ref.name, time.monotonic() - row.arrived))
                continue
            size += row.size
            rows.append(row)
        return rows

    async def _send_group(self, group: _RowGroup) -> None:
        response: Any = None
        try:
            # Ray gets pickled bytes: its own pickler inspects every object in Python.
            sent = pickle.dumps([row.request for row in group.rows], pickle.HIGHEST_PROTOCOL)
            calls_counted_by_ray[self._ref] += 1
            response = self._unary.remote(sent)
            results = pickle.loads(await response)
        except asyncio.CancelledError:
            if response is not None:
                response.cancel()
            for row in group.rows:
                row.future.cancel()
            raise
        except Exception as error:
            self._on_group_error(group.rows, error)
        else:
            for row, result in zip(group.rows, results):
                if row.future.done():
                    continue
                if isinstance(result, RelayError):
                    row.future.set_exception(result)
                elif isinstance(result, list):  # chunks: the next requests have calls of their own
                    self._streams = True
                    row.future.set_result(_to_stream(result))
                else:
                    row.future.set_result(result)
        finally:
            self._calls_in_flight -= 1
            self._schedule_send()

    def _on_group_error(self, rows: list[_RemoteRow], error: Exception) -> None:
        retry = self.route.retries and _replica_lost(error)
        for row in reversed(rows):
            row.attempts += 1
            if retry and row.attempts < 2 and not row.future.done():
                row.group = None
                self._rows.put_back(row)
            elif not row.future.done():
                row.future.set_exception(_to_relay_error(error, self._ref, row.request))

    async def _infer_streaming(self, request: InferenceRequest) -> InferenceResponse | ResponseStream:
        for attempt in (1, 2):
            calls_counted_by_ray[self._ref] += 1
            items = self._streaming.remote(request)
            try:
                first: ResponseChunk | RelayError = await items.__anext__()
            except asyncio.CancelledError:
                items.cancel()
                raise
            except StopAsyncIteration:
                raise ReplicaDied("the replica ended the stream before it began") from None
            except Exception as error:
                if attempt == 1 and self.route.retries and _replica_lost(error):
                    continue
                raise _to_relay_error(error, self._ref, request) from None
            if isinstance(first, RelayError):
                raise first
            assert first.head is not None
            if first.last:
                self._streams = bool(self._streams)
                return first.head
            self._streams = True
            return ResponseStream(first.head, self._remaining_chunks(request, first, items))
        raise AssertionError("unreachable")

    async def _remaining_chunks(
        self, request: InferenceRequest, first: ResponseChunk, items: Any
    ) -> AsyncIterator[bytes]:
        try:
            yield first.body
            async for chunk in items:
                if isinstance(chunk, RelayError):
                    raise chunk
                yield chunk.body
        except RelayError:
            raise
        except (asyncio.CancelledError, GeneratorExit):
            items.cancel()  # the client disconnected
            raise
        except Exception as error:
            raise _to_relay_error(error, self._ref, request) from None


class _SocketRequest:
    """A request over a socket, which runs once more where the replica is lost, stopping or being replaced."""

    __slots__ = ("_backend", "_cancel", "_on_done", "_request")

    def __init__(self, backend: RemoteBackend, request: InferenceRequest, on_done: OnDone) -> None:
        self._backend = backend
        self._request = request
        self._on_done = on_done
        self._cancel: Cancel | None = None

    def start(self, client: UdsClient) -> Cancel:
        """Send the request, and return a function that withdraws it."""
        try:
            cancel = client.submit(self._request, self._complete)
        except ConnectionLost as error:
            self._complete(error)
        else:
            self._cancel = self._cancel or cancel
        return self.cancel

    def cancel(self) -> None:
        cancel, self._cancel = self._cancel, None
        if cancel is not None:
            cancel()

    def _complete(self, outcome: Outcome) -> None:
        backend = self._backend
        self._cancel = None  # which refers to this object
        if isinstance(outcome, ConnectionLost) and not backend.retries:
            self._on_done(backend.lost_error())
        elif isinstance(outcome, ConnectionLost | ModelLoading):
            self._cancel = TaskRequest(backend.infer_again(self._request), self._on_done).cancel
        else:
            self._on_done(outcome)


def _cancel_traced(span: Any, cancel: Cancel) -> None:
    tracing.end(span, "caller_left")
    cancel()


def _to_stream(pieces: list[ResponseChunk]) -> ResponseStream:
    async def bodies() -> AsyncIterator[bytes]:
        for chunk in pieces:
            yield chunk.body

    assert pieces[0].head is not None
    return ResponseStream(pieces[0].head, bodies())


def _replica_lost(error: Exception) -> bool:
    """Return whether the replica or the connection to it is gone, so that another may answer."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return False
    return (
        isinstance(error, ray.exceptions.RayError | ConnectionError) or type(error).__name__ == "AioRpcError"
    )


def _to_relay_error(error: Exception, ref: ModelRef, request: InferenceRequest) -> RelayError:
    cause = getattr(error, "cause", None)
    if isinstance(error, RelayError):
        return error
    if isinstance(cause, RelayError):
        return cause
    if isinstance(error, BackPressureError):
        return QueueFull(ref.name, request.version, "its replicas hold as many requests as they may")
    if isinstance(error, ray.serve.exceptions.DeploymentUnavailableError):
        return NoReplica(ref.name, request.version, "its replicas could not be started")
    if _replica_lost(error):
        return ReplicaDied(f"a replica of {ref.app} was lost: {type(error).__name__}")
    log.error("Sending a request to %s failed (request %s)", ref.app, request.request_id, exc_info=error)
    return HandlerFailed(f"{type(error).__name__}: {error}")


class ReplicaClients:
    """The RemoteBackends of this process: one for each version, created on first use."""

    def __init__(self, reader: RoutingTableReader, settings: Settings) -> None:
        self._reader = reader
        self._use_sockets = settings.inference.unix_sockets
        self._backends: dict[ModelRef, RemoteBackend] = {}

    def __call__(self, ref: ModelRef, route: VersionRoute) -> RemoteBackend:
        backend = self._backends.get(ref)
        if backend is None:
            self._remove_unregistered()
            try:
                backend = self._backends[ref] = RemoteBackend(ref, route, self._use_sockets)
            except Exception as error:  # the application does not exist yet
                raise ModelLoading(ref.name, ref.version, f"{type(error).__name__}: {error}") from None
        backend.route = route
        return backend

    def wake(self, ref: ModelRef, route: VersionRoute) -> None:
        """Start a replica of a version that is scaled to zero.

        Raises ModelLoading while its application does not exist.
        """
        self(ref, route).wake()

    def _remove_unregistered(self) -> None:
        models = self._reader.table.models
        for ref in list(self._backends):
            is_known = ref.name in models and ref.version in models[ref.name].versions
            if not is_known and ref.name != POOLS:
                del self._backends[ref]

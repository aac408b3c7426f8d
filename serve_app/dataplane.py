"""One call in, one answer out: the same class behind every door, in replicas and gateways alike.

It picks the version by the table, finds the target that runs it, and times the call once. It
knows no protocol and no Ray: targets come in through the constructor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from random import randrange
from typing import Protocol

from serve_app import ends, tensors, traffic
from serve_app.errors import (
    ClientTimeout,
    DeadlineExceeded,
    Loading,
    ModelNotFound,
    NotFound,
    NoWorker,
    QueueFull,
    RelayError,
    WorkflowNotFound,
)
from serve_app.policy import WHOLE
from serve_app.shadow.mirror import Mirror
from serve_app.signature import Signature
from serve_app.telemetry.metrics import Meters
from serve_app.telemetry.observations import Observations
from serve_app.tensors import Tensor
from serve_app.traffic import Choice
from serve_app.types import Access, Call, Input, ModelRef, Reply, ReplyStream, Table, VersionRow
from serve_app.workflow import Workflow

_ON_THE_WAY = ("idle", "loading")


class Target(Protocol):
    """Something that can answer a call: a runner in this process, or replicas behind a handle."""

    async def infer(self, call: Call) -> Reply | ReplyStream:
        """One call's answer. Raises RelayError."""


class Homes(Protocol):
    """Finds the one replica that has the state of a sequence."""

    async def __call__(self, call: Call, choice: Choice) -> tuple[Choice, Target]:
        """What answers a call of a stateful model, and as which version. Raises RelayError."""


class TableReader:
    """This process's copy of the routing table, and a way to wait for the next one; ``on_table`` gets each."""

    def __init__(self, table: Table = Table(), on_table: Callable[[Table], None] = lambda table: None) -> None:
        self.table = table
        self._changed = asyncio.Event()
        self._on_table = on_table

    def put(self, table: Table) -> None:
        self.table = table
        self._on_table(table)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        """Set when the table after this one comes. Take it before you read the table: nothing is missed then."""
        return self._changed


class DataPlane:
    """``local`` is the version that this process runs itself, if any; ``remote`` reaches the others.

    ``wake`` sees to it that a version without replicas gets one, for the calls that wait here for it. ``homes`` knows
    where the sequences of stateful models are.
    """

    def __init__(
        self,
        reader: TableReader,
        meters: Meters,
        remote: Callable[[ModelRef, VersionRow], Target],
        local: tuple[ModelRef, Target] | None = None,
        patience: float = 30.0,
        wake: Callable[[ModelRef, VersionRow], None] = lambda ref, row: None,
        observations: Observations | None = None,
        mirror: Mirror | None = None,
        homes: Homes | None = None,
        most_items: int = 1000,
    ) -> None:
        self._reader = reader
        self._meters = meters
        self._remote = remote
        self._local_ref, self._local = local or (None, None)
        self._patience = patience  # seconds a call waits for a version that is loading
        self._wake = wake
        self.observations = observations or Observations()
        self._mirror = mirror  # makes copies for shadows
        self._homes = homes
        self._most_items = most_items  # of one workflow's step
        self._waiting: dict[ModelRef, int] = {}
        self._lot = randrange(WHOLE)  # of the last call

    @property
    def table(self) -> Table:
        return self._reader.table

    @property
    def access(self) -> Access | None:
        """Who may do what; None where everybody may do everything."""
        return self._reader.table.access

    async def infer(self, call: Call, before: Table | None = None) -> Reply | ReplyStream:
        """The answer of the version that the table gives this call. Raises RelayError.

        ``before`` is the table at the beginning of the workflow's call whose step this is: what was removed since still
        answers, until the calls that had begun have ended.
        """
        started = time.perf_counter()
        version = ""
        choice: Choice | None = None
        bounded = False  # by the model, more tightly than by the caller
        try:
            if call.expired:
                self.find(call.model, call.version)  # what is not there is not late
                raise DeadlineExceeded(call.model, 0.0)
            self._lot = lot = traffic.after(self._lot)
            try:
                choice = traffic.choose(self._reader.table, call, lot)
            except NotFound:
                if before is None:
                    raise
                choice = traffic.choose(before, call, lot)
            row = choice.row
            version = row.version
            if call.kind == "tensors" and row.signature is not None:
                row.signature.check(map(_typed, call.inputs))
            if row.client_timeout:
                asked, call = call, _bounded(call, row.client_timeout / 1000)
                bounded = call is not asked
            if row.stateful and self._homes is not None:
                if row.replicas == 0 and row.phase != "ready":
                    row = await self._until_ready(call, ModelRef(call.model, version), row)
                choice, target = await self._homes(call, choice._replace(row=row))
                version = choice.row.version
            else:
                target = await self._target(call, row)
            reply = await target.infer(call)
        except RelayError as raised:
            late = bounded and isinstance(raised, DeadlineExceeded)
            error = ClientTimeout(*raised.args) if late else raised
            error.retry_after = raised.retry_after
            error.version = version
            # An unknown name is a caller's word, not a label: it would grow without bound.
            model = call.model if version else ""
            self._meters.request(model, version, error.reason, time.perf_counter() - started, call.version)
            if self._mirror is not None and choice is not None and choice.by_policy:
                self._mirror.offer(call, version, None, 0.0)
            if choice is not None and choice.trial is not None:
                error.arm = choice.told
                self.observations.failed(choice, call.request_id, error.reason)
            if late:
                raise error from None
            raise
        except asyncio.CancelledError:
            self._meters.request(call.model, version, "caller_left", time.perf_counter() - started, call.version)
            raise
        if self._mirror is not None and choice.by_policy:
            self._mirror.offer(call, version, reply, time.perf_counter() - started)
        if isinstance(reply, ReplyStream):
            head = reply.head if choice.trial is None else replace(reply.head, arm=choice.told)
            return ReplyStream(head, _Counted(reply, partial(self._ended, call, choice, reply.head, started)))
        seconds = time.perf_counter() - started
        self._meters.request(call.model, version, "ok", seconds, call.version, reply.timings.queue)
        if choice.trial is not None:
            self.observations.answered(choice, call.request_id, reply, seconds)
            reply = replace(reply, arm=choice.told)
        return reply

    def _ended(self, call: Call, choice: Choice, head: Reply, started: float, status: str) -> None:
        """A streamed reply has come to its end, for better or worse."""
        seconds = time.perf_counter() - started
        self._meters.request(call.model, choice.row.version, status, seconds, call.version, head.timings.queue)
        if choice.trial is None or status == "caller_left":
            return
        if status == "ok":
            self.observations.answered(choice, call.request_id, head, seconds, streamed=True)
        else:
            self.observations.failed(choice, call.request_id, status)

    async def _target(self, call: Call, row: VersionRow) -> Target:
        local = self._local_ref
        if local is not None and local.version == row.version and local.name == call.model:
            assert self._local is not None
            return self._local
        if row.graph is not None:
            return self._workflow(ModelRef(call.model, row.version), row)
        return await self._replicas(call, row)

    async def _replicas(self, call: Call, row: VersionRow) -> Target:
        ref = ModelRef(call.model, row.version)
        if row.replicas == 0 and row.phase != "ready":
            row = await self._until_ready(call, ref, row)
        return self._remote(ref, row)

    def _workflow(self, ref: ModelRef, row: VersionRow) -> Workflow:
        assert row.graph is not None

        async def function(call: Call) -> Reply | ReplyStream:
            return await (await self._replicas(call, row)).infer(call)

        model = partial(self.infer, before=self._reader.table)
        return Workflow(ref, row.graph, model, function, self._meters, self._most_items)

    async def _until_ready(self, call: Call, ref: ModelRef, row: VersionRow) -> VersionRow:
        """Hold a call while its version loads or wakes up: bounded in number by the version's queue, and in time."""
        if row.phase in _ON_THE_WAY and self._waiting.get(ref, 0) >= row.job_queue_size:
            raise self._at_start(QueueFull(ref.name, call.version, "the version is loading and its queue is full"), row)
        until = time.time() + (row.wake_timeout or self._patience)
        if call.deadline is not None:
            until = min(until, call.deadline)
        self._waiting[ref] = self._waiting.get(ref, 0) + 1
        try:
            while True:
                changed = self._reader.changed
                row = self.find(ref.name, ref.version)
                if row.phase not in _ON_THE_WAY or row.replicas:
                    break
                if row.phase == "idle":
                    with suppress(Loading):
                        self._wake(ref, row)
                try:
                    await asyncio.wait_for(changed.wait(), until - time.time())
                except asyncio.TimeoutError:
                    if call.expired:
                        raise self._at_start(DeadlineExceeded(call.model, 0.0), row) from None
                    loading = Loading(ref.name, call.version, "its replicas are still loading")
                    raise self._at_start(loading, row) from None
        finally:
            self._waiting[ref] -= 1
        if row.phase in ("stopped", "failed") and row.replicas == 0:
            raise NoWorker(ref.name, call.version, row.last_error or "no replica was asked for")
        return row

    def _at_start(self, error: RelayError, row: VersionRow) -> RelayError:
        """A refusal of a version that starts: it is worth to ask again after as long as its last start took."""
        error.retry_after = max(1, ceil(row.start_seconds or row.wake_timeout or self._patience))
        return error

    def find(self, model: str, version: str | None = None) -> VersionRow:
        """The version that such a call would get. Raises ModelNotFound and VersionNotFound."""
        return traffic.choose(self._reader.table, Call(model, version)).row

    def describe(self, model: str, version: str | None = None) -> VersionRow:
        """As ``find``; a workflow takes and gives what its models say. Raises ModelNotFound and VersionNotFound."""
        row = self.find(model, version)
        return row if row.graph is None else replace(row, signature=ends.signature(row.graph, self._signature))

    def _signature(self, model: str, version: str | None) -> Signature | None:
        try:
            return self.describe(model, version).signature
        except NotFound:
            return None

    def find_workflow(self, name: str) -> None:
        """Raises WorkflowNotFound, for a model too."""
        try:
            if self.find(name).graph is not None:
                return
        except ModelNotFound:
            pass
        raise WorkflowNotFound(name)

    def divided(self, model: str) -> bool:
        """Whether calls of a model that name no version may get different ones."""
        row = self._reader.table.models.get(model)
        return row is not None and traffic.whole(row) is None

    @property
    def startup_model(self) -> str | None:
        """The model that start-up loaded, where it is the only one."""
        models = self._reader.table.models.items()
        names = [name for name, row in models if any(v.loaded_at_startup for v in row.versions.values())]
        return names[0] if len(names) == 1 else None

    @property
    def ready(self) -> bool:
        """A table is here, and every version that start-up wanted is ready or has failed."""
        return self._reader.table.generation > 0 and self._reader.table.settled

    @property
    def healthy(self) -> bool:
        """Every default version has the replicas it should have, or time left to get them back."""
        table = self._reader.table
        return all(row.healthy for m in table.models.values() for v, row in m.versions.items() if v == m.default)


def _typed(part: Input) -> Tensor:
    return tensors.received(part.name, part.value, part.content_type or "")


def _bounded(call: Call, seconds: float) -> Call:
    """The call with a deadline at most ``seconds`` away."""
    deadline = time.time() + seconds
    return call if call.deadline is not None and call.deadline <= deadline else replace(call, deadline=deadline)


class _Counted(AsyncIterator[bytes]):
    """A streamed reply's pieces; when they end, or the caller leaves, ``count`` is told once how."""

    def __init__(self, stream: ReplyStream, count: Callable[[str], None]) -> None:
        self._stream = stream
        self._pieces = stream.__aiter__()
        self._count: Callable[[str], None] | None = count

    async def __anext__(self) -> bytes:
        try:
            return await self._pieces.__anext__()
        except StopAsyncIteration:
            self._end("ok")
            raise
        except RelayError as error:
            self._end(error.reason)
            raise

    async def aclose(self) -> None:
        self._end("caller_left")
        await self._stream.aclose()

    def _end(self, status: str) -> None:
        count, self._count = self._count, None
        if count is not None:
            count(status)

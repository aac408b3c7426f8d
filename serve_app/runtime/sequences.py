"""Sequences in front of a batcher: the calls of each one in order, and never two of them in one batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any, Literal

from serve_app import sequence as names
from serve_app.errors import (
    DeadlineExceeded,
    Loading,
    QueueFull,
    RelayError,
    SequenceLost,
    TooManySequences,
    WorkerDied,
)
from serve_app.runtime.admission import Timer
from serve_app.sequence import Keys
from serve_app.telemetry.metrics import Meters
from serve_app.types import Call, ModelRef, Reply, ReplyStream

log = logging.getLogger("torchrelay.sequences")

_STATELESS = ("explain", "describe")  # kinds of calls that belong to no sequence
_REMEMBERED = 1000  # sequences that are no more, so that their callers can be told why

End = Literal["ended", "idle", "timeout", "stopped"]


class _Row:
    """A call of a sequence, until it is answered."""

    __slots__ = ("arrived", "call", "ends", "expiry", "future", "inner")

    def __init__(self, call: Call, future: asyncio.Future[Reply | ReplyStream], ends: bool, arrived: float) -> None:
        self.call = call
        self.future = future
        self.ends = ends  # the sequence, once it is answered
        self.arrived = arrived
        self.expiry: asyncio.TimerHandle | None = None  # while it waits for those before it
        self.inner: asyncio.Future[Any] | None = None  # the batcher's, once it is there


class _Sequence:
    """One that is open."""

    __slots__ = ("begun", "known", "name", "named", "opened", "row", "since", "streams", "timer", "waiting")

    def __init__(self, name: str, named: bool, known: bool, now: float) -> None:
        self.name = name
        self.named = named  # its caller said that it begins, or gets its name from us
        self.known = known  # its caller knows its name
        self.begun = False  # its first answer has said so
        self.opened = now
        self.since = now  # when it was last busy
        self.row: _Row | None = None  # that is in the batcher
        self.streams = 0  # answers that go on while the next row runs
        self.waiting: deque[_Row] = deque()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        return self.row is not None or self.streams > 0


class Sequences:
    """A batcher's face for a stateful model; ``replica`` is this one, whose name is part of the names made here.

    A call says by the headers ``keys`` which sequence it belongs to, and whether that begins or ends. One that names
    none begins a sequence, whose name stands in its answer. One that names its caller's own begins it where it is not
    open, unless it was said to begin before: it is lost then, as names made here are where they are not open.

    ``most`` bounds the open sequences of a version, divided among its replicas (see ``allot``); ``queue_size`` the
    rows of one sequence that wait for the row before them. A sequence ends when its caller or its handler says so,
    ``max_idle`` seconds after its last answer, or ``timeout`` seconds after it began; 0: it does not.

    ``overlap``: a row goes to the batcher while streams of rows before it go on; else it waits for their end.
    ``on_end`` hears of each that ended, and why. ``grace`` is how long ``close`` waits for sequences to end, in
    seconds. ``clock`` counts seconds; ``timer`` is ``call_later``.
    """

    def __init__(
        self,
        batcher: Any,
        ref: ModelRef,
        meters: Meters,
        replica: str,
        *,
        keys: Keys,
        most: int = 1,
        least: int = 1,
        queue_size: int = 1,
        max_idle: float = 0.0,
        timeout: float = 0.0,
        overlap: bool = False,
        grace: float = 0.0,
        on_end: Callable[[str, End], None] = lambda name, why: None,
        clock: Callable[[], float] = time.monotonic,
        timer: Timer | None = None,
    ) -> None:
        self._batcher = batcher
        self._ref = ref
        self._meters = meters
        self._replica = replica
        self._keys = keys
        self._most = most
        self._least = least  # that a replica has room for, however many share the limit
        self._share = max(least, most)
        self._queue_size = queue_size
        self._max_idle = max_idle or inf
        self._timeout = timeout or inf
        self._overlap = overlap
        self._grace = grace
        self._on_end = on_end
        self._clock = clock
        self._timer = timer
        self._open: dict[str, _Sequence] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()  # those that were said to begin, and why they ended
        self._waiting = 0  # rows
        self._refusal = ""
        self._emptied = asyncio.Event()

    # What a batcher has

    def configure(self, **limits: Any) -> None:
        """Take new limits of batches."""
        self._batcher.configure(**limits)

    @property
    def pending(self) -> int:
        """Rows that wait, for a batch or for the row before them."""
        return self._batcher.pending + self._waiting

    @property
    def ongoing(self) -> int:
        """Rows that wait and rows that run."""
        return self._batcher.ongoing + self._waiting

    @property
    def retry_after(self) -> int:
        return self._batcher.retry_after

    async def submit(self, call: Call) -> Reply | ReplyStream:
        """The call's answer. Raises RelayError."""
        answer = self.enqueue(call)
        try:
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                await _leave(answer.result())  # it came as the caller left
            raise

    async def submit_all(self, calls: Sequence[Call]) -> list[Any]:
        """For each call its Reply, its ReplyStream or its RelayError."""
        answers = await asyncio.gather(*(self.submit(call) for call in calls), return_exceptions=True)
        return [answer if not isinstance(answer, asyncio.CancelledError) else WorkerDied() for answer in answers]

    def enqueue(self, call: Call) -> asyncio.Future[Reply | ReplyStream]:
        """The future of the call's answer; cancelling it says that the caller left. Raises RelayError at once."""
        if call.kind in _STATELESS:
            return self._batcher.enqueue(call)
        if call.priority == "shadow":
            raise QueueFull(self._ref.name, call.version, "a copy of a call belongs to no sequence")
        loop = asyncio.get_running_loop()
        self._timer = self._timer or loop.call_later
        sequence, call = self._of(call)
        ends = _says(call, self._keys.end)
        row = _Row(call, loop.create_future(), ends, self._clock())
        if self._in_the_way(sequence):
            if len(sequence.waiting) >= self._queue_size:
                full = QueueFull(self._ref.name, call.version, f"{self._queue_size} rows of {sequence.name!r} wait")
                full.retry_after = self.retry_after
                raise full
            sequence.waiting.append(row)
            self._waiting += 1
            if call.deadline is not None:
                row.expiry = self._timer(call.deadline - time.time(), self._expire, sequence, row)
        else:
            self._run(sequence, row)
        row.future.add_done_callback(partial(self._answered_caller, sequence, row))
        return row.future

    async def close(self) -> None:
        """Begin no more sequences, let those that are open end for a while, then close the batcher."""
        self._refusal = self._refusal or "its replica is stopping"
        if self._open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._emptied.wait(), self._grace)
        for sequence in list(self._open.values()):
            self._end(sequence, "stopped")
        await self._batcher.close()

    def abandon(self, failure: WorkerDied, refusal: str) -> None:
        """This process is of no more use, and the state of its sequences with it."""
        self._refusal = refusal
        self._batcher.abandon(failure, refusal)
        for sequence in list(self._open.values()):
            self._end(sequence, "stopped")

    # Sequences

    @property
    def open(self) -> int:
        """Sequences that are open here."""
        return len(self._open)

    def holds(self, name: str) -> bool:
        """Whether the state of this sequence is here."""
        return name in self._open

    def allot(self, replicas: int) -> None:
        """So many replicas share the limit."""
        self._share = max(self._least, ceil(self._most / max(1, replicas)))

    def _of(self, call: Call) -> tuple[_Sequence, Call]:
        """The call's sequence, which it may begin, and the call with the headers that a handler reads."""
        keys = self._keys
        name = call.headers.get(keys.id, "")
        start = _says(call, keys.start)
        now = self._clock()
        known = bool(name)
        if not known:
            name, start = names.new(self._replica), True
            call = replace(call, headers={**call.headers, keys.id: name, keys.start: "true"})
        sequence = self._open.get(name)
        if sequence is not None and now >= sequence.opened + self._timeout and not start:
            self._end(sequence, "timeout")
            sequence = None
        if sequence is not None:
            if start:
                sequence.opened, sequence.named, sequence.begun = now, True, False
            return sequence, call
        if not start and (name in self._gone or names.replica_of(name)):
            why = self._gone.get(name) or "it has ended, or has been idle for too long"
            raise SequenceLost(self._ref.name, name, why)
        if self._refusal:
            raise Loading(self._ref.name, call.version, self._refusal)
        if len(self._open) >= self._share:
            full = TooManySequences(self._ref.name, self._ref.version, len(self._open))
            full.retry_after = self._next_place(now)
            raise full
        self._gone.pop(name, None)
        sequence = self._open[name] = _Sequence(name, start, known, now)
        self._count()
        return sequence, call

    def _next_place(self, now: float) -> int:
        """The seconds, from 1, after which a sequence ends at the latest of which nobody hears anything more."""
        ends = min((self._due(sequence) for sequence in self._open.values()), default=inf)
        return max(1, ceil(ends - now)) if ends < inf else max(1, ceil(min(self._max_idle, 60.0)))

    def _in_the_way(self, sequence: _Sequence) -> bool:
        return sequence.row is not None or bool(sequence.waiting) or (sequence.streams > 0 and not self._overlap)

    def _run(self, sequence: _Sequence, row: _Row) -> None:
        """Give a row to the batcher. Raises RelayError where that refuses it."""
        try:
            row.inner = self._batcher.enqueue(row.call)
        except RelayError:
            self._rest(sequence)
            if not sequence.begun and not self._in_the_way(sequence):
                self._forget(sequence)  # it has not begun
            raise
        sequence.row = row
        row.inner.add_done_callback(partial(self._answered, sequence, row))

    def _answered(self, sequence: _Sequence, row: _Row, inner: asyncio.Future[Any]) -> None:
        """The batcher has answered a row, or dropped it."""
        sequence.row = None
        answer = None if inner.cancelled() else inner.exception() or inner.result()
        ended = row.ends
        if isinstance(answer, (Reply, ReplyStream)):
            head = answer if isinstance(answer, Reply) else answer.head
            ended |= self._heed(sequence, head)
            head = self._said(sequence, head)
            if isinstance(answer, ReplyStream):
                answer.head = head
                sequence.streams += 1
                answer.at_end(partial(self._stream_ended, sequence, ended))
                ended = False
            else:
                answer = head
        elif not sequence.known:
            ended = True  # nobody can ever ask for it
        future = row.future
        if future.done():
            if isinstance(answer, ReplyStream):
                asyncio.ensure_future(answer.aclose())
        elif answer is None:
            future.cancel()
        elif isinstance(answer, BaseException):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        self._next(sequence, ended)

    def _stream_ended(self, sequence: _Sequence, ended: bool) -> None:
        sequence.streams -= 1
        self._next(sequence, ended)

    def _heed(self, sequence: _Sequence, head: Reply) -> bool:
        """End the sequences that a handler's answer names as ended; whether its own is among them."""
        own = False
        for header, value in head.headers:
            if header.lower() == self._keys.end:
                for name in map(str.strip, value.split(";")):
                    if name == sequence.name:
                        own = True
                    elif name in self._open:
                        self._end(self._open[name], "ended")
        return own

    def _said(self, sequence: _Sequence, head: Reply) -> Reply:
        """The answer with the sequence's name, and with the word that it began where it did."""
        keys = self._keys
        there = {header.lower() for header, _ in head.headers}
        more = []
        if keys.id not in there:
            more.append((keys.id, sequence.name))
        if not sequence.begun and keys.start not in there:
            more.append((keys.start, "true"))
        sequence.begun = sequence.known = True
        return replace(head, headers=(*head.headers, *more)) if more else head

    def _next(self, sequence: _Sequence, ended: bool) -> None:
        """What becomes of a sequence when a row of it, or a stream, is done."""
        if self._open.get(sequence.name) is not sequence:
            return  # it has ended meanwhile
        if ended:
            self._end(sequence, "ended")
            return
        while sequence.waiting and sequence.row is None and (self._overlap or not sequence.streams):
            row = sequence.waiting.popleft()
            self._waiting -= 1
            if row.expiry is not None:
                row.expiry.cancel()
            if row.future.done():
                continue
            try:
                self._run(sequence, row)
            except RelayError as error:
                row.future.set_exception(error)
        self._rest(sequence)

    def _rest(self, sequence: _Sequence) -> None:
        """Look after a sequence that has nothing to do."""
        if not sequence.busy and self._open.get(sequence.name) is sequence:
            sequence.since = self._clock()
            if sequence.timer is None and (due := self._due(sequence)) < inf:
                assert self._timer is not None
                sequence.timer = self._timer(due - sequence.since, self._look, sequence)

    def _due(self, sequence: _Sequence) -> float:
        idle = inf if sequence.busy else sequence.since + self._max_idle
        return min(idle, sequence.opened + self._timeout)

    def _look(self, sequence: _Sequence) -> None:
        """One timer a sequence, moved on when it fires, not one a row."""
        sequence.timer = None
        if sequence.busy:
            return  # it is looked after again when it rests
        now, due = self._clock(), self._due(sequence)
        if now >= due:
            self._end(sequence, "timeout" if now >= sequence.opened + self._timeout else "idle")
        else:
            assert self._timer is not None
            sequence.timer = self._timer(due - now, self._look, sequence)

    def _end(self, sequence: _Sequence, how: End) -> None:
        self._forget(sequence)
        why = {
            "ended": "it has ended",
            "idle": f"it has been idle for {self._max_idle:g} s (sequenceMaxIdleMSec)",
            "timeout": f"its {self._timeout:g} s (sequenceTimeoutMSec) are over",
            "stopped": "its replica was stopped",
        }[how]
        if sequence.named:
            self._gone[sequence.name] = why
            if len(self._gone) > _REMEMBERED:
                self._gone.popitem(last=False)
        while sequence.waiting:
            row = sequence.waiting.popleft()
            self._waiting -= 1
            if row.expiry is not None:
                row.expiry.cancel()
            if not row.future.done():
                row.future.set_exception(SequenceLost(self._ref.name, sequence.name, why))
        self._meters.sequence_ended(self._ref.name, self._ref.version, how)
        self._on_end(sequence.name, how)

    def _forget(self, sequence: _Sequence) -> None:
        self._open.pop(sequence.name, None)
        if sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None
        self._count()
        if not self._open:
            self._emptied.set()
            self._emptied = self._emptied if self._refusal else asyncio.Event()

    def _count(self) -> None:
        self._meters.sequences(self._ref.name, self._ref.version, len(self._open))

    # Rows whose time is over, and callers that leave

    def _expire(self, sequence: _Sequence, row: _Row) -> None:
        if self._withdraw(sequence, row) and not row.future.done():
            row.future.set_exception(DeadlineExceeded(self._ref.name, self._clock() - row.arrived))

    def _answered_caller(self, sequence: _Sequence, row: _Row, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and not self._withdraw(sequence, row) and row.inner is not None:
            row.inner.cancel()

    def _withdraw(self, sequence: _Sequence, row: _Row) -> bool:
        """Whether the row still waited for those before it; it does no more."""
        try:
            sequence.waiting.remove(row)
        except ValueError:
            return False
        self._waiting -= 1
        if row.expiry is not None:
            row.expiry.cancel()
        return True


def _says(call: Call, header: str) -> bool:
    return call.headers.get(header, "").lower() == "true"


async def _leave(answer: Reply | ReplyStream) -> None:
    if isinstance(answer, ReplyStream):
        await answer.aclose()

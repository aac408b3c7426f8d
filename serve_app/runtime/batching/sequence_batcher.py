"""Sequence batching: the requests of a sequence run in order, never two in one batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any

from serve_app.domain import sequence_ids as names
from serve_app.domain.model import ModelRef
from serve_app.domain.request import (
    Cancel,
    InferenceRequest,
    InferenceResponse,
    OnDone,
    Outcome,
    ResponseStream,
)
from serve_app.errors import (
    DeadlineExceeded,
    ModelLoading,
    QueueFull,
    RelayError,
    ReplicaDied,
    SequenceLost,
    TooManySequences,
)
from serve_app.runtime.batching.admission_control import BatchTimer
from serve_app.runtime.batching.interface import RequestBatcher
from serve_app.runtime.batching.sequence_state import EndReason, OpenSequence, SequenceOptions, SequenceRow
from serve_app.telemetry.metrics import Meters

log = logging.getLogger(__name__)
_STATELESS_KINDS = ("explain", "describe")  # kinds of requests that belong to no sequence
_MAX_REMEMBERED = 1000  # ended sequences whose reason is kept for their clients


class SequenceBatcher(RequestBatcher):
    """A batcher for a stateful model, in front of another batcher.

    A request whose headers name no sequence starts one, and the response has its generated name. A name
    chosen by the client starts a sequence where none of that name is open. If that sequence was started
    before, it is lost, as is a generated name that is not open. Generated names contain the id of this
    ``replica``. A sequence ends when the client or the handler ends it, or at a limit of ``options``.

    ``on_end`` is called with the name of each ended sequence and the reason. ``clock`` returns seconds;
    ``timer`` is ``call_later`` of the event loop.
    """

    def __init__(
        self,
        batcher: RequestBatcher,
        ref: ModelRef,
        meters: Meters,
        replica: str,
        options: SequenceOptions,
        *,
        on_end: Callable[[str, EndReason], None] = lambda name, reason: None,
        clock: Callable[[], float] = time.monotonic,
        timer: BatchTimer | None = None,
    ) -> None:
        self._batcher = batcher
        self._ref = ref
        self._meters = meters
        self._replica = replica
        self._keys = options.keys
        self._options = options
        self._max_open = max(options.min_sequences, options.max_sequences)
        self._max_idle = options.max_idle or inf
        self._timeout = options.timeout or inf
        self._on_end = on_end
        self._clock = clock
        self._timer = timer
        self._open: dict[str, OpenSequence] = {}
        # Ended sequences that were started explicitly, and why they ended.
        self._end_reasons: OrderedDict[str, str] = OrderedDict()
        self._rejection_reason = ""
        self._all_ended = asyncio.Event()

    # The interface of a batcher

    def configure(self, **limits: Any) -> None:
        """Apply new limits of batches."""
        self._batcher.configure(**limits)

    @property
    def _waiting(self) -> int:
        """Rows that wait for earlier rows of their sequence."""
        return sum(len(sequence.waiting) for sequence in self._open.values())

    @property
    def pending(self) -> int:
        """Rows that wait, for a batch or for the row before them."""
        return self._batcher.pending + self._waiting

    @property
    def ongoing(self) -> int:
        """Rows that wait or run."""
        return self._batcher.ongoing + self._waiting

    @property
    def retry_after(self) -> int:
        return self._batcher.retry_after

    def submit(self, request: InferenceRequest, on_done: OnDone) -> Cancel:
        if request.kind in _STATELESS_KINDS:
            return self._batcher.submit(request, on_done)
        if request.priority == "shadow":
            raise QueueFull(self._ref.name, request.version, "a copy of a call belongs to no sequence")
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later
        sequence, request = self._resolve_sequence(request)
        row = SequenceRow(request, on_done, self._clock(), ends_sequence=_is_true(request, self._keys.end))
        if self._is_blocked(sequence):
            if len(sequence.waiting) >= self._options.queue_size:
                full = QueueFull(
                    self._ref.name,
                    request.version,
                    f"{self._options.queue_size} rows of {sequence.name!r} wait",
                )
                full.retry_after = self.retry_after
                raise full
            sequence.waiting.append(row)
            if request.deadline is not None:
                row.expiry = self._timer(request.deadline - time.time(), self._expire, sequence, row)
        else:
            self._run(sequence, row)
        return partial(self._on_disconnect, sequence, row)

    async def close(self) -> None:
        """Start no more sequences, wait for open ones, then close the batcher."""
        self._rejection_reason = self._rejection_reason or "its replica is stopping"
        if self._open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), self._options.close_timeout)
        for sequence in list(self._open.values()):
            self._end(sequence, "stopped")
        await self._batcher.close()

    def abandon(self, failure: ReplicaDied, rejection_reason: str) -> None:
        """Fail all rows of this process, and end its sequences, whose state is lost."""
        self._rejection_reason = rejection_reason
        for sequence in list(self._open.values()):  # first, so that no waiting row follows a failed one
            self._end(sequence, "stopped")
        self._batcher.abandon(failure, rejection_reason)

    # Sequences

    @property
    def open(self) -> int:
        """The number of sequences that are open here."""
        return len(self._open)

    def holds(self, name: str) -> bool:
        """Return whether the state of this sequence is here."""
        return name in self._open

    def set_replicas(self, replicas: int) -> None:
        """Set how many replicas share the limit."""
        self._max_open = max(
            self._options.min_sequences, ceil(self._options.max_sequences / max(1, replicas))
        )

    def _resolve_sequence(self, request: InferenceRequest) -> tuple[OpenSequence, InferenceRequest]:
        """Return the request's sequence, which it may start, and the request with the handler's headers."""
        keys = self._keys
        name = names.read_sequence_id(request.headers, keys.id)
        start = _is_true(request, keys.start)
        now = self._clock()
        known = bool(name)
        if not known:
            name, start = names.new_sequence_id(self._replica), True
            request = replace(request, headers={**request.headers, keys.id: name, keys.start: "true"})
        sequence = self._open.get(name)
        if sequence is not None and now >= sequence.opened_at + self._timeout and not start:
            self._end(sequence, "timeout")
            sequence = None
        if sequence is not None:
            if start:
                sequence.opened_at, sequence.was_started, sequence.is_announced = now, True, False
            return sequence, request
        if not start and (name in self._end_reasons or names.replica_of(name)):
            message = self._end_reasons.get(name) or "it has ended, or has been idle for too long"
            raise SequenceLost(self._ref.name, name, message)
        if self._rejection_reason:
            raise ModelLoading(self._ref.name, request.version, self._rejection_reason)
        if len(self._open) >= self._max_open:
            full = TooManySequences(self._ref.name, self._ref.version, len(self._open))
            full.retry_after = self._seconds_to_next_end(now)
            raise full
        self._end_reasons.pop(name, None)
        sequence = self._open[name] = OpenSequence(name, start, known, now, now)
        self._report_count()
        return sequence, request

    def _seconds_to_next_end(self, now: float) -> int:
        """Return the seconds, at least 1, after which an open sequence without further requests ends."""
        ends_sequence = min((self._end_time(sequence) for sequence in self._open.values()), default=inf)
        return (
            max(1, ceil(ends_sequence - now))
            if ends_sequence < inf
            else max(1, ceil(min(self._max_idle, 60.0)))
        )

    def _is_blocked(self, sequence: OpenSequence) -> bool:
        return (
            sequence.row is not None
            or bool(sequence.waiting)
            or (sequence.streams > 0 and not self._options.overlap)
        )

    def _run(self, sequence: OpenSequence, row: SequenceRow) -> None:
        """Pass a row to the batcher. Raises RelayError where the batcher refuses it."""
        sequence.row = row
        try:
            withdraw = self._batcher.submit(row.request, partial(self._on_response, sequence, row))
        except RelayError:
            sequence.row = None
            self._schedule_idle_check(sequence)
            if not sequence.is_announced and not self._is_blocked(sequence):
                self._forget(sequence)  # it has not begun
            raise
        if sequence.row is row:
            row.withdraw = withdraw

    def _on_response(self, sequence: OpenSequence, row: SequenceRow, outcome: Outcome) -> None:
        """Handle a row that the batcher has answered."""
        sequence.row = row.withdraw = None
        ended = row.ends_sequence
        if isinstance(outcome, Exception):
            ended |= not sequence.is_name_known  # no client knows its name
        else:
            head = outcome if isinstance(outcome, InferenceResponse) else outcome.head
            ended |= self._end_named_sequences(sequence, head)
            head = self._with_sequence_headers(sequence, head)
            if isinstance(outcome, ResponseStream):
                outcome.head = head
                sequence.streams += 1
                outcome.add_done_callback(partial(self._stream_ended, sequence, ended))
                ended = False
            else:
                outcome = head
        row.complete(outcome)
        self._advance(sequence, ended)

    def _stream_ended(self, sequence: OpenSequence, ended: bool) -> None:
        sequence.streams -= 1
        self._advance(sequence, ended)

    def _end_named_sequences(self, sequence: OpenSequence, head: InferenceResponse) -> bool:
        """End the sequences that a response names as ended; return whether its own is among them."""
        own = False
        for header, value in head.headers:
            if header.lower() == self._keys.end:
                for name in map(str.strip, value.split(";")):
                    if name == sequence.name:
                        own = True
                    elif name in self._open:
                        self._end(self._open[name], "ended")
        return own

    def _with_sequence_headers(self, sequence: OpenSequence, head: InferenceResponse) -> InferenceResponse:
        """Return the response with the name of the sequence, and with its start where it started."""
        keys = self._keys
        there = {header.lower() for header, _ in head.headers}
        more = []
        if keys.id not in there:
            more.append((keys.id, sequence.name))
        if not sequence.is_announced and keys.start not in there:
            more.append((keys.start, "true"))
        sequence.is_announced = sequence.is_name_known = True
        return replace(head, headers=(*head.headers, *more)) if more else head

    def _advance(self, sequence: OpenSequence, ended: bool) -> None:
        """Continue or end a sequence after a row or a stream of it is done."""
        if self._open.get(sequence.name) is not sequence:
            return  # it has ended meanwhile
        if ended:
            self._end(sequence, "ended")
            return
        while sequence.waiting and sequence.row is None and (self._options.overlap or not sequence.streams):
            row = sequence.waiting.popleft()
            if row.expiry is not None:
                row.expiry.cancel()
            try:
                self._run(sequence, row)
            except RelayError as error:
                row.resolve(error)
        self._schedule_idle_check(sequence)

    def _schedule_idle_check(self, sequence: OpenSequence) -> None:
        """Set the idle timer of a sequence that has nothing to do."""
        if not sequence.busy and self._open.get(sequence.name) is sequence:
            sequence.idle_since = self._clock()
            if sequence.timer is None and (due := self._end_time(sequence)) < inf:
                assert self._timer is not None
                sequence.timer = self._timer(due - sequence.idle_since, self._check_idle, sequence)

    def _end_time(self, sequence: OpenSequence) -> float:
        idle = inf if sequence.busy else sequence.idle_since + self._max_idle
        return min(idle, sequence.opened_at + self._timeout)

    def _check_idle(self, sequence: OpenSequence) -> None:
        """End an idle sequence, or move its timer on: one timer for each sequence, not for each row."""
        sequence.timer = None
        if sequence.busy:
            return  # checked again when it is idle
        now, due = self._clock(), self._end_time(sequence)
        if now >= due:
            self._end(sequence, "timeout" if now >= sequence.opened_at + self._timeout else "idle")
        else:
            assert self._timer is not None
            sequence.timer = self._timer(due - now, self._check_idle, sequence)

    def _end(self, sequence: OpenSequence, reason: EndReason) -> None:
        self._forget(sequence)
        message = {
            "ended": "it has ended",
            "idle": f"it has been idle for {self._max_idle:g} s (sequenceMaxIdleMSec)",
            "timeout": f"its {self._timeout:g} s (sequenceTimeoutMSec) are over",
            "stopped": "its replica was stopped",
        }[reason]
        if sequence.was_started:
            self._end_reasons[sequence.name] = message
            if len(self._end_reasons) > _MAX_REMEMBERED:
                self._end_reasons.popitem(last=False)
        while sequence.waiting:
            row = sequence.waiting.popleft()
            row.resolve(SequenceLost(self._ref.name, sequence.name, message))
        ref = self._ref
        self._meters.instrument("torchrelay_sequences_ended", ref.name, ref.version, reason).inc()
        self._on_end(sequence.name, reason)

    def _forget(self, sequence: OpenSequence) -> None:
        self._open.pop(sequence.name, None)
        if sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None
        self._report_count()
        if not self._open:
            self._all_ended.set()
            self._all_ended = self._all_ended if self._rejection_reason else asyncio.Event()

    def _report_count(self) -> None:
        ref = self._ref
        self._meters.instrument("torchrelay_sequences", ref.name, ref.version).set(len(self._open))

    # Expired rows and disconnected clients

    def _expire(self, sequence: OpenSequence, row: SequenceRow) -> None:
        if self._withdraw(sequence, row):
            row.resolve(DeadlineExceeded(self._ref.name, self._clock() - row.arrived))

    def _on_disconnect(self, sequence: OpenSequence, row: SequenceRow) -> None:
        """Discard the row of a client that disconnected before it had an outcome."""
        if row.is_done:
            return
        row.on_done = None
        if not self._withdraw(sequence, row) and row.withdraw is not None:
            row.withdraw()
            sequence.row = row.withdraw = None
            self._advance(sequence, row.ends_sequence or not sequence.is_name_known)

    def _withdraw(self, sequence: OpenSequence, row: SequenceRow) -> bool:
        """Remove a row that waits for earlier rows; return whether it did."""
        try:
            sequence.waiting.remove(row)
        except ValueError:
            return False
        if row.expiry is not None:
            row.expiry.cancel()
        return True


def _is_true(request: InferenceRequest, header: str) -> bool:
    return request.headers.get(header, "").lower() == "true"

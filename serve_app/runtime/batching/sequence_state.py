"""The options of a sequence batcher, its rows, and the state of one open sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.sequence_ids import SequenceHeaders

EndReason = Literal["ended", "idle", "timeout", "stopped"]


class SequenceRow:
    """A request of a sequence, until it is answered."""

    __slots__ = ("arrived", "batch_future", "ends_sequence", "expiry", "future", "request")

    def __init__(
        self,
        request: InferenceRequest,
        future: asyncio.Future[InferenceResponse | ResponseStream],
        ends_sequence: bool,
        arrived: float,
    ) -> None:
        self.request = request
        self.future = future
        self.ends_sequence = ends_sequence  # whether the sequence ends with this row
        self.arrived = arrived
        self.expiry: asyncio.TimerHandle | None = None  # while it waits for earlier rows
        self.batch_future: asyncio.Future[Any] | None = None  # the batcher's future, once the row is there


class OpenSequence:
    """An open sequence."""

    __slots__ = (
        "idle_since",
        "is_announced",
        "is_name_known",
        "name",
        "opened_at",
        "row",
        "streams",
        "timer",
        "waiting",
        "was_started",
    )

    def __init__(self, name: str, was_started: bool, known: bool, now: float) -> None:
        self.name = name
        self.was_started = was_started  # the client started it explicitly, or its name was generated here
        self.is_name_known = known  # the client knows its name
        self.is_announced = False  # a response has announced its start
        self.opened_at = now
        self.idle_since = now  # time of its last activity
        self.row: SequenceRow | None = None  # the row that is in the batcher
        self.streams = 0  # streams that continue while the next row runs
        self.waiting: deque[SequenceRow] = deque()
        self.timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        return self.row is not None or self.streams > 0


@dataclass(frozen=True)
class SequenceOptions:
    """The headers and limits of a version's sequences.

    Times are in seconds, and 0 switches a time limit off. The request headers ``keys`` name the
    sequence of a request, and mark its start and end.

    ``max_sequences`` bounds the open sequences of the version. Its replicas divide it among them (see
    ``SequenceBatcher.set_replicas``), and each has room for ``min_sequences`` at least. ``queue_size``
    bounds the rows of one sequence that wait for the row before them. A sequence ends ``max_idle`` after
    its last response, or ``timeout`` after its start.

    ``overlap``: a row enters the batcher while streams of earlier rows of its sequence continue; otherwise it
    waits for their end. ``close_timeout`` bounds how long ``SequenceBatcher.close`` waits for open sequences.
    """

    keys: SequenceHeaders
    max_sequences: int = 1
    min_sequences: int = 1
    queue_size: int = 1
    max_idle: float = 0.0
    timeout: float = 0.0
    overlap: bool = False
    close_timeout: float = 0.0

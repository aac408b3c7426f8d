"""The options of a sequence batcher, its rows, and the state of one open sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from serve_app.domain.request import Cancel
from serve_app.domain.sequence_ids import SequenceHeaders
from serve_app.runtime.batching.request_queue import PendingRequest

EndReason = Literal["ended", "idle", "timeout", "stopped"]


@dataclass(slots=True, eq=False)
class SequenceRow(PendingRequest):
    """A request of a sequence, until it is answered; ``expiry`` runs while it waits for earlier rows."""

    ends_sequence: bool = False  # whether the sequence ends with this row
    withdraw: Cancel | None = None  # of the batcher, while the row is there


@dataclass(slots=True, eq=False)
class OpenSequence:
    """An open sequence."""

    name: str
    was_started: bool  # the client started it explicitly, or its name was generated here
    is_name_known: bool  # by the client
    opened_at: float
    idle_since: float  # time of its last activity
    is_announced: bool = False  # a response has announced its start
    row: SequenceRow | None = None  # the row that is in the batcher
    streams: int = 0  # streams that continue while the next row runs
    waiting: deque[SequenceRow] = field(default_factory=deque)
    timer: asyncio.TimerHandle | None = None

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

"""Sequence ids, and the replicas that they map to. Pure functions.

A sequence is a series of requests that a stateful model serves in order; one replica holds its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import uuid4

_PREFIX = "ts-seq-"
_UUID_LENGTH = 36  # characters


@dataclass(frozen=True, slots=True)
class SequenceHeaders:
    """The headers of sequences, in lower case: the id, the start flag and the end flag."""

    id: str
    start: str
    end: str


def new_sequence_id(replica: str) -> str:
    """Return an id for a sequence whose state will be in ``replica``; the id contains the replica's."""
    return f"{_PREFIX}{uuid4()}-{replica}"


def replica_of(sequence_id: str) -> str:
    """Return the replica in an id of ``new_sequence_id``; empty for an id that a client chose."""
    end = len(_PREFIX) + _UUID_LENGTH
    return (
        sequence_id[end + 1 :]
        if sequence_id.startswith(_PREFIX) and sequence_id[end : end + 1] == "-"
        else ""
    )

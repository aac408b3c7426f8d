"""Sequence ids, and the replicas that they map to. Pure functions.

A sequence is a series of requests that a stateful model serves in order; one replica holds its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

from serve_app.errors import BadRequest

_PREFIX = "ts-seq-"
_UUID_LENGTH = 36  # characters
MAX_ID_LENGTH = 512  # characters of an id that a client chose; gateways and replicas remember many ids


@dataclass(frozen=True, slots=True)
class SequenceHeaders:
    """The headers of sequences, in lower case: the id, the start flag and the end flag."""

    id: str
    start: str
    end: str


def read_sequence_id(headers: Mapping[str, str], header: str) -> str:
    """Return the sequence id of a request; empty where it has none. Raises BadRequest."""
    id = headers.get(header, "")
    if len(id) > MAX_ID_LENGTH:
        raise BadRequest(f"{header} has {len(id)} characters; it may have {MAX_ID_LENGTH}.")
    return id


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

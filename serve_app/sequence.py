"""The names that sequences go by, and the replicas that these names lead to. Pure functions.

A sequence is the calls that a stateful model answers one after the other; one replica has its state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from uuid import uuid4

_OURS = "ts-seq-"
_UUID = 36  # characters


@dataclass(frozen=True, slots=True)
class Keys:
    """The headers that speak of sequences, in lower case: which it is, that it begins, that it ends."""

    id: str
    start: str
    end: str


def new(replica: str) -> str:
    """A name for a sequence whose state will be in ``replica``; whoever reads it knows where that is."""
    return f"{_OURS}{uuid4()}-{replica}"


def replica_of(name: str) -> str:
    """The replica that is part of a name which ``new`` made; empty for a caller's own names."""
    end = len(_OURS) + _UUID
    return name[end + 1 :] if name.startswith(_OURS) and name[end : end + 1] == "-" else ""


def homes(name: str, replicas: Iterable[str]) -> list[str]:
    """The replicas for a caller's own name, the best first, in the same order for whoever asks.

    Rendezvous hashing: a replica that comes or goes moves no other name than those that it gets or had.
    """
    return sorted(replicas, key=lambda replica: blake2b(f"{replica}\0{name}".encode(), digest_size=8).digest())

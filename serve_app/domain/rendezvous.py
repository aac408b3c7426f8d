"""Rendezvous hashing: the choice of a replica for a key, equal in every process."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def rank_replicas(key: str, replicas: Iterable[str]) -> list[str]:
    """Return the replicas for a key, best first, in the same order for every process.

    When a replica is added or removed, only the keys that it gets or had are moved.
    """
    return sorted(replicas, key=lambda replica: blake2b(f"{replica}\0{key}".encode(), digest_size=8).digest())

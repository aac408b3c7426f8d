"""The choice of a replica by the beginning of a request, for models that cache prefixes.

A hash of the first characters alone sends all conversations with one system prompt to one replica, and once
that is busy, spreads them without regard to their history. This table remembers which replicas received each
prefix, in steps of 256 bytes, so a conversation returns to the replica with its latest turns. Prefixes that
no replica has are distributed by load, and at equal load by rendezvous hashing: all gateways choose the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from serve_app.domain.rendezvous import rank_replicas
from serve_app.domain.request import InferenceRequest

BLOCK_BYTES = 256  # about 64 tokens of English; two pages of the cache on a CPU
MAX_BLOCKS = 64  # of a request: longer prefixes rarely differ only behind 16 KiB
_MAX_PARSED_BYTES = 1 << 20  # 1 ms; of larger bodies the first bytes are compared as they are
_MAX_ENTRIES = 20_000  # 4 MB

# A replica with a prefix gets no further requests while it has more than this above the least busy one: the
# default cache of a replica holds eight requests, and under high load a quarter is the usual variation.
MAX_EXTRA_REQUESTS = 8
MAX_EXTRA_SHARE = 0.25


class PrefixTable:
    """The replicas of one version by the prefixes that they received, the least recently used first."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._replicas: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def choose(self, blocks: Sequence[bytes], in_flight: Mapping[str, int]) -> str:
        """Return a replica for a request with these blocks (``hash_blocks``), and remember it.

        ``in_flight`` holds the number of unanswered requests of each replica. The replica with the longest
        prefix is chosen among those whose number is within the limit; without one, the least busy replica.
        """
        least = min(in_flight.values())
        limit = least + max(MAX_EXTRA_REQUESTS, MAX_EXTRA_SHARE * least)
        lengths = self._find(blocks, in_flight)
        candidates = [replica for replica in lengths if in_flight[replica] <= limit]
        if candidates:
            longest = max(lengths[replica] for replica in candidates)
            candidates = [replica for replica in candidates if lengths[replica] == longest]
        else:
            candidates = [replica for replica, count in in_flight.items() if count == least]
        if not blocks:
            return candidates[0]
        chosen = rank_replicas(blocks[0].hex(), candidates)[0]
        self._remember(blocks, chosen, in_flight)
        return chosen

    def _find(self, blocks: Sequence[bytes], replicas: Mapping[str, int]) -> dict[str, int]:
        """Return how many of the blocks each replica has received, without those that have received none."""
        lengths: dict[str, int] = {}
        for length, block in enumerate(blocks, 1):
            if (received := self._replicas.get(block)) is None:
                break
            lengths |= {replica: length for replica in received if replica in replicas}
        return lengths

    def _remember(self, blocks: Sequence[bytes], chosen: str, replicas: Mapping[str, int]) -> None:
        for block in reversed(blocks):  # a prefix is forgotten from its end
            others = self._replicas.pop(block, ())
            self._replicas[block] = (chosen, *(r for r in others if r != chosen and r in replicas))
        while len(self._replicas) > self._max_entries:
            self._replicas.popitem(last=False)


def hash_blocks(prefix: bytes) -> list[bytes]:
    """Return the hash of each complete block, which includes those before it; at most ``MAX_BLOCKS``."""
    digest, hashes = b"", []
    for end in range(BLOCK_BYTES, min(len(prefix), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        digest = blake2b(digest + prefix[end - BLOCK_BYTES : end], digest_size=16).digest()
        hashes.append(digest)
    return hashes


def read_prefix(request: InferenceRequest) -> bytes:
    """Return the prompt, or the tools and messages of a chat, as it is compared with other requests.

    The name in ``model`` is part of it, because requests of different adapters share no cache. Of a body that
    is no such JSON, the bytes themselves are returned.
    """
    if not request.inputs:
        return b""
    named = (part for part in request.inputs if part.name in ("prompt", "inputs"))
    body = next(named, request.inputs[0]).value
    if len(body) <= _MAX_PARSED_BYTES and body[:64].lstrip().startswith(b"{"):
        try:
            return _encode(orjson.loads(body))
        except ValueError:
            pass  # the model reports it
    return body


def _encode(body: Mapping[str, Any]) -> bytes:
    if "messages" in body:
        return orjson.dumps([body.get("model"), body.get("tools"), body["messages"]])
    return orjson.dumps([body.get("model"), body.get("prompt", body.get("inputs"))])

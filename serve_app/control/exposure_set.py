"""A set of millions of texts in few bytes each: exposures of units, and events that were counted.

The set stores a text's 64-bit hash, and a number beside it. Two of a million texts have the same hash with a
probability of one in thirty million; the second text is then taken for the first. Hashes are sorted and kept
in segments, the newest last: a new segment is small, and is merged with its neighbour once it is as large. A
lookup thus searches some tens of segments, an addition changes few bytes, and the oldest hashes are dropped
by segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

_MAX_SEGMENT_SHARE = 16  # a segment holds at most one part in 16 of the set
_BYTES_PER_ENTRY = 12  # a hash of 8 bytes and a number of 4


def hash_texts(*texts: str) -> int:
    """Return the hash of a text, or of several in their order; any characters are allowed."""
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little")


@dataclass
class _ExposureSegment:
    number: int
    keys: np.ndarray  # sorted
    values: np.ndarray

    @classmethod
    def create(cls, number: int, keys: np.ndarray, values: np.ndarray) -> _ExposureSegment:
        order = np.argsort(keys, kind="stable")
        return cls(number, keys[order], values[order])

    def encode(self) -> bytes:
        return self.keys.tobytes() + self.values.tobytes()


class ExposureSet:
    """A map from hashes to numbers, in segments.

    ``segments`` are the stored ones, by number. As many as ``max_keys`` of the newest keys are never dropped.
    ``changed`` holds the segments to store, by number, with None for a deleted one.
    """

    def __init__(self, max_keys: int, segments: Mapping[int, bytes] | None = None) -> None:
        self._max_keys = max_keys
        self._segments: list[_ExposureSegment] = []
        self.changed: dict[int, bytes | None] = {}
        for number, stored in sorted((segments or {}).items()):
            count = len(stored) // _BYTES_PER_ENTRY
            keys = np.frombuffer(stored, "<u8", count)
            values = np.frombuffer(stored, "<u4", count, 8 * count)
            self._segments.append(_ExposureSegment(number, keys, values))

    def __len__(self) -> int:
        return sum(len(segment.keys) for segment in self._segments)

    def find(self, keys: Iterable[int]) -> dict[int, int]:
        """Return the numbers of the known keys."""
        remaining = np.unique(np.fromiter(keys, "<u8"))
        found: dict[int, int] = {}
        for segment in reversed(self._segments):
            if not len(remaining):
                break
            at = np.minimum(np.searchsorted(segment.keys, remaining), len(segment.keys) - 1)
            known = segment.keys[at] == remaining
            found.update(zip(remaining[known].tolist(), segment.values[at[known]].tolist()))
            remaining = remaining[~known]
        return found

    def add(self, new: Mapping[int, int]) -> None:
        """Add unknown keys, each with a number below 2**32."""
        if not new:
            return
        number = self._segments[-1].number + 1 if self._segments else 1
        keys, values = np.fromiter(new.keys(), "<u8", len(new)), np.fromiter(new.values(), "<u4", len(new))
        segment = _ExposureSegment.create(number, keys, values)
        while self._segments and self._should_merge(segment):
            last = self._segments.pop()
            self.changed[segment.number] = None
            keys = np.concatenate((last.keys, segment.keys))
            values = np.concatenate((last.values, segment.values))
            segment = _ExposureSegment.create(last.number, keys, values)
        self._segments.append(segment)
        self.changed[segment.number] = segment.encode()
        excess = len(self) - self._max_keys
        while excess >= len(self._segments[0].keys):
            oldest = self._segments.pop(0)
            excess -= len(oldest.keys)
            self.changed[oldest.number] = None

    def _should_merge(self, segment: _ExposureSegment) -> bool:
        last, added = len(self._segments[-1].keys), len(segment.keys)
        return last < 2 * added and last + added <= self._max_keys // _MAX_SEGMENT_SHARE

"""Texts that are remembered by the million, in few bytes each: who was given what, which events were counted.

Of a text its hash of 64 bits is kept, and beside it a number. Two of a million texts have the same hash with a
probability of one in thirty million; the one that comes second is then taken for the first. What is kept is sorted and
in parts, the newest last: a part is small when it is new, and becomes one with its neighbour when it is as large.
So a look searches some tens of parts, an addition touches few bytes, and the oldest are forgotten a part at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

_SHARE = 16  # a part holds so much of the whole at most


def key(*texts: str) -> int:
    """The hash of a text, or of several in their order, whatever their letters."""
    joined = "\0".join(texts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(joined, digest_size=8).digest(), "little")


@dataclass
class _Part:
    number: int
    keys: np.ndarray  # sorted
    values: np.ndarray

    @classmethod
    def of(cls, number: int, keys: np.ndarray, values: np.ndarray) -> _Part:
        order = np.argsort(keys, kind="stable")
        return cls(number, keys[order], values[order])

    @property
    def stored(self) -> bytes:
        return self.keys.tobytes() + self.values.tobytes()


class Roll:
    """``parts``: those that were stored, by number. ``keep``: as many of the newest keys are never forgotten.

    ``changed`` has what is to be stored: the parts by number, None for one that is no more.
    """

    def __init__(self, keep: int, parts: Mapping[int, bytes] | None = None) -> None:
        self._keep = keep
        self._parts: list[_Part] = []
        self.changed: dict[int, bytes | None] = {}
        for number, stored in sorted((parts or {}).items()):
            count = len(stored) // 12
            keys = np.frombuffer(stored, "<u8", count)
            self._parts.append(_Part(number, keys, np.frombuffer(stored, "<u4", count, 8 * count)))

    def __len__(self) -> int:
        return sum(len(part.keys) for part in self._parts)

    def find(self, keys: Iterable[int]) -> dict[int, int]:
        """The numbers of those keys that are known."""
        asked = np.unique(np.fromiter(keys, "<u8"))
        found: dict[int, int] = {}
        for part in reversed(self._parts):
            if not len(asked):
                break
            at = np.minimum(np.searchsorted(part.keys, asked), len(part.keys) - 1)
            known = part.keys[at] == asked
            found.update(zip(asked[known].tolist(), part.values[at[known]].tolist()))
            asked = asked[~known]
        return found

    def add(self, new: Mapping[int, int]) -> None:
        """Remember keys that are not known yet, each with a number below 2**32."""
        if not new:
            return
        number = self._parts[-1].number + 1 if self._parts else 1
        keys, values = np.fromiter(new.keys(), "<u8", len(new)), np.fromiter(new.values(), "<u4", len(new))
        part = _Part.of(number, keys, values)
        while self._parts and self._belongs_to(part):
            before = self._parts.pop()
            self.changed[part.number] = None
            both = np.concatenate((before.keys, part.keys)), np.concatenate((before.values, part.values))
            part = _Part.of(before.number, *both)
        self._parts.append(part)
        self.changed[part.number] = part.stored
        over = len(self) - self._keep
        while over >= len(self._parts[0].keys):
            oldest = self._parts.pop(0)
            over -= len(oldest.keys)
            self.changed[oldest.number] = None

    def _belongs_to(self, part: _Part) -> bool:
        before, more = len(self._parts[-1].keys), len(part.keys)
        return before < 2 * more and before + more <= self._keep // _SHARE

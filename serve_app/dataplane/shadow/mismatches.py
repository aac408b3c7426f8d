"""The worst mismatches, with the inputs and both responses: bounded, and redacted.

Redacted values never leave the process that received them: the documents are built there.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import orjson

from serve_app.dataplane.shadow.comparison import ResponseComparison
from serve_app.dataplane.stored_values import to_stored_input, to_stored_response
from serve_app.domain.request import InferenceRequest, InferenceResponse

MAX_STORED_BYTES = 4096  # bytes that are kept of each input and of each output


@dataclass(frozen=True)
class Mismatch:
    """A stored mismatch; ``key`` identifies the input, so that the same input is stored once; ``document``
    is JSON.
    """

    key: str
    distance: float
    document: dict[str, Any]


class WorstMismatches:
    """The worst ``limit`` of the added mismatches; of equal ones the first."""

    def __init__(self, limit: int, mismatches: Iterable[Mismatch] = ()) -> None:
        self._limit = limit
        self._kept: dict[str, Mismatch] = {}
        for disagreement in mismatches:
            self.add(disagreement)

    def __iter__(self) -> Iterator[Mismatch]:
        """Iterate from the worst mismatch."""
        return iter(sorted(self._kept.values(), key=lambda kept: -kept.distance))

    def __len__(self) -> int:
        return len(self._kept)

    def accepts(self, distance: float) -> bool:
        """Return whether a mismatch of this distance could be stored."""
        return len(self._kept) < self._limit or any(
            kept.distance < distance for kept in tuple(self._kept.values())
        )

    def add(self, disagreement: Mismatch) -> None:
        known = self._kept.get(disagreement.key)
        if known is not None:
            if known.distance < disagreement.distance:
                self._kept[disagreement.key] = disagreement
            return
        if not self.accepts(disagreement.distance):
            return
        self._kept[disagreement.key] = disagreement
        if len(self._kept) > self._limit:
            # The last one of the least: who came first stays.
            del self._kept[min(reversed(self._kept.values()), key=lambda kept: kept.distance).key]


def build_mismatch(
    call: InferenceRequest,
    live: InferenceResponse,
    other: InferenceResponse,
    found: ResponseComparison,
    redact: tuple[str, ...],
) -> Mismatch:
    """Return the stored form of two different responses, without their headers."""
    inputs = [{"name": part.name, **to_stored_input(part, redact, MAX_STORED_BYTES)} for part in call.inputs]
    stored = {
        "request_id": call.request_id,
        "time": round(time.time(), 3),
        "reason": found.why,
        "distance": found.distance,
        **found.measures,
        "inputs": inputs,
        "live": to_stored_response(live, redact, MAX_STORED_BYTES),
        "shadow": to_stored_response(other, redact, MAX_STORED_BYTES),
    }
    hidden = any("redacted" in part for part in inputs)  # then equal inputs cannot be recognized
    key = blake2b(
        orjson.dumps([call.kind, call.request_id if hidden else inputs]), digest_size=16
    ).hexdigest()
    return Mismatch(key, found.distance, stored)

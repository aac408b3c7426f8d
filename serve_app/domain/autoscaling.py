"""How a version's replicas follow its load, as a frozen value and as the document that operators write.

Names are Ray Serve's, whose autoscaler it is that scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Literal

from serve_app import documents
from serve_app.errors import BadRequest


@dataclass(frozen=True)
class Autoscaling:
    """What holds between a version's ``min_workers`` and ``max_workers``, where they differ. Times are in seconds.

    ``requests``: so many replicas that each has ``target_ongoing_requests`` rows to do, waiting and running.
    ``latency``: so many that 95 % of the rows are answered within ``target_p95_ms``.
    """

    __pydantic_config__ = documents.STRICT
    policy: Literal["requests", "latency"] = "requests"
    target_ongoing_requests: float | None = None  # None: two batches
    target_p95_ms: float | None = None
    upscale_delay_s: float = 3.0  # for which more must be wanted before there is more
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0  # of the last replica
    look_back_period_s: float = 10.0  # over which load and latency are looked at


KEYS = tuple(f.name for f in fields(Autoscaling))
_SHORTEST = 2.0  # seconds to look back: replicas say once a second how they fare


def read(document: Any, before: Autoscaling = Autoscaling()) -> Autoscaling:
    """``before`` with what an operator's document says of it. Raises BadRequest, which names the key and the cure."""
    if not isinstance(document, Mapping):
        raise BadRequest('autoscaling is a mapping, such as {"target_ongoing_requests": 4}.')
    known = documents.write(before)
    if document.get("policy", known["policy"]) == "requests":
        known["target_p95_ms"] = None
    try:
        scaling = documents.read(Autoscaling, {**known, **document})
    except documents.Misread as error:
        raise BadRequest(f"autoscaling: {error}") from None
    if wrong := _wrong(scaling):
        raise BadRequest(f"autoscaling: {wrong}")
    return scaling


def write(scaling: Autoscaling) -> dict[str, Any]:
    """The document that ``read`` takes for it, without what it does not say."""
    return {key: value for key, value in documents.write(scaling).items() if value is not None}


def whole(scaling: Autoscaling | None, batch_size: int) -> Autoscaling:
    """What holds for a version with such batches where it says nothing else."""
    scaling = scaling or Autoscaling()
    return replace(scaling, target_ongoing_requests=scaling.target_ongoing_requests or 2.0 * batch_size)


def _wrong(scaling: Autoscaling) -> str:
    numbers = {key: value for key in KEYS if isinstance(value := getattr(scaling, key), float)}
    for key, value in numbers.items():
        lowest = _SHORTEST if key == "look_back_period_s" else 0.0
        if not isfinite(value) or value < lowest or (key.startswith("target_") and value == 0):
            wanted = "above 0" if key.startswith("target_") else f"from {lowest:g}"
            return f"{key} is a number {wanted}, and is {value:g}"
    if scaling.policy == "latency" and scaling.target_p95_ms is None:
        return "the policy 'latency' wants target_p95_ms: the milliseconds within which 95 % of the rows are answered"
    if scaling.policy == "requests" and scaling.target_p95_ms is not None:
        return "target_p95_ms is for the policy 'latency'; ask for that, or leave the target out"
    return ""

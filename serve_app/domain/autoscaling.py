"""Autoscaling of a version's replicas, as a frozen value and as the document that operators write.

Names are those of Ray Serve, whose autoscaler is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, Literal

from serve_app.domain import validation
from serve_app.errors import BadRequest


@dataclass(frozen=True)
class Autoscaling:
    """The policy between a version's ``min_workers`` and ``max_workers``, where they differ. Times are in
    seconds.

    ``requests``: each replica has ``target_ongoing_requests`` rows, waiting and running. ``latency``: 95 % of
    the rows are answered within ``target_p95_ms``.
    """

    __pydantic_config__ = validation.STRICT
    policy: Literal["requests", "latency"] = "requests"
    target_ongoing_requests: float | None = None  # None: two batches
    target_p95_ms: float | None = None
    upscale_delay_s: float = 3.0  # that the load must last before replicas are added
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0  # of the last replica
    look_back_period_s: float = 10.0  # over which load and latency are averaged


KEYS = tuple(f.name for f in fields(Autoscaling))
_MIN_LOOK_BACK_S = 2.0  # replicas report once a second


def read(document: Any, before: Autoscaling = Autoscaling()) -> Autoscaling:
    """Return ``before`` with the changes of an operator's document.

    Raises BadRequest, which names the key and the remedy.
    """
    if not isinstance(document, Mapping):
        raise BadRequest('autoscaling is a mapping, such as {"target_ongoing_requests": 4}.')
    values = validation.write(before)
    if document.get("policy", values["policy"]) == "requests":
        values["target_p95_ms"] = None
    return validation.read_request(Autoscaling, {**values, **document}, "autoscaling", _find_error)


def write(scaling: Autoscaling) -> dict[str, Any]:
    """Return the document that ``read`` parses, without the keys that are None."""
    return {key: value for key, value in validation.write(scaling).items() if value is not None}


def with_defaults(scaling: Autoscaling | None, batch_size: int) -> Autoscaling:
    """Return the settings with every default filled in for this batch size."""
    scaling = scaling or Autoscaling()
    return replace(scaling, target_ongoing_requests=scaling.target_ongoing_requests or 2.0 * batch_size)


def _find_error(scaling: Autoscaling) -> str:
    numbers = {key: value for key in KEYS if isinstance(value := getattr(scaling, key), float)}
    for key, value in numbers.items():
        minimum = _MIN_LOOK_BACK_S if key == "look_back_period_s" else 0.0
        if not isfinite(value) or value < minimum or (key.startswith("target_") and value == 0):
            expected = "above 0" if key.startswith("target_") else f"from {minimum:g}"
            return f"{key} is a number {expected}, and is {value:g}"
    if scaling.policy == "latency" and scaling.target_p95_ms is None:
        return (
            "the policy 'latency' wants target_p95_ms: "
            "the milliseconds within which 95 % of the rows are answered"
        )
    if scaling.policy == "requests" and scaling.target_p95_ms is not None:
        return "target_p95_ms is for the policy 'latency'; ask for that, or leave the target out"
    return ""

"""Autoscaling of a version's replicas, as a frozen value and as the document that operators write.

Names are those of Ray Serve, whose autoscaler is used, except for the policies in ``OWN_POLICIES``: there
``control/scaling.py`` sets the number of replicas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from serve_app.domain import validation
from serve_app.domain.validation import documented
from serve_app.errors import BadRequest

Policy = Literal["requests", "latency", "prometheus", "external"]
OWN_POLICIES = ("prometheus", "external")
# The keys of a policy that no other policy has.
_KEYS = {"latency": ("target_p95_ms",), "prometheus": ("query", "target_value")}
_NOUNS = {"target_p95_ms": "target", "query": "query", "target_value": "target"}
_MAX_QUERY = 4096  # characters


@dataclass(frozen=True)
class Autoscaling:
    """The policy between a version's ``min_workers`` and ``max_workers``, where they differ. Times are in
    seconds.

    ``requests``: each replica has ``target_ongoing_requests`` rows, waiting and running. ``latency``: 95 % of
    the rows are answered within ``target_p95_ms``. ``prometheus``: the value of ``query`` for each replica is
    ``target_value``. ``external``: another program sets the number of replicas.
    """

    __pydantic_config__ = validation.STRICT
    policy: Policy = "requests"
    target_ongoing_requests: float | None = None  # None: two batches
    target_p95_ms: float | None = None
    query: str | None = None  # PromQL, with one value as its result
    target_value: float | None = None
    upscale_delay_s: float = 3.0  # that the load must last before replicas are added
    downscale_delay_s: float = 60.0
    downscale_to_zero_delay_s: float = 300.0  # of the last replica
    look_back_period_s: float = 10.0  # over which load and latency are averaged

    @property
    def is_own(self) -> bool:
        """Return whether Ray Serve's autoscaler has no part in it."""
        return self.policy in OWN_POLICIES


class ReplicaCount(TypedDict):
    """The replicas of a version whose number another program sets."""

    replicas: Annotated[int, documented("The number that is set, within the version's bounds.")]
    running: int
    min: int
    max: int


@dataclass(frozen=True)
class ReplicaRequest:
    """A number of replicas that another program requests."""

    __pydantic_config__ = validation.STRICT
    replicas: Annotated[int, documented("Beyond the version's bounds, the bound is set.", minimum=0)]


def read_replicas(document: Any) -> int:
    """Return the number of replicas of a document. Raises BadRequest."""
    count = validation.read_request(ReplicaRequest, document, "replicas").replicas
    if count < 0:
        raise BadRequest(f"replicas is a whole number from 0, and is {count}.")
    return count


KEYS = tuple(f.name for f in fields(Autoscaling))
_MIN_LOOK_BACK_S = 2.0  # replicas report once a second


def read(document: Any, before: Autoscaling = Autoscaling()) -> Autoscaling:
    """Return ``before`` with the changes of an operator's document.

    The keys of another policy than its own are dropped from ``before``. Raises BadRequest, which names the
    key and the remedy.
    """
    if not isinstance(document, Mapping):
        raise BadRequest('autoscaling is a mapping, such as {"target_ongoing_requests": 4}.')
    values = validation.write(before)
    policy = document.get("policy", values["policy"])
    values |= {key: None for owner, keys in _KEYS.items() if owner != policy for key in keys}
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
            "the policy 'latency' needs target_p95_ms: "
            "the milliseconds within which 95 % of the rows are answered"
        )
    if scaling.policy == "prometheus" and not (scaling.query and scaling.target_value):
        return (
            "the policy 'prometheus' needs query, in PromQL, and target_value: its value for each replica, "
            'such as {"query": "sum(queue_length)", "target_value": 10}'
        )
    if scaling.query and len(scaling.query) > _MAX_QUERY:
        return f"query has {len(scaling.query)} characters; at most {_MAX_QUERY} are allowed"
    for owner, keys in _KEYS.items():
        for key in keys:
            if owner != scaling.policy and getattr(scaling, key) is not None:
                return (
                    f"{key} is for the policy '{owner}'; select that policy, or leave the {_NOUNS[key]} out"
                )
    return ""

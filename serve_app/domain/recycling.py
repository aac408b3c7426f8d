"""Recycling of replicas: the limits after which a healthy replica is replaced by a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pydantic

from serve_app.domain import validation
from serve_app.errors import BadRequest

RecyclingReason = Literal["age", "requests", "memory"]
MIN_AGE_S = 60.0  # below it replicas would do little but start
MIN_REQUESTS = 100


def _at_least(minimum: float) -> pydantic.AfterValidator:
    """Return the validator of a limit that is 0 or not below ``minimum``."""

    def check(value: float) -> float:
        if 0 < value < minimum:
            raise ValueError(f"a limit is at least {minimum:g}, or replicas do little but start; 0: no limit")
        return value

    return pydantic.AfterValidator(check)


@dataclass(frozen=True)
class Recycling:
    """The limits of one replica; 0: no limit."""

    __pydantic_config__ = validation.STRICT
    # seconds since its model was ready
    max_age_s: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False), _at_least(MIN_AGE_S)] = 0.0
    max_requests: Annotated[int, pydantic.Field(ge=0), _at_least(MIN_REQUESTS)] = 0  # rows that it has run
    # resident memory of its process; of a sharded version's largest one
    max_memory_mib: Annotated[int, pydantic.Field(ge=0)] = 0

    @property
    def is_limited(self) -> bool:
        return any((self.max_age_s, self.max_requests, self.max_memory_mib))


def read_stored(document: Any, before: Recycling) -> Recycling:
    """Return the limits as ``read`` does, from a version that may be older than the minimums.

    A limit below its minimum is the minimum: the version has been accepted, and must start.
    """
    least = {"max_age_s": MIN_AGE_S, "max_requests": MIN_REQUESTS}
    raised = {key: max(low, document[key]) for key, low in least.items() if document.get(key)}
    return read({**document, **raised}, before)


def read(document: Any, before: Recycling = Recycling()) -> Recycling:
    """Return ``before`` with the changes of a document. Raises BadRequest, which names the key."""
    if not isinstance(document, Mapping):
        raise BadRequest('recycling is a mapping, such as {"max_age_s": 86400}.')
    return validation.read_request(Recycling, {**validation.write(before), **document}, "recycling")

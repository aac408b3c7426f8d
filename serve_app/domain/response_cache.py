"""The response cache of a version: the policy that ``response_cache`` in its model-config.yaml sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pydantic

from serve_app.domain import validation

_MAX_BYTES = 1 << 40
_MAX_TTL_S = 31_536_000.0


@dataclass(frozen=True)
class CachePolicy:
    """The limits of the stored responses of a version, in each process that answers its requests."""

    __pydantic_config__ = validation.STRICT
    max_bytes: Annotated[int, pydantic.Field(ge=1, le=_MAX_BYTES)] = 64 << 20
    ttl_s: Annotated[float, pydantic.Field(gt=0, le=_MAX_TTL_S)] = 300.0  # for which a response is used
    vary: tuple[str, ...] = ()  # request headers that the handler reads, beside Accept and Content-Type


def read(document: Any) -> CachePolicy:
    """Return the policy of a document. Raises BadRequest, which names the key and the value."""
    return validation.read_request(CachePolicy, document, "response_cache")

"""Authorization of requests, by the keys in the routing table; every process decides alike.

A route calls ``authorize`` once, before it reads the body, with the right that it needs. It calls
``require_model`` when it knows the model. Where no key is required, both do nothing.
"""

from __future__ import annotations

import re
import time
from hashlib import sha256

from serve_app.domain.access import AccessTable, KeyGrant, Right
from serve_app.errors import ExpiredToken, InvalidToken, MissingPermission, MissingToken, ModelNotAllowed
from serve_app.protocols.http.exchange import HttpExchange

_BEARER = re.compile(r"Bearer\s+(\S+)\s*", re.ASCII)


def resolve_grant(access: AccessTable, authorization: str | None, *rights: Right) -> KeyGrant:
    """Return the grant of the key in an Authorization header. Raises AccessDenied.

    The grant has at least one of ``rights``. Keys are looked up by digest, so the time that this takes
    reveals nothing about them.
    """
    if authorization is None:
        raise MissingToken()
    key = authorization[7:] if authorization.startswith("Bearer ") else ""
    grant = access.grants.get(sha256(key.encode("latin-1")).digest())
    if grant is None:  # a wrong key, or a right one with other white space around it
        bearer = _BEARER.fullmatch(authorization)
        grant = (
            access.grants.get(sha256(bearer[1].encode("latin-1")).digest()) if bearer is not None else None
        )
        if grant is None:
            raise InvalidToken()
    if grant.expires is not None and time.time() >= grant.expires:
        raise ExpiredToken()
    if grant.rights.isdisjoint(rights):
        raise MissingPermission(rights[0])
    return grant


def authorize(access: AccessTable | None, exchange: HttpExchange, *rights: Right) -> None:
    """Check that the request's key has one of ``rights``, and store its grant. Raises AccessDenied.

    The header is removed from the request: no handler and no log sees the key.
    """
    if access is not None:
        exchange.grant = resolve_grant(access, exchange.headers.pop("authorization", None), *rights)


def require_model(exchange: HttpExchange, model: str) -> None:
    """Check that the key of an authorized request covers ``model``. Raises ModelNotAllowed."""
    if exchange.grant is not None and not exchange.grant.covers(model):
        raise ModelNotAllowed(model)


def get_allowed_models(exchange: HttpExchange) -> tuple[str, ...]:
    """Return the models, as patterns, that the key of an authorized request covers."""
    return exchange.grant.models if exchange.grant is not None else ("*",)

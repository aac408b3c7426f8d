"""Authorization of requests, by the keys in the routing table; every process decides alike.

A route calls ``authorize`` once, before it reads the body, with the right that it needs. It calls
``require_model`` when it knows the model. Where no key is required, both do nothing.
"""

from __future__ import annotations

import re
import time
from hashlib import sha256

from serve_app.domain.access import AccessTable, KeyGrant, Right
from serve_app.domain.audit import Actor
from serve_app.errors import (
    AccessDenied,
    ExpiredToken,
    InvalidToken,
    MissingPermission,
    MissingToken,
    ModelNotAllowed,
)
from serve_app.protocols.http import json_web_tokens
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.telemetry.audit_log import set_actor

_BEARER = re.compile(r"Bearer\s+(\S+)\s*", re.ASCII)


def resolve_grant(access: AccessTable, authorization: str | None, *rights: Right) -> KeyGrant:
    """Return the grant of the key in an Authorization header. Raises AccessDenied.

    The grant has at least one of ``rights``, where they are given. Keys are looked up by digest, so the time
    that this takes reveals nothing about them.
    """
    if authorization is None:
        raise MissingToken()
    key = authorization[7:] if authorization.startswith("Bearer ") else ""
    digest = sha256(key.encode("latin-1")).digest()
    grant = access.grants.get(digest)
    if grant is None and access.jwt is not None:
        grant = json_web_tokens.get_verifier(access.jwt).find_cached(digest)
    if grant is None:
        grant = _resolve_slowly(access, authorization)
    if grant.expires is not None and time.time() >= grant.expires:
        raise ExpiredToken()
    if rights:
        check_rights(grant, *rights)
    return grant


def check_rights(grant: KeyGrant, *rights: Right) -> None:
    """Raise MissingPermission where the grant has none of ``rights``."""
    if grant.rights.isdisjoint(rights):
        raise MissingPermission(rights[0])


def _resolve_slowly(access: AccessTable, authorization: str) -> KeyGrant:
    """Return the grant of a key with other white space around it, or of a token that is not cached."""
    bearer = _BEARER.fullmatch(authorization)
    if bearer is None:
        raise InvalidToken()
    grant = access.grants.get(sha256(bearer[1].encode("latin-1")).digest())
    if grant is not None:
        return grant
    if access.jwt is None:
        raise InvalidToken()
    return json_web_tokens.get_verifier(access.jwt).verify(bearer[1])


def authorize(access: AccessTable | None, exchange: HttpExchange, *rights: Right) -> None:
    """Check that the request's key has one of ``rights``, and store its grant. Raises AccessDenied.

    The header is removed from the request: no handler and no log sees the key. The grant of a key without
    these rights is stored too, for the logs.
    """
    if access is not None:
        exchange.grant = grant = resolve_grant(access, exchange.headers.pop("authorization", None))
        access.add_cache_salt(exchange.headers, grant)
        check_rights(grant, *rights)
    if "infer" not in rights:  # management
        set_actor(create_actor(exchange.grant, exchange.client))


def check_again(access: AccessTable | None, exchange: HttpExchange) -> None:
    """Check that an authorized request's key is valid still: it may be revoked while the body arrives.

    Raises AccessDenied.
    """
    if access is not None and exchange.grant is not None:
        headers = dict(exchange.scope["headers"])
        resolve_grant(access, headers[b"authorization"].decode("latin-1"))


def is_still_allowed(access: AccessTable | None, exchange: HttpExchange, model: str, right: Right) -> bool:
    """Return whether the key of a request whose response lasts has neither expired nor been revoked."""
    if access is None:
        return True
    values = [value for name, value in exchange.scope["headers"] if name == b"authorization"]
    try:
        return resolve_grant(access, values[-1].decode("latin-1") if values else None, right).covers(model)
    except AccessDenied:
        return False


def create_actor(grant: KeyGrant | None, address: str) -> Actor:
    """Return the author of a request for the audit log."""
    return Actor(grant.name or "unnamed", address) if grant is not None else Actor(address=address)


def require_model(exchange: HttpExchange, model: str) -> None:
    """Check that the key of an authorized request covers ``model``. Raises ModelNotAllowed."""
    if exchange.grant is not None and not exchange.grant.covers(model):
        raise ModelNotAllowed(model)


def get_allowed_models(exchange: HttpExchange) -> tuple[str, ...]:
    """Return the models, as patterns, that the key of an authorized request covers."""
    return exchange.grant.models if exchange.grant is not None else ("*",)

"""May this request do what it asks for? Decided from the keys in the routing table, the same in every process.

A door asks once, before it reads the body: ``admit`` with the right that its route wants, and ``cover``
with the model when it knows that. Where no key is wanted, neither does anything.
"""

from __future__ import annotations

import re
import time
from hashlib import sha256

from serve_app.doors.exchange import Exchange
from serve_app.errors import ExpiredToken, InvalidToken, MissingToken, WrongModel, WrongRole
from serve_app.types import Access, Grant, Right

_BEARER = re.compile(r"Bearer\s+(\S+)\s*", re.ASCII)


def grant(access: Access, authorization: str | None, *rights: Right) -> Grant:
    """What the key in an Authorization header may do, one of ``rights`` among others. Raises AccessDenied.

    Keys are compared as entries of a table of digests, so how long that takes says nothing about them.
    """
    if authorization is None:
        raise MissingToken()
    key = authorization[7:] if authorization.startswith("Bearer ") else ""
    found = access.grants.get(sha256(key.encode("latin-1")).digest())
    if found is None:  # a wrong one, or a right one among other white space
        bearer = _BEARER.fullmatch(authorization)
        found = access.grants.get(sha256(bearer[1].encode("latin-1")).digest()) if bearer is not None else None
        if found is None:
            raise InvalidToken()
    if found.expires is not None and time.time() >= found.expires:
        raise ExpiredToken()
    if found.rights.isdisjoint(rights):
        raise WrongRole(rights[0])
    return found


def admit(access: Access | None, exchange: Exchange, *rights: Right) -> None:
    """Let a request pass that shows a key with one of ``rights``. Raises AccessDenied.

    The header is taken off the request: no handler and no log gets to see the key.
    """
    if access is not None:
        exchange.grant = grant(access, exchange.headers.pop("authorization", None), *rights)


def cover(exchange: Exchange, model: str) -> None:
    """Raises WrongModel where the key of an admitted request is not for ``model``."""
    if exchange.grant is not None and not exchange.grant.covers(model):
        raise WrongModel(model)


def within(exchange: Exchange) -> tuple[str, ...]:
    """The models, as patterns, that the key of an admitted request is for."""
    return exchange.grant.models if exchange.grant is not None else ("*",)

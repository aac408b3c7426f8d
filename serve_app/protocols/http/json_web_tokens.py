"""Verification of JSON Web Tokens by the policy and the public keys in the routing table.

A result is cached by the token's digest until the token expires, so that a request with a known token costs
one look-up. Management fetches the public keys; a token with an unknown key is refused, and Management
refreshes them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import jwt

from serve_app.domain.access import JWT_PREFIX, ROLES, JwtPolicy, KeyGrant, Right
from serve_app.errors import ExpiredToken, InvalidToken

MAX_TOKEN_SIZE = 8192  # bytes
_MAX_CACHED = 10_000
_MAX_NAME_LENGTH = 200
_MAX_PATTERNS = 100
_KEY_TYPES = {"R": "RSA", "P": "RSA", "E": "EC"}  # by the first letter of the algorithm


class TokenVerifier:
    """The verification of tokens under one policy, with a cache of its results."""

    def __init__(self, policy: JwtPolicy) -> None:
        self.policy = policy
        self.has_unknown_key = False  # a token named a key that is not in the set
        self._roles = dict(policy.roles)
        self._keys = json.loads(policy.keys)["keys"] if policy.keys else []
        self._parsed: dict[tuple[str, str], Any] = {}  # public keys by id and algorithm
        self._cache: OrderedDict[bytes, KeyGrant] = OrderedDict()

    def find_cached(self, digest: bytes) -> KeyGrant | None:
        """Return the grant of a token that was verified before."""
        grant = self._cache.get(digest)
        if grant is not None:
            self._cache.move_to_end(digest)
        return grant

    def verify(self, token: str) -> KeyGrant:
        """Return the grant of a token. Raises InvalidToken and ExpiredToken."""
        if len(token) > MAX_TOKEN_SIZE or token.count(".") != 2:
            raise InvalidToken()
        policy = self.policy
        try:
            header = jwt.get_unverified_header(token)
            key, algorithm = self._find_key(header)
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=policy.audience,
                issuer=policy.issuer,
                leeway=policy.leeway,
                options={"require": ["exp", "iss", "aud"]},
            )
            grant = self._read_grant(claims)
        except jwt.ExpiredSignatureError:
            raise ExpiredToken() from None
        except (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            raise InvalidToken() from None
        self._cache[sha256(token.encode("latin-1")).digest()] = grant
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return grant

    def _find_key(self, header: Mapping[str, Any]) -> tuple[Any, str]:
        """Return the public key that a token's header names, and its algorithm. Raises ValueError."""
        algorithm, id = header.get("alg"), header.get("kid")
        if algorithm not in self.policy.algorithms:
            raise ValueError("alg")
        if "crit" in header:
            raise ValueError("crit")
        if id is None and len(self._keys) == 1:
            [key] = self._keys
        else:
            key = next((key for key in self._keys if "kid" in key and key["kid"] == id), None)
        if key is None:
            self.has_unknown_key = True
            raise ValueError("kid")
        key_type = _KEY_TYPES.get(algorithm[0], "") if algorithm != "EdDSA" else "OKP"
        if key["kty"] != key_type or key.get("alg", algorithm) != algorithm:
            raise ValueError("alg")
        index = key.get("kid", ""), algorithm
        parsed = self._parsed.get(index)
        if parsed is None:
            parsed = self._parsed[index] = jwt.PyJWK(key, algorithm).key
        return parsed, algorithm

    def _read_grant(self, claims: Mapping[str, Any]) -> KeyGrant:
        """Return the grant of verified claims. Raises ValueError and TypeError."""
        policy = self.policy
        name = _find_claim(claims, policy.name_claim)
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= _MAX_NAME_LENGTH:
            raise ValueError("name")
        rights: set[Right] = set()
        for value in _to_list(_find_claim(claims, policy.role_claim)):
            if value in self._roles:
                rights |= ROLES[self._roles[value]]
        models = policy.models
        if policy.models_claim:
            models = tuple(_to_list(_find_claim(claims, policy.models_claim)))
        expires = int(claims["exp"]) + policy.leeway
        return KeyGrant(frozenset(rights), models, expires, f"{JWT_PREFIX}{name}", policy.limits)


def _find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path of names with dots; None where there is none."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _to_list(value: Any) -> list[str]:
    """Return the texts of a claim that is a text or a list; others are left out."""
    values = value[:_MAX_PATTERNS] if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, str) and item]


_verifier: TokenVerifier | None = None


def get_verifier(policy: JwtPolicy) -> TokenVerifier:
    """Return this process's verifier; a changed policy or public key discards the cached results."""
    global _verifier
    verifier = _verifier
    if verifier is None or (verifier.policy is not policy and verifier.policy != policy):
        verifier = _verifier = TokenVerifier(policy)
    verifier.policy = policy  # the same object is recognized faster next time
    return verifier


def take_unknown_key() -> bool:
    """Return whether a token named an unknown key since the last call."""
    verifier = _verifier
    if verifier is None or not verifier.has_unknown_key:
        return False
    verifier.has_unknown_key = False
    return True

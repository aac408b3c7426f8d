"""The settings of keys and of JSON Web Tokens: items of the section ``auth``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal
from urllib.parse import urlsplit

import pydantic

from serve_app.domain.access import JwtPolicy, KeyLimits, Role
from serve_app.domain.validation import STRICT
from serve_app.errors import ConfigurationError

_Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]  # asymmetric ones only: with a public key as a shared secret, every client could sign
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class KeySettings:
    """A key of the operator: its digest, or the variable that holds it, never the key itself."""

    __pydantic_config__ = STRICT

    name: str = ""
    key: str = ""  # "sha256:<64 hex digits>" or "env:NAME"
    role: Role = "infer"
    models: tuple[str, ...] | str = "*"  # patterns of the models that it is for
    limits: KeyLimits = field(default_factory=KeyLimits)  # over auth.default_limits

    @property
    def patterns(self) -> tuple[str, ...]:
        return _to_tuple(self.models)

    def find_owner(self, digest: bytes) -> str:
        """Return the name under which the key owns what it creates; a key without a name has one, too."""
        return self.name or f"key-{digest.hex()[:12]}"

    def digest(self, environ: Mapping[str, str]) -> bytes:
        """Return the key's SHA-256. Raises ConfigurationError, which never shows the configured key."""
        kind, _, value = self.key.partition(":")
        where = f"auth.keys, the key named {self.name!r}"
        if kind == "sha256" and re.fullmatch("[0-9a-fA-F]{64}", value):
            return bytes.fromhex(value)
        if kind != "env" or not value:
            cure = "write sha256: and the key's digest (`printf %s KEY | sha256sum`), or env: and a variable"
            raise ConfigurationError(where, f"a key does not stand here in plain text; {cure}")
        key = environ.get(value, "")
        if not key or key.split() != [key]:
            raise ConfigurationError(
                where, f"the variable {value} must hold the key, which is one word; set it"
            )
        return hashlib.sha256(key.encode()).digest()


def _to_tuple(value: tuple[str, ...] | str) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class JwtSettings:
    """JSON Web Tokens of an OpenID Connect provider, which are accepted beside keys."""

    __pydantic_config__ = STRICT

    issuer: str  # the claim iss
    audience: tuple[str, ...] | str  # the claim aud holds one of these
    jwks_url: str = ""  # of the issuer's public keys; https, or http on this machine
    jwks_file: str = ""  # instead of the URL
    algorithms: tuple[_Algorithm, ...] = ("RS256", "ES256")
    leeway: Annotated[float, pydantic.Field(ge=0, le=300)] = 30.0  # seconds that clocks may differ
    name_claim: str = "sub"  # the owner is "jwt:" and its value
    role_claim: str = "role"  # a text or a list; realm_access.roles is a claim in a claim
    roles: Mapping[str, Role] = field(
        default_factory=lambda: {"infer": "infer", "observe": "observe", "manage": "manage"}
    )  # the role of each value of role_claim; other values have none
    models_claim: str = ""  # a pattern or a list of them; a token without the claim covers no model
    models: tuple[str, ...] | str = "*"  # patterns of every token, without models_claim
    limits: KeyLimits = field(default_factory=KeyLimits)  # of each subject, over auth.default_limits
    cache_seconds: Annotated[float, pydantic.Field(ge=10)] = 300.0  # between two fetches of the public keys

    def __post_init__(self) -> None:
        """Raise ValueError for an issuer without one source of public keys."""
        if not self.issuer or not self.audience or not self.algorithms:
            raise ValueError("auth.jwt needs an issuer, an audience and an algorithm")
        if bool(self.jwks_url) == bool(self.jwks_file):
            raise ValueError("auth.jwt needs jwks_url or jwks_file")
        url = urlsplit(self.jwks_url)
        is_safe = url.scheme == "https" or (url.scheme == "http" and url.hostname in _LOOPBACK)
        if self.jwks_url and not is_safe:
            raise ValueError("auth.jwt.jwks_url must be https: who changes the keys can sign tokens")

    def to_policy(self, default_limits: KeyLimits, keys: str) -> JwtPolicy:
        """Return the rules for readers; ``keys``: the issuer's public keys as a JWK set."""
        return JwtPolicy(
            self.issuer,
            _to_tuple(self.audience),
            self.algorithms,
            self.leeway,
            self.name_claim,
            self.role_claim,
            self.models_claim,
            tuple(sorted(self.roles.items())),
            _to_tuple(self.models),
            self.limits.with_default(default_limits),
            keys,
        )

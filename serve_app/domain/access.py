"""API keys: the rights of each key, the models that it covers, its limits, and the name of its owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Literal

import pydantic

from serve_app.domain.validation import STRICT

Right = Literal["infer", "observe", "manage", "token"]
Role = Literal["infer", "observe", "manage"]
CACHE_SALT = "cache_salt"  # the header that the handler llm reads
JWT_PREFIX = "jwt:"  # of the names of owners that are subjects of JSON Web Tokens
ROLES: dict[Role, frozenset[Right]] = {
    "infer": frozenset({"infer"}),
    "observe": frozenset({"observe"}),
    "manage": frozenset({"infer", "observe", "manage"}),
}

_Limit = Annotated[float, pydantic.Field(ge=0, le=1e9, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0, le=10**12)]


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key over all models and protocols. None: the default; 0: no limit."""

    __pydantic_config__ = STRICT

    requests_per_second: _Limit | None = None
    burst: _Limit | None = None  # requests (and rows) at once; by default those of one second
    rows_per_second: _Limit | None = None
    concurrency: _Count | None = None  # requests in progress
    tokens_per_minute: _Limit | None = None  # of prompts and completions
    requests_per_day: _Count | None = None  # a day begins at 0:00 UTC

    def with_default(self, default: KeyLimits) -> KeyLimits | None:
        """Return the limits in force; None where there is no limit."""
        values = {
            name: getattr(default, name) if value is None else value
            for name, value in dataclasses.asdict(self).items()
        }
        limits = KeyLimits(**{name: value or None for name, value in values.items()})
        return None if limits == KeyLimits(burst=limits.burst) else limits

    def exceeds(self, other: KeyLimits | None) -> bool:
        """Return whether one of these limits is wider than that of ``other``; both are in force."""
        if other is None:
            return False
        for item in dataclasses.fields(self):
            bound, value = getattr(other, item.name), getattr(self, item.name)
            if item.name == "burst":
                bound, value = bound or other.requests_per_second, value or self.requests_per_second
            if bound and (not value or value > bound):
                return True
        return False


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """The rights of one key, its models, and its expiry.

    ``name`` identifies the owner of what is created with the key; a renewed or rotated key keeps it.
    ``limits`` are in force; None: no limit. Use is counted by ``id``, by the name where it is empty: a later
    key of the same name has another id.
    """

    rights: frozenset[Right]
    models: tuple[str, ...] = ("*",)  # patterns
    expires: float | None = None  # in seconds of time.time(); None: never
    name: str = ""  # of the owner, and for the logs
    limits: KeyLimits | None = None
    id: str = ""

    def covers(self, model: str) -> bool:
        return matches(model, self.models)

    def may_see(self, owner: str, model: str) -> bool:
        """Return whether the key may see what ``owner`` created for ``model``: its own, or as a manager."""
        return (owner == self.name and owner != "") or ("manage" in self.rights and self.covers(model))


@dataclass(frozen=True, slots=True)
class KeyDemand:
    """The demand for a key in one process: requests a second, and those admitted since ``day`` began."""

    rate: float
    day: int  # since the epoch; -1: no limit by day
    day_requests: int


@dataclass(frozen=True, slots=True)
class KeyShare:
    """The share of a key's limits that one process may admit, and the day's requests of all processes."""

    share: float  # 0: none is free
    day: int
    day_requests: int


@dataclass(frozen=True, slots=True)
class JwtPolicy:
    """The rules by which JSON Web Tokens are accepted, with the public keys of their issuer."""

    issuer: str
    audience: tuple[str, ...]
    algorithms: tuple[str, ...]
    leeway: float  # seconds
    name_claim: str
    role_claim: str
    models_claim: str  # empty: every token has ``models``
    roles: tuple[tuple[str, Role], ...]  # the role of a claim's value
    models: tuple[str, ...]  # patterns
    limits: KeyLimits | None = None
    keys: str = field(default="", repr=False)  # a JWK set as JSON; empty before one was fetched


@dataclass(frozen=True, slots=True)
class AccessTable:
    """The grants of all keys, by the SHA-256 of the key. An unknown key has no rights.

    With ``jwt`` a key that is not in ``grants`` may be a JSON Web Token. With ``isolates_prefix_cache``,
    requests have the name of their key's owner in the header ``cache_salt``.
    """

    grants: Mapping[bytes, KeyGrant] = field(repr=False)
    jwt: JwtPolicy | None = field(default=None, repr=False)
    isolates_prefix_cache: bool = field(default=False, repr=False)

    def add_cache_salt(self, headers: dict[str, str], grant: KeyGrant) -> None:
        """Add the namespace of cached prefixes to a request's headers, in place of the client's own."""
        if self.isolates_prefix_cache:
            headers[CACHE_SALT] = grant.name

    @property
    def has_several_owners(self) -> bool:
        """Return whether more than one owner may infer."""
        names = {grant.name for grant in self.grants.values() if "infer" in grant.rights}
        return self.jwt is not None or len(names) > 1


def matches(model: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a model's name matches one of ``patterns`` (``*``, ``team-*``)."""
    return "*" in patterns or any(fnmatchcase(model, pattern) for pattern in patterns)

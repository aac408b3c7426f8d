"""API keys: the rights of each key, and the models that it covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

Right = Literal["infer", "observe", "manage", "token"]


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """The rights of one key, its models, and its expiry."""

    rights: frozenset[Right]
    models: tuple[str, ...] = ("*",)  # patterns
    expires: float | None = None  # in seconds of time.time(); None: never
    name: str = ""  # for the logs

    def covers(self, model: str) -> bool:
        return matches(model, self.models)


@dataclass(frozen=True, slots=True)
class AccessTable:
    """The grants of all keys, by the SHA-256 of the key. An unknown key has no rights."""

    grants: Mapping[bytes, KeyGrant] = field(repr=False)


def matches(model: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a model's name matches one of ``patterns`` (``*``, ``team-*``)."""
    return "*" in patterns or any(fnmatchcase(model, pattern) for pattern in patterns)

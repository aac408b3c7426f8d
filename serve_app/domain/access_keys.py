"""Keys that are created through the API: the stored key, and the documents for clients."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pydantic
from typing_extensions import NotRequired, TypedDict

from serve_app.domain import validation
from serve_app.domain.access import KeyLimits, Role
from serve_app.domain.validation import STRICT, PendingStatus, documented

MAX_GRACE_S = 30 * 86_400.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RESERVED_NAMES = ("predict",)  # a route of the inference port: /{model}/predict
_Seconds = Annotated[float, pydantic.Field(gt=0, le=100 * 366 * 86_400, allow_inf_nan=False)]


@dataclass(frozen=True)
class KeyRequest:
    """A key to create."""

    __pydantic_config__ = STRICT

    name: Annotated[str, documented("The name, which owns what the key creates.", pattern=_NAME.pattern)]
    role: Role = "infer"
    models: tuple[str, ...] | str = "*"  # patterns
    limits: KeyLimits = field(default_factory=KeyLimits)
    expires_in: _Seconds | None = None  # seconds; None: never

    def find_error(self) -> str:
        """Return the error of the values together; empty where there is none."""
        if not _NAME.fullmatch(self.name) or self.name in _RESERVED_NAMES:
            return "name: it has 1 to 63 letters, digits, '_', '.' and '-', and begins with a letter or digit"
        if not self.patterns or not all(self.patterns) or len(self.patterns) > 100:
            return "models: it is a pattern, or a list of 1 to 100 patterns, none of them empty"
        return ""

    @property
    def patterns(self) -> tuple[str, ...]:
        return (self.models,) if isinstance(self.models, str) else self.models


@dataclass(frozen=True)
class RotationRequest:
    """A rotation; the old key is valid for ``grace`` seconds."""

    __pydantic_config__ = STRICT

    grace: Annotated[float, pydantic.Field(ge=0, le=MAX_GRACE_S, allow_inf_nan=False)] = 3600.0


@dataclass(frozen=True)
class KeyRecord:
    """What the database has of a key, besides its digests. Times are in seconds since the epoch."""

    name: str
    role: Role
    models: tuple[str, ...]
    limits: KeyLimits
    created: float
    creator: str  # the name of the key that created it
    expires: float | None = None
    rotated: float | None = None
    previous_expires: float | None = None  # of the key before the last rotation


@dataclass(frozen=True)
class StoredKey:
    """A key by its digest, and the digest before its last rotation."""

    document: KeyRecord
    digest: bytes
    previous_digest: bytes | None = None


class KeyDocument(TypedDict):
    """A key, without the key itself. Times are in seconds since the epoch."""

    name: str
    source: Annotated[
        Literal["api", "settings", "torchserve"], documented("Only those of the API can be changed.")
    ]
    rights: list[str]
    models: list[str]
    limits: dict[str, float]
    created: float | None
    expires: float | None
    rotated: float | None
    previous_expires: Annotated[float | None, documented("The end of a rotation's grace.")]


class NewKeyDocument(KeyDocument):
    key: Annotated[str, documented("The key, which is returned only once.")]
    status: NotRequired[PendingStatus]


class KeyList(TypedDict):
    keys: list[KeyDocument]


def read(document: Any) -> KeyRequest:
    """Return a key to create. Raises BadRequest."""
    return validation.read_request(KeyRequest, document, "key", KeyRequest.find_error)


def read_rotation(document: Any) -> RotationRequest:
    """Return a rotation. Raises BadRequest."""
    return validation.read_request(RotationRequest, document, "rotation")

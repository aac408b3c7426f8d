"""Records of the audit log: who changed what through the management APIs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

ANONYMOUS = "anonymous"  # requests of a server that requires no keys, and refused ones without a known key
MAX_PAGE_SIZE = 1000


@dataclass(frozen=True)
class Actor:
    """The author of a change: the name of a key, and the client's address."""

    name: str = ANONYMOUS
    address: str = ""


@dataclass(frozen=True)
class AuditRecord:
    """A management change, or a refused or failed attempt of one.

    ``before`` and ``after`` have the fields that differ, by the changed object.
    """

    action: str
    subject: str  # the model, workflow, experiment or key; the path of a refused request
    result: str = "ok"  # or "refused: " or "failed: ", and the reason
    actor: str = ANONYMOUS
    address: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


class AuditDocument(TypedDict):
    """A record; ``before`` and ``after`` have the fields that differ, by the changed object."""

    id: int
    time: float
    actor: str
    address: str
    action: str
    subject: str
    result: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True)
class AuditQuery:
    """A filter of records; empty fields match all. Times are seconds since the epoch."""

    limit: int = 100
    actor: str = ""
    action: str = ""
    subject: str = ""
    result: str = ""  # its beginning
    since: float = 0.0
    before_id: int = 0  # of the last record of the previous page; 0: the newest

"""Predictions that are asked for now and answered later: what was asked, how far it is, what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

State = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED: tuple[State, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it came over HTTP, without what proved who sent it; the same door answers it later."""

    model: str
    version: str | None
    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]  # lower-case names
    body: bytes
    request_id: str
    client: tuple[str, int] | None = None
    deadline: float | None = None  # in seconds of time.time()
    key: str = ""  # two requests to a model with the same one are the same
    digest: str = ""  # of what they must have in common then
    webhook: str = ""  # a URL that is told of the end


@dataclass(frozen=True, slots=True)
class Answer:
    """What a door said to such a request. ``retry_after``: seconds, where nobody could answer at that moment."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    retry_after: int | None = None


@dataclass(frozen=True, slots=True)
class Deferral:
    """How far such a prediction is. Times are in seconds since the epoch, 0 while it has not come so far."""

    id: str
    model: str
    version: str | None  # that was asked for
    request_id: str
    created: float
    state: State = "queued"
    started: float = 0.0
    ended: float = 0.0
    expires: float = 0.0
    status: int = 0  # of the answer
    size: int = 0  # bytes that are kept of it
    key: str = ""
    digest: str = ""
    webhook: str = ""
    told: Literal["", "pending", "delivered", "failed"] = ""  # how far its webhook is
    error: str = ""  # why it has no answer, where it failed without one

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def document(self) -> dict[str, Any]:
        """What callers are shown of it."""
        said: dict[str, Any] = {"id": self.id, "state": self.state, "model": self.model, "version": self.version}
        said |= {"request_id": self.request_id, "created": _time(self.created), "started": _time(self.started)}
        said |= {"ended": _time(self.ended), "expires": _time(self.expires), "status": self.status or None}
        said["self"] = f"/async/{self.id}"
        said["result"] = f"/async/{self.id}/result" if self.state in ("done", "failed") else None
        if self.error:
            said["error"] = self.error
        if self.webhook:
            said["webhook"] = {"url": self.webhook, "state": self.told}
        return said


def _time(seconds: float) -> float | None:
    return round(seconds, 3) if seconds else None

"""Asynchronous predictions: the stored request, its state, and the stored response."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app.domain.access import KeyGrant
from serve_app.domain.validation import documented

State = Literal["queued", "running", "done", "failed", "cancelled"]
MAX_LISTED = 1000  # predictions in one response
TERMINAL_STATES: tuple[State, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request as it came over HTTP, without its credentials; the same protocol serves it later."""

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
    key: str = ""  # Idempotency-Key: requests to a model with the same one are the same
    digest: str = ""  # of the content that these must have in common
    webhook: str = ""  # a URL that gets a notification at the end
    owner: str = ""  # the name of its key; empty where no key is required


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """The response of a protocol to a stored request.

    ``retry_after``: seconds, where the model was unavailable.
    """

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    retry_after: int | None = None


class WebhookState(TypedDict):
    url: str
    state: Literal["", "pending", "delivered", "failed"]


class AsyncPredictionDocument(TypedDict):
    """The state of an async prediction. Times are in seconds since the epoch."""

    id: str
    state: State
    model: str
    version: Annotated[str | None, documented("The requested version.")]
    request_id: str
    created: float | None
    started: float | None
    ended: float | None
    expires: float | None
    status: Annotated[int | None, documented("The status of the response.")]
    self: Annotated[str, documented("The path of this document.")]
    result: Annotated[str | None, documented("The path of the response, once there is one.")]
    error: NotRequired[Annotated[str, documented("The reason of a failure without a response.")]]
    webhook: NotRequired[WebhookState]


class AsyncPredictionPage(TypedDict):
    """Async predictions, the newest first."""

    predictions: list[AsyncPredictionDocument]


class AsyncListParameters(TypedDict, total=False):
    limit: Annotated[int, documented("The number of predictions.", minimum=1, maximum=MAX_LISTED)]
    model: Annotated[str, documented("Only predictions of this model.")]
    state: Annotated[State, documented("Only predictions in this state.")]


@dataclass(frozen=True, slots=True)
class AsyncPrediction:
    """The state of an asynchronous prediction. Times are in seconds since the epoch; 0: not yet."""

    id: str
    model: str
    version: str | None  # as requested
    request_id: str
    created: float
    state: State = "queued"
    started: float = 0.0
    ended: float = 0.0
    expires: float = 0.0
    status: int = 0  # of the response
    size: int = 0  # bytes of the stored request or response
    key: str = ""
    digest: str = ""
    webhook: str = ""
    webhook_state: Literal["", "pending", "delivered", "failed"] = ""  # of the notification
    error: str = ""  # the cause, where it failed without a response
    owner: str = ""  # the name of the key that created it; empty: no key was required

    @property
    def has_ended(self) -> bool:
        return self.state in TERMINAL_STATES

    def to_dict(self) -> AsyncPredictionDocument:
        """Return the document for clients."""
        document: AsyncPredictionDocument = {
            "id": self.id,
            "state": self.state,
            "model": self.model,
            "version": self.version,
            "request_id": self.request_id,
            "created": _rounded(self.created),
            "started": _rounded(self.started),
            "ended": _rounded(self.ended),
            "expires": _rounded(self.expires),
            "status": self.status or None,
            "self": f"/async/{self.id}",
            "result": f"/async/{self.id}/result" if self.state in ("done", "failed") else None,
        }
        if self.error:
            document["error"] = self.error
        if self.webhook:
            document["webhook"] = {"url": self.webhook, "state": self.webhook_state}
        return document


def select_visible(
    predictions: Iterable[AsyncPrediction], grant: KeyGrant | None, limit: int, model: str, state: str
) -> list[AsyncPrediction]:
    """Return the ``limit`` newest predictions that a key may see; empty texts match all."""
    found = (
        prediction
        for prediction in predictions
        if model in ("", prediction.model)
        and state in ("", prediction.state)
        and (grant is None or grant.may_see(prediction.owner, prediction.model))
    )
    return heapq.nlargest(limit, found, key=lambda prediction: prediction.created)


def _rounded(seconds: float) -> float | None:
    return round(seconds, 3) if seconds else None

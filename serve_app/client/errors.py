"""What a server says no with, as a tree by its reason.

Where no server answered at all, httpx's own errors are raised (``httpx.TransportError``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from websockets.frames import CloseCode


class ServerError(Exception):
    """The server said no: its ``status`` and ``message``, ``detail`` where it has more.

    ``reason`` is its machine-readable word, ``request_id`` is how its log calls the request, ``version`` is what was to
    answer; each empty where it was not said. ``retry_after`` are the seconds after which to come again, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        detail: str = "",
        reason: str = "",
        request_id: str = "",
        retry_after: float | None = None,
        version: str = "",
    ) -> None:
        super().__init__(status, message, detail, reason, request_id, retry_after, version)
        self.status = status
        self.message = message
        self.detail = detail
        self.reason = reason
        self.request_id = request_id
        self.retry_after = retry_after
        self.version = version

    def __str__(self) -> str:
        return f"{self.message} ({self.status})" + (f"\n{self.detail}" if self.detail else "")


class BadRequest(ServerError):
    """What was asked is wrong; asked again it will be."""


class AccessDenied(ServerError):
    """The key that was shown, if any, does not allow it."""


class Forbidden(ServerError):
    """Understood, and refused."""


class NotFound(ServerError):
    """No such model, version, archive, experiment, workflow or route."""


class MethodNotAllowed(ServerError):
    """The route has no such method, or the model API is off."""


class Conflict(ServerError):
    """It is there already, or something else that is in force stands against it."""


class TooLarge(ServerError):
    """The request's body is over the server's limit."""


class Unavailable(ServerError):
    """Nobody can answer now. Nothing ran, unless a workflow was asked, whose first steps may have."""


class QueueFull(Unavailable):
    """The model's queues have no room."""


class Loading(Unavailable):
    """The model's replicas are on their way."""


class NoReplica(Unavailable):
    """Nobody asked for a replica of the model, or none can start."""


class QuotaExceeded(Unavailable):
    """As many calls are under way as the model allows."""


class DeadlineExceeded(ServerError):
    """The time was over before there was an answer, or would have been."""


class WorkerDied(ServerError):
    """The replica that ran the call ended."""


class SequenceLost(ServerError):
    """The state of a sequence is gone."""


class StartFailed(ServerError):
    """No replica could be started; ``detail`` has why."""


class HandlerFailed(ServerError):
    """The model's handler failed, or refused in words of its own."""


class NotYet(ServerError):
    """Stored, and not in force everywhere."""


_BY_REASON: dict[str, type[ServerError]] = {
    **dict.fromkeys(
        (
            "bad_request",
            "missing_parameter",
            "invalid_body",
            "invalid_input",
            "invalid_archive",
            "download_failed",
            "install_failed",
            "configuration",
            "invalid_workflow",
            "invalid_graph",
            "unsupported",
            "caller_too_slow",
            "idempotency_key_reused",
        ),
        BadRequest,
    ),
    **dict.fromkeys(
        ("access_denied", "missing_token", "invalid_token", "expired_token", "wrong_role", "wrong_model"), AccessDenied
    ),
    **dict.fromkeys(("forbidden", "default_version"), Forbidden),
    **dict.fromkeys(
        (
            "not_found",
            "model_not_found",
            "version_not_found",
            "archive_not_found",
            "no_route",
            "experiment_not_found",
            "rollout_not_found",
            "workflow_not_found",
            "unknown_unit",
            "prediction_not_found",
            "cancelled",
            "prediction_lost",
        ),
        NotFound,
    ),
    "method_not_allowed": MethodNotAllowed,
    **dict.fromkeys(("version_exists", "workflow_exists", "in_use"), Conflict),
    "too_large": TooLarge,
    **dict.fromkeys(("unavailable", "sequences", "asynchronous_full", "asynchronous_results"), Unavailable),
    "queue_full": QueueFull,
    "loading": Loading,
    "no_replica": NoReplica,
    "quota": QuotaExceeded,
    **dict.fromkeys(("deadline", "client_timeout"), DeadlineExceeded),
    **dict.fromkeys(("worker_died", "response_timeout"), WorkerDied),
    "sequence_lost": SequenceLost,
    "start_failed": StartFailed,
    **dict.fromkeys(
        (
            "handler_failed",
            "handler_said",
            "invalid_output",
            "count_mismatch",
            "response_too_large",
            "unsupported_output",
            "out_of_memory",
        ),
        HandlerFailed,
    ),
    "in_progress": NotYet,
}
# For answers that come without a reason, such as those of something in between.
_BY_STATUS: dict[int, type[ServerError]] = {
    400: BadRequest,
    401: AccessDenied,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    409: Conflict,
    413: TooLarge,
    422: BadRequest,
    429: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}


def kind(reason: str, status: int) -> type[ServerError]:
    """The class of an error by its reason, or else by its status."""
    return _BY_REASON.get(reason) or _BY_STATUS.get(status, ServerError)


def of(answer: httpx.Response) -> ServerError:
    """The error that an answer, whose body has been read, is in any of the server's dialects."""
    headers = answer.headers
    reason = headers.get("x-torchrelay-reason", "")
    message, detail = _words(answer)
    return kind(reason, answer.status_code)(
        answer.status_code,
        message,
        detail,
        reason,
        headers.get("x-request-id", ""),
        seconds(headers.get("retry-after")),
        headers.get("x-model-version", ""),
    )


def ended(end: Mapping[str, Any]) -> ServerError:
    """The error that an answer over a WebSocket ended with."""
    status, reason, said = end["status"], end.get("reason", ""), end.get("error", {})
    message, detail = said.get("message", "The model's answer has this status."), said.get("detail") or ""
    wait = end.get("retry_after")
    return kind(reason, status)(status, message, detail, reason, end["request_id"], wait, end["version"])


def closed(code: int, words: str) -> ServerError | None:
    """The error that a WebSocket was closed with; None where it was closed for no fault of the caller's."""
    if code == CloseCode.MESSAGE_TOO_BIG:
        return TooLarge(413, words, reason="too_large")
    if code == CloseCode.POLICY_VIOLATION:
        return BadRequest(400, words, reason="bad_request")
    return None


def seconds(text: str | None) -> float | None:
    """What a Retry-After asks for; None where it names no number of seconds."""
    return float(text) if text is not None and text.isdecimal() else None


def _words(answer: httpx.Response) -> tuple[str, str]:
    """The message of an answer, and its detail."""
    try:
        said: Any = answer.json()
        error = said.get("error", said)  # TorchServe's dialect has its words at the top
        if isinstance(error, str):
            return error, ""
        return str(error["message"]), str(error.get("detail") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        limit = answer.headers.get("x-torchrelay-limit")
        if limit:
            return f"The request's body is too large: {limit}", ""
        return answer.text or answer.reason_phrase, ""

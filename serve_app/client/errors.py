"""The errors that a server responds with, as a tree by their reasons.

Where no server responds, httpx's own errors are raised; ``TransportError`` is their base class.
"""

from __future__ import annotations

import ssl
import sys
from typing import Any

import httpx
from httpx import TransportError

__all__ = [
    "AuthenticationError",
    "BadRequestError",
    "ConflictError",
    "DeadlineExceededError",
    "HandlerFailedError",
    "InProgressError",
    "MethodNotAllowedError",
    "ModelLoadingError",
    "NoReplicaError",
    "NotFoundError",
    "PermissionDeniedError",
    "QueueFullError",
    "QuotaExceededError",
    "ReplicaDiedError",
    "RequestTooLargeError",
    "SequenceLostError",
    "ServerError",
    "StartFailedError",
    "TransportError",
    "UnavailableError",
]


class ServerError(Exception):
    """An error response with its ``status`` and ``message``, and ``detail`` where the server sends more.

    ``reason`` is the machine-readable code, ``request_id`` the request's id in the server's log, ``version``
    the version that the request was routed to; each is empty where the server did not send it.
    ``retry_after`` are the seconds after which to retry, or None.
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


class BadRequestError(ServerError):
    """The request is invalid and will be so if it is repeated."""


class AuthenticationError(ServerError):
    """The key is missing, invalid, or does not permit the request."""


class PermissionDeniedError(ServerError):
    """The request is valid, and the server refuses it."""


class NotFoundError(ServerError):
    """A model, version, archive, experiment, workflow or route does not exist."""


class MethodNotAllowedError(ServerError):
    """The route has no such method, or the model API is off."""


class ConflictError(ServerError):
    """The object exists already, or the change conflicts with another that is active."""


class RequestTooLargeError(ServerError):
    """The request's body exceeds the server's limit."""


class UnavailableError(ServerError):
    """The server cannot respond now. Nothing has run, except for the first steps of a workflow."""


class QueueFullError(UnavailableError):
    """The model's queues are full."""


class ModelLoadingError(UnavailableError):
    """The model's replicas are starting."""


class NoReplicaError(UnavailableError):
    """The model has no replica: none was requested, or none can start."""


class QuotaExceededError(UnavailableError):
    """A limit of the model or of the key is reached."""


class DeadlineExceededError(ServerError):
    """The deadline passed before there was a response, or would have passed."""


class ReplicaDiedError(ServerError):
    """The replica that ran the request died."""


class SequenceLostError(ServerError):
    """The state of a sequence is lost."""


class StartFailedError(ServerError):
    """No replica could be started; ``detail`` has the cause."""


class HandlerFailedError(ServerError):
    """The model's handler failed, or rejected the request with its own message."""


class InProgressError(ServerError):
    """The change is stored, but not yet applied everywhere."""


_REASONS: dict[type[ServerError], tuple[str, ...]] = {
    BadRequestError: (
        "bad_request",
        "missing_parameter",
        "invalid_body",
        "invalid_input",
        "limit_exceeded",
        "invalid_archive",
        "download_failed",
        "install_failed",
        "configuration",
        "invalid_workflow",
        "invalid_graph",
        "unsupported",
        "client_too_slow",
        "idempotency_key_reused",
        "adapter_rejected",
        "cannot_be_pooled",
    ),
    AuthenticationError: (
        "access_denied",
        "missing_token",
        "invalid_token",
        "expired_token",
        "missing_permission",
        "model_not_allowed",
    ),
    PermissionDeniedError: (
        "forbidden",
        "default_version",
        "cross_site",
        "host_not_allowed",
        "signature_rejected",
    ),
    NotFoundError: (
        "not_found",
        "model_not_found",
        "version_not_found",
        "archive_not_found",
        "no_document_version",
        "no_route",
        "experiment_not_found",
        "key_not_found",
        "rollout_not_found",
        "workflow_not_found",
        "exposure_not_found",
        "prediction_not_found",
        "cancelled",
        "prediction_lost",
        "adapter_not_found",
    ),
    MethodNotAllowedError: ("method_not_allowed",),
    ConflictError: (
        "version_exists",
        "workflow_exists",
        "adapter_exists",
        "insufficient_resources",
        "conflict",
    ),
    RequestTooLargeError: ("request_too_large",),
    UnavailableError: (
        "unavailable",
        "starting",
        "too_many_sequences",
        "async_queue_full",
        "result_store_unavailable",
        "pool_busy",
    ),
    QueueFullError: ("queue_full",),
    ModelLoadingError: ("loading",),
    NoReplicaError: ("no_replica",),
    QuotaExceededError: ("quota_exceeded", "rate_limited", "key_share_exceeded"),
    DeadlineExceededError: ("deadline", "client_timeout"),
    ReplicaDiedError: ("replica_died", "response_timeout"),
    SequenceLostError: ("sequence_lost",),
    StartFailedError: ("start_failed", "pool_too_small"),
    HandlerFailedError: (
        "handler_failed",
        "handler_rejected",
        "invalid_output",
        "batch_size_mismatch",
        "response_too_large",
        "unsupported_output",
        "out_of_memory",
    ),
    InProgressError: ("in_progress",),
}
_BY_REASON = {reason: error_class for error_class, reasons in _REASONS.items() for reason in reasons}
# For responses without a reason, such as those of a proxy.
_BY_STATUS: dict[int, type[ServerError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    405: MethodNotAllowedError,
    409: ConflictError,
    413: RequestTooLargeError,
    422: BadRequestError,
    429: UnavailableError,
    503: UnavailableError,
    504: DeadlineExceededError,
}


def from_outcome(outcome: httpx.Response | TransportError) -> ServerError | TransportError:
    """Return the error of a response, or that of the connection, with the address of a refused one."""
    if not isinstance(outcome, TransportError):
        return from_response(outcome)
    is_refused = isinstance(outcome, httpx.ConnectError) and not _has_tls_cause(outcome)
    if is_refused and sys.version_info >= (3, 11):
        outcome.add_note(
            f"No server responds at {outcome.request.url}. Start one with `torchrelay start`, or pass the "
            "addresses of a server to the client."
        )
    return outcome


def _has_tls_cause(error: BaseException | None) -> bool:
    """Return whether a server has responded, and its TLS was not accepted."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def from_response(response: httpx.Response) -> ServerError:
    """Return the error in a response of any of the server's protocols; its body must have been read."""
    headers = response.headers
    reason = headers.get("x-torchrelay-reason", "")
    message, detail = _parse_message(response)
    error_class = _BY_REASON.get(reason) or _BY_STATUS.get(response.status_code, ServerError)
    return error_class(
        response.status_code,
        message,
        detail,
        reason,
        headers.get("x-request-id", ""),
        parse_retry_after(headers.get("retry-after")),
        headers.get("x-model-version", ""),
    )


def parse_retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None where it holds no number of seconds."""
    return float(text) if text is not None and text.isdecimal() else None


def _parse_message(response: httpx.Response) -> tuple[str, str]:
    """Return the message of an error response, and its detail."""
    try:
        document: Any = response.json()
        error = document.get("error", document)  # TorchServe's message is at the top level
        if isinstance(error, str):
            return error, ""
        return str(error["message"]), str(error.get("detail") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        limit = response.headers.get("x-torchrelay-limit")
        if limit:
            return f"The request's body is too large: {limit}", ""
        return response.text or response.reason_phrase, ""

"""The errors that a server responds with over gRPC, as the error tree of the HTTP client.

Where no server responds, gRPC's own error is raised (``grpc.RpcError``), except for an exceeded deadline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import grpc

from serve_app.client import errors
from serve_app.client.errors import ServerError

_Code = grpc.StatusCode
# The status of the HTTP API, or else the nearest one: https://cloud.google.com/apis/design/errors
_STATUS = {
    _Code.INVALID_ARGUMENT: 400,
    _Code.FAILED_PRECONDITION: 400,
    _Code.OUT_OF_RANGE: 416,
    _Code.UNAUTHENTICATED: 401,
    _Code.PERMISSION_DENIED: 403,
    _Code.NOT_FOUND: 404,
    _Code.ALREADY_EXISTS: 409,
    _Code.ABORTED: 409,
    _Code.RESOURCE_EXHAUSTED: 429,
    _Code.CANCELLED: 499,
    _Code.UNIMPLEMENTED: 501,
    _Code.UNAVAILABLE: 503,
    _Code.DEADLINE_EXCEEDED: 504,
}
# The status of each error class; a protocol may use another one.
_CLASS_STATUS: dict[type[ServerError], int] = {
    errors.BadRequestError: 400,
    errors.AuthenticationError: 401,
    errors.PermissionDeniedError: 403,
    errors.NotFoundError: 404,
    errors.MethodNotAllowedError: 405,
    errors.ConflictError: 409,
    errors.SequenceLostError: 410,
    errors.RequestTooLargeError: 413,
    errors.QuotaExceededError: 429,
    errors.UnavailableError: 503,
    errors.DeadlineExceededError: 504,
    errors.InProgressError: 202,
}
# The codes of gRPC itself where no response was received.
_NO_RESPONSE = (_Code.UNAVAILABLE, _Code.CANCELLED, _Code.UNKNOWN, _Code.INTERNAL, _Code.DATA_LOSS)
# The messages of gRPC where no connection was made, so that nothing was sent.
_NO_CONNECTION = re.compile(
    "failed to connect to all addresses|DNS resolution failed|empty address list", re.IGNORECASE
)
_EXCEPTION_NAME = re.compile(r"\n\w*(Exception|Error)$")  # TorchServe's, after the message


def trailing_metadata(error: grpc.RpcError) -> dict[str, str]:
    """Return the trailing metadata of an error."""
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}


def is_unconnected(error: grpc.RpcError) -> bool:
    """Return whether there was no connection over which to send the call."""
    return error.code() is _Code.UNAVAILABLE and _NO_CONNECTION.match(error.details() or "") is not None


def from_rpc_error(error: grpc.RpcError) -> Exception:
    """Return the client's error for one of gRPC, which is its cause.

    Where no server responded, gRPC's own error is returned.
    """
    code, metadata = error.code(), trailing_metadata(error)
    if "x-torchrelay-reason" not in metadata and code in _NO_RESPONSE:
        own_error: Exception = error
        return own_error
    server_error = from_status(code, error.details() or "", metadata)
    server_error.__cause__ = error
    return server_error


def from_status(code: grpc.StatusCode | None, details: str, metadata: Mapping[str, str]) -> ServerError:
    """Return the error of a status with its details and metadata; ``code`` None means no status."""
    reason, http_status = metadata.get("x-torchrelay-reason", ""), metadata.get("x-status", "")
    status = 500 if code is None else _STATUS.get(code, 500)
    if http_status.isdecimal() and int(http_status):
        status = int(http_status)
    error_class = errors.error_class(reason, status)
    if reason and reason != "handler_rejected":
        status = next((_CLASS_STATUS[base] for base in error_class.__mro__ if base in _CLASS_STATUS), 500)
    text, replaced = _EXCEPTION_NAME.subn("", details)
    message, _, detail = text.partition("\n") if replaced else (text, "", "")
    return error_class(
        status,
        message or str(code and code.name),
        detail,
        reason,
        metadata.get("x-request-id", ""),
        errors.parse_retry_after(metadata.get("retry-after")),
        metadata.get("x-model-version", ""),
    )


def idle_timeout_error(seconds: float) -> ServerError:
    """Return the error of a stream that sent no message for ``seconds``."""
    return errors.DeadlineExceededError(504, f"No message was received for {seconds:g} seconds.")

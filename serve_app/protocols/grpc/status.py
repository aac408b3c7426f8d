"""The mapping from errors to gRPC status codes: each protocol has a table, looked up along the MRO."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from serve_app import errors

StatusTable = Mapping[type[BaseException], StatusCode]

# TorchServe's mapping of HTTP statuses, applied to the status of a handler's own error, too.
BY_HTTP_STATUS = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    416: StatusCode.OUT_OF_RANGE,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def find_status_code(error: Exception, table: StatusTable) -> StatusCode:
    """Return the status of an error; a handler's own error names its status in every protocol."""
    if isinstance(error, errors.HandlerRejected):
        return from_http_status(error.code)
    return next(table[cls] for cls in type(error).__mro__ if cls in table)


def from_http_status(code: int) -> StatusCode:
    status = BY_HTTP_STATUS.get(code)
    if status is None:
        status = StatusCode.FAILED_PRECONDITION if 400 <= code < 500 else StatusCode.INTERNAL
    return status

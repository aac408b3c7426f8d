"""From what went wrong to gRPC's status: each dialect has a table, looked up along the MRO."""

from __future__ import annotations

from collections.abc import Mapping

from grpc import StatusCode

from serve_app import errors

Table = Mapping[type[BaseException], StatusCode]

# What TorchServe makes of an HTTP status, also of one that a handler's own error names.
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


def look_up(error: Exception, table: Table) -> StatusCode:
    """The status of an error; a handler's own error has one of its own in every dialect."""
    if isinstance(error, errors.HandlerSaid):
        return by_http_status(error.code)
    return next(table[cls] for cls in type(error).__mro__ if cls in table)


def by_http_status(code: int) -> StatusCode:
    status = BY_HTTP_STATUS.get(code)
    if status is None:
        status = StatusCode.FAILED_PRECONDITION if 400 <= code < 500 else StatusCode.INTERNAL
    return status

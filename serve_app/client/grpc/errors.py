"""What a server says no with over gRPC, as the same tree of errors.

Where no server answered, gRPC's own error is raised (``grpc.RpcError``), but for a time that is over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import grpc

from serve_app.client import errors
from serve_app.client.errors import ServerError

_Code = grpc.StatusCode
# Of the HTTP API, or else what comes next to it. https://cloud.google.com/apis/design/errors
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
# The same of the kinds of errors, whatever status a dialect has for them.
_OF_KIND: dict[type[ServerError], int] = {
    errors.BadRequest: 400,
    errors.AccessDenied: 401,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.Conflict: 409,
    errors.SequenceLost: 410,
    errors.TooLarge: 413,
    errors.QuotaExceeded: 429,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
    errors.NotYet: 202,
}
# What gRPC says itself where an answer is missing.
_NOBODY_SAID = (_Code.UNAVAILABLE, _Code.CANCELLED, _Code.UNKNOWN, _Code.INTERNAL, _Code.DATA_LOSS)
# Its words where no connection was made, so that nothing was sent.
_NO_CONNECTION = re.compile(
    "failed to connect to all addresses|DNS resolution failed|empty address list", re.IGNORECASE
)
_TYPE = re.compile(r"\n\w*(Exception|Error)$")  # TorchServe's name of an error, behind its words


def said(error: grpc.RpcError) -> dict[str, str]:
    """The trailing metadata of an error."""
    return {name: value for name, value in error.trailing_metadata() or () if isinstance(value, str)}


def nobody_listened(error: grpc.RpcError) -> bool:
    """Whether there was no connection to send a call over."""
    return error.code() is _Code.UNAVAILABLE and _NO_CONNECTION.match(error.details() or "") is not None


def of(error: grpc.RpcError) -> Exception:
    """What is raised in the place of gRPC's error, which is its cause; or that one, where no server had answered."""
    code, trailing = error.code(), said(error)
    if "x-torchrelay-reason" not in trailing and code in _NOBODY_SAID:
        return error
    made = told(code, error.details() or "", trailing)
    made.__cause__ = error
    return made


def told(code: grpc.StatusCode | None, words: str, said: Mapping[str, str]) -> ServerError:
    """The error of a status, its words and what was said beside them; ``code`` is None where no status was told."""
    reason, named = said.get("x-torchrelay-reason", ""), said.get("x-status", "")
    status = int(named) if named.isdecimal() and int(named) else _STATUS.get(code, 500) if code is not None else 500
    kind = errors.kind(reason, status)
    if reason and reason != "handler_said":
        status = next((_OF_KIND[one] for one in kind.__mro__ if one in _OF_KIND), 500)
    text, ended = _TYPE.subn("", words)
    message, _, detail = text.partition("\n") if ended else (text, "", "")
    return kind(
        status,
        message or str(code and code.name),
        detail,
        reason,
        said.get("x-request-id", ""),
        errors.seconds(said.get("retry-after")),
        said.get("x-model-version", ""),
    )


def too_silent(seconds: float) -> ServerError:
    """Nothing came of a stream for so long."""
    return errors.DeadlineExceeded(504, f"Nothing came for {seconds:g} seconds.")

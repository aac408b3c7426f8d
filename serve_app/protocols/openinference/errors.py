"""The table from errors to the protocol's HTTP statuses; the body of every error is ``{"error": text}``."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict

from serve_app import errors
from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.errors import RateLimited
from serve_app.protocols.http.error_text import HandlerErrors, get_handler_detail, get_message
from serve_app.protocols.http.exchange import JSON, Headers, HttpExchange, build_error_headers


class OpenInferenceError(TypedDict):
    error: Annotated[str, documented("The error message.")]


class UnsupportedFeature(errors.BadRequest):
    """``UnsupportedFeature(message)``: a part of the protocol, or of its extensions, that is not served."""

    reason = "unsupported"


# Looked up along the MRO: a class without an entry has the status of its parent.
TABLE: dict[type[BaseException], int] = {
    Exception: 500,
    errors.BadRequest: 400,
    UnsupportedFeature: 501,
    errors.IdempotencyKeyReused: 422,
    errors.AccessDenied: 401,
    errors.MissingPermission: 403,
    errors.ModelNotAllowed: 403,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.VersionExists: 409,
    errors.Conflict: 409,
    errors.SequenceLost: 410,
    errors.RequestTooLarge: 413,
    errors.Unavailable: 503,
    errors.QuotaExceeded: 429,
    RateLimited: 429,
    errors.DeadlineExceeded: 504,
    errors.StartOutOfMemory: 507,
    errors.InProgress: 503,  # the protocol has no status for it, and a retry does no harm
    errors.HandlerOutOfMemory: 507,
}
# KServe's specification of text generation has other statuses for these.
GENERATE: dict[type[BaseException], int] = {
    errors.InvalidBody: 422,
    errors.QueueFull: 429,
    errors.HandlerFailed: 424,
    errors.HandlerOutOfMemory: 507,
}
# The details of a failed load are always sent; a handler's traceback never is by default.
_WITH_DETAIL = (errors.StartFailed, errors.DownloadFailed, errors.InstallFailed)


def find_status(error: Exception, generates: bool = False) -> int:
    """Return the HTTP status of an error; ``generates``: of a request to generate text."""
    if isinstance(error, errors.HandlerRejected):
        return error.code if 400 <= error.code < 600 else 500
    for cls in type(error).__mro__:
        if generates and cls in GENERATE:
            return GENERATE[cls]
        if cls in TABLE:
            return TABLE[cls]
    return 500


def to_document(
    error: Exception, request_id: str = "", shown: HandlerErrors = "hidden"
) -> OpenInferenceError:
    """Return the body of an error; ``shown`` is the part of a handler's failure that it contains."""
    message = get_message(error, request_id)
    if isinstance(error, _WITH_DETAIL) and error.detail:
        message = f"{message}: {error.detail.strip()}"
    elif detail := get_handler_detail(error, shown):
        message = f"{message}: {detail}"
    return {"error": message}


async def send_error(
    exchange: HttpExchange, error: Exception, generates: bool = False, shown: HandlerErrors = "hidden"
) -> None:
    """Send an error."""
    await exchange.send_response(*render_error(exchange, error, generates, shown))


def render_error(
    exchange: HttpExchange, error: Exception, generates: bool = False, shown: HandlerErrors = "hidden"
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of an error.

    The header ``x-torchrelay-reason`` has its machine-readable reason.
    """
    headers = [JSON, *build_error_headers(error)]
    document = to_document(error, exchange.request_id, shown)
    return find_status(error, generates), headers, exact_json.dumps(document)

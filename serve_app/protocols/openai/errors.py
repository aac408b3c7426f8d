"""The table from errors to OpenAI's status, type and code, and the body of an error."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import NotRequired, TypedDict

from serve_app import errors
from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.errors import AdapterNotFound, RateLimited
from serve_app.protocols.http.error_text import HandlerErrors, get_handler_detail, get_message
from serve_app.protocols.http.exchange import JSON, Headers, HttpExchange, build_error_headers


class OpenAIErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: Annotated[str | None, documented("The machine-readable reason.")]
    detail: NotRequired[Annotated[str, documented("Of a handler's failure, if enabled.")]]


class OpenAIError(TypedDict):
    error: OpenAIErrorFields


class InvalidField(errors.BadRequest):
    """``InvalidField(message, field)``: an invalid field of the body."""

    @property
    def field(self) -> str:
        return self.args[1]


INVALID, FAILED, BUSY = "invalid_request_error", "server_error", "requests"

# Looked up along the MRO: a class without an entry has that of its parent. The code None stands for the
# error's own reason.
TABLE: dict[type[BaseException], tuple[int, str, str | None]] = {
    Exception: (500, FAILED, None),
    errors.BadRequest: (400, INVALID, None),
    errors.AccessDenied: (401, INVALID, "invalid_api_key"),
    errors.MissingPermission: (403, INVALID, "insufficient_permissions"),
    errors.ModelNotAllowed: (403, INVALID, "insufficient_permissions"),
    errors.Forbidden: (403, INVALID, None),
    errors.NotFound: (404, INVALID, None),
    errors.ModelNotFound: (404, INVALID, "model_not_found"),
    errors.VersionNotFound: (404, INVALID, "model_not_found"),
    AdapterNotFound: (404, INVALID, "model_not_found"),
    errors.MethodNotAllowed: (405, INVALID, None),
    errors.VersionExists: (409, INVALID, None),
    errors.Conflict: (409, INVALID, None),
    errors.SequenceLost: (410, INVALID, None),
    errors.RequestTooLarge: (413, INVALID, None),
    errors.QuotaExceeded: (429, BUSY, "rate_limit_exceeded"),
    RateLimited: (429, BUSY, "rate_limit_exceeded"),
    errors.Unavailable: (503, FAILED, None),
    errors.DeadlineExceeded: (504, FAILED, None),
    errors.HandlerFailed: (500, FAILED, None),
}
_MODEL_ERRORS = (errors.ModelNotFound, errors.VersionNotFound, AdapterNotFound, errors.ModelNotAllowed)


def find_status(error: Exception) -> tuple[int, str, str]:
    """Return the status, the type and the code of an error."""
    status, kind, code = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    if isinstance(error, errors.HandlerRejected):
        status = error.code if 400 <= error.code < 600 else 500
        kind = INVALID if status < 500 else FAILED
    return status, kind, code or errors.get_reason(error)


def to_document(error: Exception, request_id: str = "", shown: HandlerErrors = "hidden") -> OpenAIError:
    """Return the body of an error; ``shown`` is the part of a handler's failure that it contains."""
    _, kind, code = find_status(error)
    message = get_message(error, request_id)
    param = "model" if isinstance(error, _MODEL_ERRORS) else getattr(error, "field", None)
    document: OpenAIErrorFields = {"message": message, "type": kind, "param": param, "code": code}
    if detail := get_handler_detail(error, shown):
        document["detail"] = detail
    return {"error": document}


def render_error(
    exchange: HttpExchange, error: Exception, shown: HandlerErrors = "hidden"
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of an error."""
    headers = [JSON, *build_error_headers(error)]
    document = to_document(error, exchange.request_id, shown)
    return find_status(error)[0], headers, exact_json.dumps(document)


async def send_error(exchange: HttpExchange, error: Exception, shown: HandlerErrors = "hidden") -> None:
    await exchange.send_response(*render_error(exchange, error, shown))

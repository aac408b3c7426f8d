"""The table from errors to text-embeddings-inference's status and error type, and the body of an error."""

from __future__ import annotations

from typing import Annotated, Literal

from typing_extensions import NotRequired, TypedDict

from serve_app import errors
from serve_app.domain import exact_json
from serve_app.domain.validation import documented
from serve_app.protocols.http.error_text import HandlerErrors, get_handler_detail, get_message
from serve_app.protocols.http.exchange import JSON, HttpExchange, build_error_headers
from serve_app.protocols.openai.errors import InvalidField

ErrorType = Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


class TeiError(TypedDict):
    error: str
    error_type: ErrorType
    detail: NotRequired[Annotated[str, documented("Of a handler's failure, if enabled.")]]


class EmptyInputs(InvalidField):
    """A request without inputs."""


class BatchTooLarge(InvalidField):
    """A request of more inputs than one may have."""


# Looked up along the MRO: a class without an entry has that of its parent.
TABLE: dict[type[BaseException], tuple[int, ErrorType]] = {
    Exception: (424, "Backend"),
    errors.BadRequest: (422, "Validation"),
    EmptyInputs: (400, "Empty"),
    BatchTooLarge: (413, "Validation"),
    errors.AccessDenied: (401, "Validation"),
    errors.MissingPermission: (403, "Validation"),
    errors.ModelNotAllowed: (403, "Validation"),
    errors.Forbidden: (403, "Validation"),
    errors.NotFound: (404, "Validation"),
    errors.MethodNotAllowed: (405, "Validation"),
    errors.VersionExists: (409, "Validation"),
    errors.Conflict: (409, "Validation"),
    errors.SequenceLost: (410, "Validation"),
    errors.RequestTooLarge: (413, "Validation"),
    errors.QuotaExceeded: (429, "Overloaded"),
    errors.QueueFull: (429, "Overloaded"),
    errors.RateLimited: (429, "Overloaded"),
    errors.Unavailable: (503, "Unhealthy"),
    errors.DeadlineExceeded: (504, "Backend"),
}


def find_status(error: Exception) -> tuple[int, ErrorType]:
    """Return the status and the type of an error; a handler's 400 is 422, as of another invalid request."""
    if isinstance(error, errors.HandlerRejected) and 400 <= error.code < 500:
        return (422 if error.code == 400 else error.code), "Validation"
    if isinstance(error, errors.HandlerRejected) and error.code == 503:
        return 503, "Unhealthy"
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def to_document(error: Exception, request_id: str = "", shown: HandlerErrors = "hidden") -> TeiError:
    """Return the body of an error; ``shown`` is the part of a handler's failure that it contains."""
    document: TeiError = {"error": get_message(error, request_id), "error_type": find_status(error)[1]}
    if detail := get_handler_detail(error, shown):
        document["detail"] = detail
    return document


async def send_error(exchange: HttpExchange, error: Exception, shown: HandlerErrors = "hidden") -> None:
    document = to_document(error, exchange.request_id, shown)
    headers = [JSON, *build_error_headers(error)]
    await exchange.send_response(find_status(error)[0], headers, exact_json.dumps(document))

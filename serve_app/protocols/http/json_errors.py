"""Errors as JSON in TorchServe's form, for every API without a form of its own.

A table has the status and the type name of each class of errors.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import orjson
from typing_extensions import NotRequired, TypedDict

from serve_app import errors
from serve_app.domain.validation import documented
from serve_app.errors import RateLimited
from serve_app.protocols.http.endpoints import ErrorFormat
from serve_app.protocols.http.error_text import HandlerErrors, get_handler_detail, get_message
from serve_app.protocols.http.exchange import JSON, Headers, HttpExchange, build_error_headers, clamp_status


class TorchServeError(TypedDict):
    """An error in TorchServe's format."""

    code: Annotated[int, documented("The status of the response.")]
    type: Annotated[str, documented("The name of the error.")]
    message: Annotated[str, documented("The error message.")]
    detail: NotRequired[Annotated[str, documented("Details that the caller may see.")]]


ERRORS = ErrorFormat(TorchServeError, without_body=(413,))
NO_ERRORS = ErrorFormat(TorchServeError, common=())


class Status(TypedDict):
    """The result of a change, as a sentence."""

    status: str


CHANGED = {200: Status, 202: Status}


class TokenNotIssued(errors.AccessDenied):
    """``TokenNotIssued(reason)``: no token was issued; TorchServe has a text of its own for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class JsonSyntaxError(errors.InvalidBody):
    """``JsonSyntaxError(message)``: a registration's JSON body that cannot be parsed.

    TorchServe's status for it is 500.
    """


class WorkflowNodeFailed(errors.WorkflowStepError, errors.ReplicaDied):
    """The failure of a workflow's step on TorchServe's own route, which has one text for every failure."""

    @classmethod
    def from_step_error(cls, error: errors.WorkflowStepError) -> WorkflowNodeFailed:
        """Return the same failure with the step's own message as its detail."""
        *args, _ = error.args
        return cls(*args, str(error))

    def __str__(self) -> str:
        return f"Error executing {self.step}"


# Looked up along the MRO, so a class without an entry has that of its parent.
TABLE: dict[type[BaseException], tuple[int, str]] = {
    Exception: (500, "InternalServerException"),
    errors.BadRequest: (400, "BadRequestException"),
    JsonSyntaxError: (400, "JsonSyntaxException"),
    errors.InvalidArchive: (400, "InvalidModelException"),
    errors.InvalidWorkflow: (400, "InvalidWorkflowException"),
    errors.InvalidGraph: (400, "InvalidDAGException"),
    errors.DownloadFailed: (400, "DownloadArchiveException"),
    errors.InstallFailed: (400, "ModelException"),
    errors.IdempotencyKeyReused: (422, "IdempotencyKeyException"),
    errors.AccessDenied: (400, "InvalidKeyException"),
    errors.Forbidden: (403, "IllegalArgumentException"),
    errors.CannotRemoveDefault: (403, "InvalidModelVersionException"),
    errors.NotFound: (404, "ResourceNotFoundException"),
    errors.ModelNotFound: (404, "ModelNotFoundException"),
    errors.VersionNotFound: (404, "ModelVersionNotFoundException"),
    errors.ArchiveNotFound: (404, "ModelNotFoundException"),
    errors.WorkflowNotFound: (404, "WorkflowNotFoundException"),
    errors.PredictionCancelled: (410, "PredictionCancelledException"),
    errors.PredictionLost: (410, "PredictionLostException"),
    errors.MethodNotAllowed: (405, "MethodNotAllowedException"),
    errors.VersionExists: (409, "ConflictStatusException"),
    errors.Conflict: (409, "ConflictStatusException"),
    errors.WorkflowExists: (409, "ConflictStatusException"),
    errors.SequenceLost: (410, "SequenceLostException"),
    errors.RequestTooLarge: (413, ""),  # no type: its body is empty
    errors.Unavailable: (503, "ServiceUnavailableException"),
    errors.QuotaExceeded: (429, "TooManyRequestsException"),
    RateLimited: (429, "TooManyRequestsException"),
    errors.DeadlineExceeded: (504, "RequestTimeoutException"),
    errors.ReplicaDied: (500, "InternalServerException"),
    errors.StartFailed: (500, "InternalServerException"),
    errors.StartOutOfMemory: (507, "InternalServerException"),
    errors.WorkflowFailed: (500, "WorkflowException"),
    errors.InProgress: (202, ""),  # no type: it is a status, not an error
    errors.HandlerFailed: (503, "InternalServerException"),
    errors.HandlerOutOfMemory: (507, "InternalServerException"),
}
# Clients see the detail of these: that of a management request, never a handler's traceback on inference.
_WITH_DETAIL = (errors.StartFailed, errors.DownloadFailed, errors.InstallFailed, WorkflowNodeFailed)


def look_up(error: Exception) -> tuple[int, str]:
    """Return the status and the type name of an error."""
    status, name = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    if isinstance(error, errors.HandlerRejected):
        status = clamp_status(error.code)
        status = 507 if status == 413 else status  # 413 is reserved for the request's size
    return status, name


def to_document(
    error: Exception, request_id: str = "", handler_errors: HandlerErrors = "hidden"
) -> TorchServeError | Status | None:
    """Return the body of an error response; None when it has no body.

    ``handler_errors`` sets how much of a handler's failure is in it.
    """
    status, name = look_up(error)
    if not name:
        return {"status": str(error)} if status < 400 else None
    document: TorchServeError = {"code": status, "type": name, "message": get_message(error, request_id)}
    if isinstance(error, _WITH_DETAIL) and error.detail:
        document["detail"] = error.detail
    elif detail := get_handler_detail(error, handler_errors):
        document["detail"] = detail
    return document


async def send_error(
    exchange: HttpExchange, error: Exception, handler_errors: HandlerErrors = "hidden"
) -> None:
    """Send an error response."""
    await exchange.send_response(*render_error(exchange, error, handler_errors))


def render_error(
    exchange: HttpExchange, error: Exception, handler_errors: HandlerErrors = "hidden"
) -> tuple[int, Headers, bytes]:
    """Return status, headers and body of an error response.

    The header ``x-torchrelay-reason`` distinguishes errors for which TorchServe has one text.
    """
    document = to_document(error, exchange.request_id, handler_errors)
    headers = build_error_headers(error) if document is None else [JSON, *build_error_headers(error)]
    if isinstance(error, errors.RequestTooLarge):  # its body is empty, so a header names the setting
        headers.append((b"x-torchrelay-limit", f"inference.max_request_size={error.limit}".encode()))
    return look_up(error)[0], headers, b"" if document is None else encode_json(document)


async def send_json(exchange: HttpExchange, document: Any, status: int = 200) -> None:
    await exchange.send_response(status, [JSON], encode_json(document))


def encode_json(document: Any) -> bytes:
    """Return JSON as TorchServe prints it: indented by two spaces, with a line end."""
    try:
        return orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a text that is no UTF-8
        return json.dumps(document, indent=2).encode() + b"\n"

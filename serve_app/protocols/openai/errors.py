"""The one table from what went wrong to OpenAI's status, type and code, and its body."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from serve_app import errors
from serve_app.doors.exchange import JSON, Exchange, refusal_headers


class InvalidField(errors.BadRequest):
    """``InvalidField(message, field)``: what is wrong with one field of the body."""

    @property
    def field(self) -> str:
        return self.args[1]


INVALID, FAILED, BUSY = "invalid_request_error", "server_error", "requests"

# Looked up along the MRO, so a class without a line of its own answers as its parent does. Where no code stands it is
# the error's own reason.
TABLE: dict[type[BaseException], tuple[int, str, str | None]] = {
    Exception: (500, FAILED, None),
    errors.BadRequest: (400, INVALID, None),
    errors.AccessDenied: (401, INVALID, "invalid_api_key"),
    errors.WrongRole: (403, INVALID, "insufficient_permissions"),
    errors.WrongModel: (403, INVALID, "insufficient_permissions"),
    errors.Forbidden: (403, INVALID, None),
    errors.NotFound: (404, INVALID, None),
    errors.ModelNotFound: (404, INVALID, "model_not_found"),
    errors.VersionNotFound: (404, INVALID, "model_not_found"),
    errors.MethodNotAllowed: (405, INVALID, None),
    errors.VersionExists: (409, INVALID, None),
    errors.InUse: (409, INVALID, None),
    errors.SequenceLost: (410, INVALID, None),
    errors.TooLarge: (413, INVALID, None),
    errors.QuotaExceeded: (429, BUSY, "rate_limit_exceeded"),
    errors.Unavailable: (503, FAILED, None),
    errors.DeadlineExceeded: (504, FAILED, None),
    errors.HandlerFailed: (500, FAILED, None),
}
_ABOUT_MODELS = (errors.ModelNotFound, errors.VersionNotFound, errors.WrongModel)
_AUTHORS = (errors.HandlerFailed, errors.WorkerDied)  # whose detail the operator may let callers see
Shown = Literal["hidden", "message", "traceback"]


def look_up(error: Exception) -> tuple[int, str, str]:
    """The status, the type and the code of an error."""
    status, kind, code = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    if isinstance(error, errors.HandlerSaid):
        status = error.code if 400 <= error.code < 600 else 500
        kind = INVALID if status < 500 else FAILED
    return status, kind, code or errors.reason(error)


def document(error: Exception, request_id: str = "", shown: Shown = "hidden") -> dict[str, Any]:
    """The body of an error's answer. ``shown`` is how much of a handler's failure is in it."""
    _, kind, code = look_up(error)
    message = str(error)
    if not isinstance(error, errors.RelayError):  # its words are not meant for a caller
        message = f"Unexpected {type(error).__name__}; the server's log has more under {request_id}."
    param = "model" if isinstance(error, _ABOUT_MODELS) else getattr(error, "field", None)
    said: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if shown != "hidden" and isinstance(error, _AUTHORS) and (detail := error.detail.strip()):
        said["detail"] = detail if shown == "traceback" else detail.splitlines()[-1]
    return {"error": said}


async def refuse(exchange: Exchange, error: Exception, shown: Shown = "hidden") -> None:
    """Answer with an error."""
    headers = [JSON, *refusal_headers(error)]
    await exchange.reply(look_up(error)[0], headers, orjson.dumps(document(error, exchange.request_id, shown)))

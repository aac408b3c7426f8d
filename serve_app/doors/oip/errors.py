"""The one table from what went wrong to the protocol's status; its body is ``{"error": text}``, always."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from serve_app import errors
from serve_app.doors.exchange import JSON, Exchange, refusal_headers


class Unsupported(errors.BadRequest):
    """``Unsupported(message)``: a part of the protocol, or of its extensions, that is not served."""

    reason = "unsupported"


# Looked up along the MRO, so a class without a line of its own answers as its parent does.
TABLE: dict[type[BaseException], int] = {
    Exception: 500,
    errors.BadRequest: 400,
    Unsupported: 501,
    errors.KeyReused: 422,
    errors.AccessDenied: 401,
    errors.WrongRole: 403,
    errors.WrongModel: 403,
    errors.Forbidden: 403,
    errors.NotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.VersionExists: 409,
    errors.InUse: 409,
    errors.SequenceLost: 410,
    errors.TooLarge: 413,
    errors.Unavailable: 503,
    errors.QuotaExceeded: 429,
    errors.DeadlineExceeded: 504,
    errors.StartOutOfMemory: 507,
    errors.NotYet: 503,  # the protocol has no word for it, and to ask again does no harm
    errors.OutOfResources: 507,
}
# Where text is generated, KServe's specification has other statuses for the same.
GENERATE: dict[type[BaseException], int] = {
    errors.InvalidBody: 422,
    errors.QueueFull: 429,
    errors.HandlerFailed: 424,
    errors.OutOfResources: 507,
}
# Whose detail the caller should see: that of a load, never a handler's traceback on inference.
_DETAILED = (errors.StartFailed, errors.DownloadFailed, errors.InstallFailed)
# Whose detail the operator may let callers see (inference.handler_errors).
_AUTHORS = (errors.HandlerFailed, errors.WorkerDied)
Shown = Literal["hidden", "message", "traceback"]


def look_up(error: Exception, generates: bool = False) -> int:
    """The status of an error."""
    if isinstance(error, errors.HandlerSaid):
        return error.code if 400 <= error.code < 600 else 500
    for cls in type(error).__mro__:
        if generates and cls in GENERATE:
            return GENERATE[cls]
        if cls in TABLE:
            return TABLE[cls]
    return 500


def document(error: Exception, request_id: str = "", shown: Shown = "hidden") -> dict[str, Any]:
    """The body of an error's answer. ``shown`` is how much of a handler's failure is in it."""
    if not isinstance(error, errors.RelayError):  # its words are not meant for a caller
        where = f"; the server's log has more under {request_id}" if request_id else ""
        return {"error": f"Unexpected {type(error).__name__}{where}."}
    said = str(error)
    if isinstance(error, _DETAILED) and error.detail:
        said = f"{said}: {error.detail.strip()}"
    elif shown != "hidden" and isinstance(error, _AUTHORS) and (detail := error.detail.strip()):
        said = f"{said}: {detail if shown == 'traceback' else detail.splitlines()[-1]}"
    return {"error": said}


async def refuse(exchange: Exchange, error: Exception, generates: bool = False, shown: Shown = "hidden") -> None:
    """Answer with an error. Header ``x-torchrelay-reason`` has its machine-readable word."""
    headers = [JSON, *refusal_headers(error)]
    said = document(error, exchange.request_id, shown)
    await exchange.reply(look_up(error, generates), headers, orjson.dumps(said))

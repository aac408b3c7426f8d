"""The one table from what went wrong to TorchServe's status, type name and body."""

from __future__ import annotations

from typing import Any, Literal

import orjson

from serve_app import errors
from serve_app.doors.exchange import JSON, Exchange, refusal_headers


class TokenRefused(errors.AccessDenied):
    """``TokenRefused(reason)``: no new token; TorchServe words this one apart."""

    @property
    def reason(self) -> str:
        return self.args[0]

    def __str__(self) -> str:
        return "Token Authentication failed. Token either incorrect, expired, or not provided correctly"


class JsonSyntaxError(errors.InvalidBody):
    """``JsonSyntaxError(message)``: a registration's JSON body that cannot be read. TorchServe's status is 500."""


class NodeFailed(errors.OfStep, errors.WorkerDied):
    """A step of a workflow that was asked by TorchServe's own route, which has one sentence for whatever went wrong."""

    @classmethod
    def like(cls, error: errors.OfStep) -> NodeFailed:
        """The same failure, whose detail is the step's own sentence."""
        *what, _ = error.args
        return cls(*what, str(error))

    def __str__(self) -> str:
        return f"Error executing {self.step}"


# Looked up along the MRO, so a class without a line of its own answers as its parent does.
TABLE: dict[type[BaseException], tuple[int, str]] = {
    Exception: (500, "InternalServerException"),
    errors.BadRequest: (400, "BadRequestException"),
    JsonSyntaxError: (400, "JsonSyntaxException"),
    errors.InvalidArchive: (400, "InvalidModelException"),
    errors.InvalidWorkflow: (400, "InvalidWorkflowException"),
    errors.InvalidGraph: (400, "InvalidDAGException"),
    errors.DownloadFailed: (400, "DownloadArchiveException"),
    errors.InstallFailed: (400, "ModelException"),
    errors.KeyReused: (422, "IdempotencyKeyException"),
    errors.AccessDenied: (400, "InvalidKeyException"),
    errors.Forbidden: (403, "IllegalArgumentException"),
    errors.CannotRemoveDefault: (403, "InvalidModelVersionException"),
    errors.NotFound: (404, "ResourceNotFoundException"),
    errors.ModelNotFound: (404, "ModelNotFoundException"),
    errors.VersionNotFound: (404, "ModelVersionNotFoundException"),
    errors.ArchiveNotFound: (404, "ModelNotFoundException"),
    errors.WorkflowNotFound: (404, "WorkflowNotFoundException"),
    errors.DeferralCancelled: (410, "PredictionCancelledException"),
    errors.DeferralLost: (410, "PredictionLostException"),
    errors.MethodNotAllowed: (405, "MethodNotAllowedException"),
    errors.VersionExists: (409, "ConflictStatusException"),
    errors.InUse: (409, "ConflictStatusException"),
    errors.WorkflowExists: (409, "ConflictStatusException"),
    errors.SequenceLost: (410, "SequenceLostException"),
    errors.TooLarge: (413, ""),  # no type: its body is empty
    errors.Unavailable: (503, "ServiceUnavailableException"),
    errors.QuotaExceeded: (429, "TooManyRequestsException"),
    errors.DeadlineExceeded: (504, "RequestTimeoutException"),
    errors.WorkerDied: (500, "InternalServerException"),
    errors.StartFailed: (500, "InternalServerException"),
    errors.StartOutOfMemory: (507, "InternalServerException"),
    errors.WorkflowFailed: (500, "WorkflowException"),
    errors.NotYet: (202, ""),  # no type: it is a status, not an error
    errors.HandlerFailed: (503, "InternalServerException"),
    errors.OutOfResources: (507, "InternalServerException"),
}
# Whose detail the caller should see: that of a management call, never a handler's traceback on inference.
_DETAILED = (errors.StartFailed, errors.DownloadFailed, errors.InstallFailed, NodeFailed)
# Whose detail the operator may let callers see (inference.handler_errors).
_AUTHORS = (errors.HandlerFailed, errors.WorkerDied)
Shown = Literal["hidden", "message", "traceback"]


def look_up(error: Exception) -> tuple[int, str]:
    """The status and the type name of an error."""
    status, name = next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)
    if isinstance(error, errors.HandlerSaid):
        status = http_status(error.code)
        status = 507 if status == 413 else status  # 413 speaks of the request's size alone
    return status, name


def http_status(code: int) -> int:
    """``code``, or 500 where no HTTP answer can end with it."""
    return code if 200 <= code < 600 else 500


def document(error: Exception, request_id: str = "", shown: Shown = "hidden") -> dict[str, Any] | None:
    """The body of an error's answer; None when it has none. ``shown`` is how much of a handler's failure is in it."""
    status, name = look_up(error)
    if not name:
        return {"status": str(error)} if status < 400 else None
    if not isinstance(error, errors.RelayError):  # its words are not meant for a caller
        where = f"; the server's log has more under {request_id}" if request_id else ""
        return {"code": status, "type": name, "message": f"Unexpected {type(error).__name__}{where}."}
    said: dict[str, Any] = {"code": status, "type": name, "message": str(error)}
    if isinstance(error, _DETAILED) and error.detail:
        said["detail"] = error.detail
    elif shown != "hidden" and isinstance(error, _AUTHORS) and (detail := error.detail.strip()):
        said["detail"] = detail if shown == "traceback" else detail.splitlines()[-1]
    return said


async def refuse(exchange: Exchange, error: Exception, shown: Shown = "hidden") -> None:
    """Answer with an error. Header ``x-torchrelay-reason`` tells apart what TorchServe has one text for."""
    said = document(error, exchange.request_id, shown)
    headers = refusal_headers(error) if said is None else [JSON, *refusal_headers(error)]
    if isinstance(error, errors.TooLarge):  # its body is empty, so this is where the cure stands
        headers.append((b"x-torchrelay-limit", f"inference.max_request_size={error.args[0]}".encode()))
    await exchange.reply(look_up(error)[0], headers, b"" if said is None else pretty(said))


async def reply_json(exchange: Exchange, said: Any, status: int = 200) -> None:
    await exchange.reply(status, [JSON], pretty(said))


def pretty(said: Any) -> bytes:
    """JSON as TorchServe prints it: two spaces, and a line end."""
    return orjson.dumps(said, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)

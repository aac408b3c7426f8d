"""The text of errors that all protocols share; the settings decide what of a failure clients see."""

from __future__ import annotations

from typing import Literal

from serve_app.errors import HandlerFailed, RelayError, ReplicaDied

HandlerErrors = Literal["hidden", "message", "traceback"]
"""The part of a handler's failure that clients see: the setting ``inference.handler_errors``."""


def get_message(error: Exception, request_id: str) -> str:
    """Return the message of an error; that of an error which is not ours is not meant for clients."""
    if isinstance(error, RelayError):
        return str(error)
    log_hint = f"; the server's log has more under {request_id}" if request_id else ""
    return f"Unexpected {type(error).__name__}{log_hint}."


def get_handler_detail(error: Exception, shown: HandlerErrors) -> str:
    """Return the detail of a handler's failure that the setting lets clients see, or an empty text."""
    if shown == "hidden" or not isinstance(error, (HandlerFailed, ReplicaDied)):
        return ""
    detail = error.detail.strip()
    return detail if shown == "traceback" or not detail else detail.splitlines()[-1]

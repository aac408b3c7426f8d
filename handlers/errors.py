"""The errors that a handler may raise, and those of loading one."""

from __future__ import annotations


class PredictionException(Exception):
    """An error whose message is sent to the caller with the HTTP status ``error_code``, 500 by default.

    Raised, it fails the whole batch; returned in one row's place, it fails that row alone.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)  # both in args, so that a pickle calls this class with both
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerLoadError(RuntimeError):
    """An archive's handler or weights cannot be loaded.

    The message names the file and the remedy; an error raised by the author's code is chained as its cause.
    """

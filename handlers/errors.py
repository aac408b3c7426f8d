"""What a handler may raise at its caller, and what loading one may raise at its operator."""

from __future__ import annotations


class PredictionException(Exception):
    """``PredictionException(message, error_code=500)``: the caller gets this message under this HTTP status.

    Raised, it answers the whole batch; returned in one row's place, that row alone.
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message, error_code)  # both in args, so that a pickle calls this class with both
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"{self.message} : {self.error_code}"


class HandlerLoadError(RuntimeError):
    """``HandlerLoadError(message)``: an archive's handler or weights cannot be loaded.

    The message names the file and the cure; what the author's code raised is chained as its cause.
    """

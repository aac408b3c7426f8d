"""The errors of SageMaker's inference toolkit, each with the status of its response."""

from __future__ import annotations

from http import HTTPStatus


class BaseInferenceToolkitError(Exception):
    """An error whose ``message`` is sent with ``status_code``."""

    def __init__(self, status_code: int, message: str, phrase: str = "") -> None:
        super().__init__(status_code, message, phrase)
        self.status_code = status_code
        self.message = message
        self.phrase = phrase

    def __str__(self) -> str:
        return self.message


class GenericInferenceToolkitError(BaseInferenceToolkitError):
    """An error of a script, with a status of its own."""

    def __init__(self, status_code: int, message: str = "Invalid Request", phrase: str | None = None) -> None:
        super().__init__(status_code, message, phrase or message)


class UnsupportedFormatError(BaseInferenceToolkitError):
    """A media type that the default functions neither read nor write."""

    def __init__(self, content_type: str | None) -> None:
        message = (
            f"The media type {content_type or '(none)'} is not supported; use application/json, text/csv or "
            "application/x-npy, or define input_fn and output_fn."
        )
        super().__init__(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, "Unsupported Media Type")
        self.content_type = content_type

    def __reduce__(self) -> tuple[type, tuple[str | None]]:
        return type(self), (self.content_type,)

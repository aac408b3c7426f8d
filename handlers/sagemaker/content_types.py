"""The media types that SageMaker's default functions read and write."""

from __future__ import annotations

JSON = "application/json"
CSV = "text/csv"
NPY = "application/x-npy"
OCTET_STREAM = "application/octet-stream"
ANY = "*/*"
UTF8_TYPES = [JSON, CSV]  # whose bodies scripts receive as text


def media_type(header: str | None) -> str:
    """Return a Content-Type without its parameters, in lower case."""
    return (header or "").partition(";")[0].strip().lower()

"""A request's body: bytes, text, or named parts as a form has them."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

# Text is a field; bytes are a file; the triple is a file name, what is in the file, and its content type.
Part = str | bytes | tuple[str, bytes | str, str]
Body = bytes | str | Mapping[str, Part]


def encode(body: Body, content_type: str = "") -> tuple[bytes, str]:
    """The bytes of a body and their content type; parts become ``multipart/form-data`` (RFC 7578).

    Raises ValueError for parts that are none, or whose whole is given a content type.
    """
    if isinstance(body, str):
        return body.encode(), content_type
    if isinstance(body, bytes):
        return body, content_type
    if not body:
        raise ValueError("A form of no parts cannot be sent; a mapping that is meant as JSON goes by predict_json.")
    if content_type:
        raise ValueError(
            f"A form is multipart/form-data, not {content_type}: give each part its own type, as "
            "(file name, bytes, content type), or send JSON by predict_json."
        )
    request = httpx.Request("POST", "http://-", files={name: _file(name, part) for name, part in body.items()})
    return request.read(), request.headers["content-type"]


def _file(name: str, part: Part) -> tuple[str | None, bytes | str] | tuple[str, bytes | str, str]:
    """A part as httpx takes it; without a file name it would make one up for text."""
    if isinstance(part, str):
        return None, part
    return (name, part, "application/octet-stream") if isinstance(part, bytes) else part

"""The body of a request: bytes, text, or the named parts of a form."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

# Text is a field; bytes are a file; a triple is a file's name, content and content type.
Part = str | bytes | tuple[str, bytes | str, str]
Body = bytes | str | Mapping[str, Part]


def encode_body(body: Body, content_type: str = "") -> tuple[bytes, str]:
    """Return the bytes of a body and their content type.

    Parts are encoded as ``multipart/form-data`` (RFC 7578). Raises ValueError for a mapping without parts,
    and for parts with a content type for the whole body.
    """
    if isinstance(body, str):
        return body.encode(), content_type
    if isinstance(body, bytes):
        return body, content_type
    if not body:
        raise ValueError("A form without parts cannot be sent; send a mapping as JSON with predict_json.")
    if content_type:
        raise ValueError(
            f"A form is multipart/form-data, not {content_type}: give each part its own type, as "
            "(file name, bytes, content type), or send JSON with predict_json."
        )
    request = httpx.Request(
        "POST", "http://-", files={name: _form_file(name, part) for name, part in body.items()}
    )
    return request.read(), request.headers["content-type"]


def _form_file(name: str, part: Part) -> tuple[str | None, bytes | str] | tuple[str, bytes | str, str]:
    """Return a part in httpx's form; without an explicit None httpx would invent a file name for text."""
    if isinstance(part, str):
        return None, part
    return (name, part, "application/octet-stream") if isinstance(part, bytes) else part

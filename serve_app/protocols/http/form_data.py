"""A request's body as the named inputs that a handler receives."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve_app.domain.request import InputPart
from serve_app.errors import InvalidBody
from serve_app.protocols.http import large_body

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MULTIPART = "multipart/form-data"
URLENCODED = "application/x-www-form-urlencoded"
FORM_TYPES = (MULTIPART, URLENCODED)
_PIECE_BYTES = 1 << 16
MAX_FIELDS = 1000  # of a form; inference.max_form_fields for predictions


async def read_body(
    content_type: str | None, body: bytes, max_fields: int = MAX_FIELDS
) -> tuple[InputPart, ...]:
    """Return the same as ``parse_body``, from a thread where the body is a large form."""
    return await large_body.parse_body(body, parse_body, content_type, body, max_fields)


def parse_body(content_type: str | None, body: bytes, max_fields: int = MAX_FIELDS) -> tuple[InputPart, ...]:
    """Return a form's fields in order, repeated ones too; any other body is one input, ``body``.

    The Content-Type of a part is used only where the part has a file name, and without its parameters.
    Raises InvalidBody, also where a form has more than ``max_fields`` fields.
    """
    if content_type is None:
        return (InputPart("body", body),)
    mime = content_type.partition(";")[0].strip()
    kind = mime.lower()
    if kind == MULTIPART:
        return _parse_multipart(content_type, body, max_fields)
    if kind == URLENCODED:
        return _parse_urlencoded(body, max_fields)
    return (InputPart("body", body, mime or None),)


def parse_query(text: bytes) -> tuple[InputPart, ...]:
    """Return a query's parameters in order, as a form's fields. Raises InvalidBody."""
    return _parse_urlencoded(text, MAX_FIELDS) if text else ()


def _parse_urlencoded(body: bytes, max_fields: int) -> tuple[InputPart, ...]:
    if body.count(b"&") >= max_fields:
        raise _too_many_fields(max_fields)
    fields = []
    for pair in body.strip(b"\r\n").split(b"&"):
        if pair:
            name, _, value = pair.replace(b"+", b" ").partition(b"=")
            fields.append(InputPart(_unquote(name).decode("utf-8", "replace"), _unquote(value)))
    return tuple(fields)


def _unquote(data: bytes) -> bytes:
    """Return ``data`` without its percent escapes.

    The standard library makes two objects of each escape, so a large value is decoded in parts.
    """
    if len(data) <= _PIECE_BYTES:
        return unquote_to_bytes(data)
    pieces, start = [], 0
    while start < len(data):
        end = start + _PIECE_BYTES
        escape = data.rfind(b"%", end - 2, end)  # one that the end would cut
        end = end if escape < 0 else escape
        pieces.append(unquote_to_bytes(data[start:end]))
        start = end
    return b"".join(pieces)


def _too_many_fields(limit: int) -> InvalidBody:
    return InvalidBody(f"The form has more than {limit} fields (inference.max_form_fields).")


def _parse_multipart(content_type: str, body: bytes, max_fields: int) -> tuple[InputPart, ...]:
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise InvalidBody(f"Content-Type {MULTIPART} names no boundary.")
    form = _FormParser(max_fields)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        parser.write(body)
    except FormParserError as error:
        raise InvalidBody(f"The {MULTIPART} body is malformed: {error}") from None
    if not form.ended:
        raise InvalidBody(f"The {MULTIPART} body ends before its closing boundary.")
    return tuple(form.fields)


class _FormParser:
    """A collector of the fields that the multipart parser reports."""

    def __init__(self, max_fields: int) -> None:
        self._max_fields = max_fields
        self.fields: list[InputPart] = []
        self.ended = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._chunks: list[bytes] = []

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.fields) >= self._max_fields:
            raise _too_many_fields(self._max_fields)
        self._headers = {}
        self._chunks = []

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._chunks.append(data[start:end])

    def _end(self) -> None:
        disposition = parse_options_header(self._headers.get(b"content-disposition"))[1]
        name = disposition.get(b"name")
        if name is None:
            raise InvalidBody(f"A part of the {MULTIPART} body has no name in its Content-Disposition.")
        content_type = None
        if b"filename" in disposition:
            mime = self._headers.get(b"content-type", b"application/octet-stream")
            content_type = mime.partition(b";")[0].strip().decode("latin-1")
        self.fields.append(InputPart(name.decode("utf-8", "replace"), b"".join(self._chunks), content_type))

    def _finish(self) -> None:
        self.ended = True

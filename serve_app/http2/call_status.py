"""The header blocks of gRPC's responses: initial headers, statuses and rejections."""

from __future__ import annotations

from urllib.parse import quote

import grpc

from serve_app.http2.hpack_headers import encode_headers
from serve_app.http2.message_framing import ENCODINGS
from serve_app.http2.stream import Http2Stream

_MAX_DETAILS = 4_096  # bytes of a status's details, percent-encoded: clients accept 8 KiB of trailers
_UNESCAPED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
_CONTENT_TYPE = encode_headers(
    [("content-type", "application/grpc"), ("grpc-accept-encoding", ",".join(ENCODINGS))]
)
_STATUS = {code: encode_headers([("grpc-status", str(code.value[0]))]) for code in grpc.StatusCode}

INITIAL_HEADERS = b"\x88" + _CONTENT_TYPE  # :status 200


def encode_status(code: grpc.StatusCode, details: str = "") -> bytes:
    """Return the fields of a status for trailers."""
    fields = _STATUS[code]
    if details:
        fields += encode_headers([("grpc-message", _percent_encode(details))])
    return fields


def encode_reason(reason: str) -> bytes:
    """Return the field with the machine-readable reason of an error."""
    return encode_headers([("x-torchrelay-reason", reason)])


QUOTA_FIELDS = encode_reason("quota_exceeded") + encode_headers([("retry-after", "1")])


def reject_call(stream: Http2Stream, code: grpc.StatusCode, details: str, fields: bytes = b"") -> None:
    """End a call that no method has received."""
    stream.send_trailers(INITIAL_HEADERS + encode_status(code, details) + fields)


def reject_request(stream: Http2Stream, status: int) -> None:
    """End a request that is not gRPC's with an HTTP status."""
    stream.send_trailers(b"\x08\x03%d" % status + _CONTENT_TYPE)


def _percent_encode(details: str) -> str:
    """Return ``details`` percent-encoded, cut to the size limit between characters."""
    encoded = quote(details, safe=_UNESCAPED, errors="backslashreplace")  # for half a surrogate pair
    while len(encoded) > _MAX_DETAILS:
        details = details[: len(details) * _MAX_DETAILS // len(encoded)]
        encoded = quote(details, safe=_UNESCAPED, errors="backslashreplace")
    return encoded

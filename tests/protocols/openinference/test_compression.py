"""Compressed bodies."""

from __future__ import annotations

import gzip
import tracemalloc
import zlib
from typing import Any

import orjson
import pytest

from serve_app.protocols.openinference import compression
from tests.support.openinference_requests import build_document


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("count", [3, 40_000])
def test_bodies_are_compressed_in_both_directions(
    send_request: Any, coding: str, compress: Any, count: int
) -> None:
    body = compress(orjson.dumps(build_document([0.5] * count)))
    response = send_request(
        "POST", "/v2/models/identity/infer", body, content_encoding=coding, accept_encoding=coding
    )
    assert response.json()["outputs"][0]["data"] == [0.5] * count  # httpx decodes the body
    assert response.headers.get("content-encoding") == (coding if count > 3 else None)


@pytest.mark.parametrize(
    ("coding", "body", "status", "message"),
    [
        ("br", b"x", 400, "'br' is not served; there are gzip and deflate"),
        ("gzip", b"", 400, "it ends too early"),
        ("gzip", b"x", 400, "does not match its Content-Encoding"),
        ("gzip", zlib.compress(b"{}"), 400, "incorrect header"),
        ("gzip", gzip.compress(b"{}" * 100_000, mtime=0)[:-9], 400, "it ends too early"),
        ("gzip", gzip.compress(b"{}", mtime=0) * 2, 400, "something follows its end"),
        ("deflate", zlib.compress(b"{}"), 400, "inputs is None"),
        ("gzip", gzip.compress(bytes(1 << 26), mtime=0), 413, "max_request_size (2000000 bytes)"),
        ("deflate", zlib.compress(bytes(2_000_001)), 413, "max_request_size (2000000 bytes)"),
        ("deflate", zlib.compress(bytes(2_000_000)), 400, "not JSON"),
    ],
)
def test_invalid_compressed_bodies_are_rejected(
    send_request: Any, coding: str, body: bytes, status: int, message: str
) -> None:
    tracemalloc.start()
    response = send_request(
        "POST", "/v2/models/identity/infer", body, limit=2_000_000, content_encoding=coding
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (response.status_code, message in response.json()["error"]) == (status, True), response.text
    assert peak < 1 << 25  # the largest of them would be 64 MiB


@pytest.mark.parametrize(
    ("accept", "coding"),
    [
        ("gzip", "gzip"),
        ("Deflate, identity;q=0.5", "deflate"),
        ("gzip;q=0.8, br;q=0", "gzip"),
        ("gzip, deflate", None),  # all codings that a library can read
        ("br", None),
        ("gzip;q=0", None),
        ("*", None),
        ("gzip" + ", identity" * 100, None),  # it would be cached
        ("", None),
    ],
)
def test_a_single_accepted_coding_is_selected(accept: str, coding: str | None) -> None:
    assert compression.select_coding(accept, 512) == coding
    assert compression.select_coding(accept, 511) is None

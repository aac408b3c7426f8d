"""The policy of data capture: its defaults, and errors with key, value and fix."""

from __future__ import annotations

import pytest

from serve_app.domain import capture
from serve_app.domain.capture import CapturePolicy
from serve_app.errors import BadRequest


def test_defaults_and_values() -> None:
    assert capture.read({}) == CapturePolicy()
    read = capture.read({"sample": 0.1, "redact": ["$.user.email"], "reference": "reference.jsonl"})
    assert (read.sample, read.redact, read.reference) == (0.1, ("$.user.email",), "reference.jsonl")
    assert capture.read({"destination": "s3://bucket/folder"}).is_remote
    assert not capture.read({"destination": "/data/captured"}).is_remote
    assert not capture.read({"max_megabytes": 0}).stores


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"sample": 1.5}, ("sample", "1.5", "from 0 to 1")),
        ({"sample": float("nan")}, ("sample", "from 0 to 1")),
        ({"sampel": 0.5}, ("sampel", "sample")),
        ({"redact": ["a..b"]}, ("redact", "a..b", "$.user.id")),
        ({"redact": ["a"] * 101}, ("redact", "101", "100")),
        ({"format": "csv"}, ("format", "csv", "jsonl")),
        ({"destination": "ftp://host/x"}, ("destination", "ftp://host/x", "s3://bucket/folder")),
        ({"destination": "s3:///x"}, ("destination", "s3:///x", "s3://bucket/folder")),
        ({"destination": "captured"}, ("destination", "captured", "absolute path")),
        ({"reference": 5}, ("reference", "5", "10")),
        ({"reference": ""}, ("reference", "JSONL")),
        ({"window": 0}, ("window", "0", "10")),
        ({"window_minutes": -1}, ("window_minutes", "-1")),
        ({"max_features": 1000}, ("max_features", "1000", "200")),
        ({"max_bytes_per_request": -1}, ("max_bytes_per_request", "-1")),
        ({"max_megabytes": "many"}, ("max_megabytes", "many")),
        ([], ("capture",)),
        (True, ("capture",)),
    ],
)
def test_an_invalid_policy_is_refused_with_key_value_and_fix(document, words) -> None:
    with pytest.raises(BadRequest) as error:
        capture.read(document)
    for word in ("capture", *words):
        assert word in str(error.value)

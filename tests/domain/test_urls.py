"""URLs as they are shown and logged."""

from __future__ import annotations

import pytest

from serve_app.domain import adapter
from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.urls import redact_query, redact_url


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("m.mar", "m.mar"),
        ("/models/m.mar", "/models/m.mar"),
        ("https://user:secret@host:8443/m.mar", "https://host:8443/m.mar"),
        ("https://bucket.s3.amazonaws.com/m.mar?X-Amz-Signature=secret", "https://bucket.s3.amazonaws.com/m.mar"),
        ("https://host/m.mar#secret", "https://host/m.mar"),
        ("s3://key:secret@bucket/m.mar", "s3://bucket/m.mar"),
        ("hf://gpt2@main", "hf://gpt2@main"),
        ("hf://owner/name@v1", "hf://owner/name@v1"),
        ("https://[secret", "(a malformed URL)"),
    ],
)  # fmt: skip
def test_a_url_is_shown_without_what_may_be_a_credential(url: str, shown: str) -> None:
    assert redact_url(url) == shown


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", ""),
        ("url=m.mar&initial_workers=1", "url=m.mar&initial_workers=1"),
        ("a=%20&url=https://u:secret@h/m.mar?k=secret&b=c", "a=%20&url=https://h/m.mar&b=c"),
        ("%75rl=https%3A%2F%2Fu%3Asecret%40h%2Fm.mar", "%75rl=https://h/m.mar"),
        ("curl=https://u:kept@h", "curl=https://u:kept@h"),
    ],
)
def test_the_parameter_url_of_a_query_is_redacted(query: str, shown: str) -> None:
    assert redact_query(query) == shown


def test_the_url_of_an_adapter_is_redacted() -> None:
    [document] = adapter.describe([AdapterSpec("a", "https://u:secret@h/a.zip?k=secret")], "m", "1")
    assert document["url"] == "https://h/a.zip"

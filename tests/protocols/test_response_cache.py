"""The response cache over each protocol."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.response_cache import CachePolicy
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute

CACHED = VersionRoute("1.0", "ready", 1, response_cache=CachePolicy())
TABLE = RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": CACHED})}, startup_complete=True)


def test_torchserves_predictions_are_answered_once(inference: Callable[..., Any]) -> None:
    app = inference(table=TABLE)
    answers = [app("POST", "/predictions/m", b"hi") for _ in range(2)]
    assert [(answer.body, answer["x-torchrelay-cache"]) for answer in answers] == [
        (b"hi", "miss"),
        (b"hi", "hit"),
    ]
    assert answers[0]["x-request-id"] != answers[1]["x-request-id"]
    assert app("POST", "/predictions/m/1.0/other", b"hi")["x-torchrelay-cache"] == "miss"
    assert len(app.backend.requests) == 2


def test_a_request_may_refuse_a_stored_response(inference: Callable[..., Any]) -> None:
    app = inference(table=TABLE)
    app("POST", "/predictions/m", b"hi")
    answer = app("POST", "/predictions/m", b"hi", {"Cache-Control": "no-store"})
    assert b"x-torchrelay-cache" not in dict(answer.headers)
    assert len(app.backend.requests) == 2


def test_a_stored_response_needs_a_key(inference: Callable[..., Any]) -> None:
    grant = KeyGrant(frozenset(("infer",)), ("m",), None)
    elsewhere = KeyGrant(frozenset(("infer",)), ("other",), None)
    keys = {sha256(b"mine").digest(): grant, sha256(b"theirs").digest(): elsewhere}
    app = inference(table=replace(TABLE, access=AccessTable(keys)))
    authorized = {"Authorization": "Bearer mine"}
    assert app("POST", "/predictions/m", b"hi", authorized).status == 200
    assert app("POST", "/predictions/m", b"hi", authorized)["x-torchrelay-cache"] == "hit"
    for headers in ({}, {"Authorization": "Bearer theirs"}, {"Authorization": "Bearer guess"}):
        answer = app("POST", "/predictions/m", b"hi", headers)
        assert answer.status >= 400 and answer.body != b"hi"
    assert len(app.backend.requests) == 1

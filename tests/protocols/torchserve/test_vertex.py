"""Vertex AI's contract of custom containers: its own paths for health and predictions."""

from __future__ import annotations

import json
from typing import Any

from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute

ENDPOINT = "/v1/endpoints/7/deployedModels/9"
ALIASES = {ENDPOINT: "/ping", f"{ENDPOINT}:predict": "/invocations", "/score": "/invocations"}
JSON = {"content-type": "application/json"}
READY = VersionRoute("1.0", "ready", 1, loaded_at_startup=True)
STARTING = VersionRoute("1.0", "loading", 0, loaded_at_startup=True)


def table(route: VersionRoute) -> RoutingTable:
    return RoutingTable(1, {"m": ModelRoute("1.0", {"1.0": route})}, True)


def test_the_health_route_is_200_only_when_the_model_answers(inference: Any) -> None:
    for route, status in ((READY, 200), (STARTING, 503)):
        response = inference(table=table(route), ping="ready", aliases=ALIASES)("GET", ENDPOINT)
        assert response.status == status


def test_the_predict_route_reaches_the_only_model_with_any_body(inference: Any) -> None:
    app = inference(table=table(READY), ping="ready", aliases=ALIASES)
    body = json.dumps({"instances": [1], "parameters": {"k": 2}}).encode()
    response = app("POST", f"{ENDPOINT}:predict", body, JSON)
    assert response.status == 200
    [part] = app.backend.requests[-1].inputs
    assert part.value == body
    assert app("POST", f"{ENDPOINT}:predict", b"\x00\x01", {"content-type": "image/png"}).status == 200
    assert app("POST", "/score", b"x").status == 200


def test_other_paths_below_the_routes_are_unknown(inference: Any) -> None:
    app = inference(table=table(READY), aliases=ALIASES)
    for path in (f"{ENDPOINT}:explain", f"{ENDPOINT}/x", "/v1/endpoints/7"):
        assert app("POST", path, b"{}", JSON).status == 404


def test_an_alias_may_be_one_of_a_method(inference: Any) -> None:
    """Inference Endpoints send both probes and predictions to the root."""
    app = inference(table=table(READY), ping="ready", aliases={"GET /": "/ping", "POST /": "/invocations"})
    assert (app("GET", "/").status, app("GET", "/").body) == (200, b"")
    assert app("POST", "/", b'{"inputs": "a"}', JSON).status == 200
    assert app.backend.requests[-1].model == "m"
    assert app("PUT", "/").status == 405
    assert inference(table=table(READY))("POST", "/").status == 405

"""Ids of models with adapters: how they are resolved, listed and passed to the handler."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.domain.adapter import AdapterSpec
from serve_app.domain.request import InferenceRequest, InferenceResponse
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.errors import AdapterNotFound
from serve_app.protocols.openai.model_ids import parse_id


def version(number: str, *adapters: str) -> VersionRoute:
    return VersionRoute(number, "ready", 1, adapters=tuple(AdapterSpec(name) for name in adapters))


MODELS = RoutingTable(
    1,
    {
        "plain": ModelRoute("1.0", {"1.0": version("1.0")}),
        "poet": ModelRoute(
            "1.0",
            {"1.0": version("1.0", "fr", "en"), "2.0": version("2.0", "nl")},
            TrafficPolicy(labels={"prod": "2.0"}),
        ),
    },
    startup_complete=True,
)


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("poet", ("poet", None, "")),
        ("poet:", ("poet", None, "")),
        ("poet:1.0", ("poet", "1.0", "")),
        ("poet:prod", ("poet", "prod", "")),
        ("poet:fr", ("poet", None, "fr")),
        ("poet:1.0:fr", ("poet", "1.0", "fr")),
        ("poet:prod:nl", ("poet", "prod", "nl")),
        ("poet:3.0:fr", ("poet", "3.0", "fr")),  # the data plane refuses the version
        ("plain:fr", ("plain", "fr", "")),
        ("unknown:fr", ("unknown", "fr", "")),
    ],
)
def test_an_id_is_a_model_a_version_and_an_adapter(id: str, expected: tuple[str, str | None, str]) -> None:
    assert parse_id(MODELS, id) == expected


@pytest.mark.parametrize(
    ("id", "names"), [("poet:de", "en, fr, nl"), ("poet:1.0:nl", "en, fr"), ("plain:1.0:a", "none")]
)
def test_an_unknown_adapter_is_not_found(id: str, names: str) -> None:
    with pytest.raises(AdapterNotFound, match=rf"no adapter '.*'\. Its adapters: {names}\.$"):
        parse_id(MODELS, id)


async def complete(request: InferenceRequest) -> InferenceResponse:
    return InferenceResponse(b'{"choices": []}', version=request.version or "1.0")


@pytest.mark.parametrize(
    ("id", "header"), [("poet:fr", "fr"), ("poet:prod:nl", "nl"), ("poet:2.0", ""), ("poet", "")]
)
def test_requests_have_the_adapter_as_a_header(inference: Any, id: str, header: str) -> None:
    app = inference(complete, table=MODELS)
    body = json.dumps({"model": id}).encode()
    assert app("POST", "/v1/completions", body, {"adapter": "of the client"}).status == 200
    [request] = app.backend.requests
    assert (request.model, request.headers["adapter"]) == ("poet", header)
    assert [part.value for part in request.inputs] == [body]


def test_an_unknown_adapter_is_an_error_of_the_model(inference: Any) -> None:
    app = inference(complete, table=MODELS)
    response = app("POST", "/v1/chat/completions", b'{"model": "poet:de", "messages": []}')
    error = json.loads(response.body)["error"]
    assert (response.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == "Model poet has no adapter 'de'. Its adapters: en, fr, nl."
    assert app("GET", "/v1/models/poet:de").status == 404
    assert not app.backend.requests


def test_adapters_are_listed_with_their_parents(inference: Any) -> None:
    app = inference(table=MODELS)
    models = json.loads(app("GET", "/v1/models").body)
    assert [(item["id"], item.get("parent")) for item in models["data"]] == [
        ("plain", None),
        ("poet", None),
        ("poet:en", "poet"),
        ("poet:fr", "poet"),
        ("poet:1.0", None),
        ("poet:1.0:en", "poet:1.0"),
        ("poet:1.0:fr", "poet:1.0"),
        ("poet:2.0", None),
        ("poet:2.0:nl", "poet:2.0"),
    ]
    assert models["models"] == [item["id"] for item in models["data"]]
    for item in models["data"]:
        assert json.loads(app("GET", f"/v1/models/{item['id']}").body) == item

"""Amazon SageMaker's contract of endpoints with many models, on the one port that it has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

import pytest

from serve_app.domain.request import InferenceRequest, InferenceResponse, ResponseStream
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.errors import StartOutOfMemory
from serve_app.settings import ControlSettings

JSON = {"content-type": "application/json"}


@pytest.fixture
def endpoint(inference: Any, management: Any) -> Any:
    app = inference(control_api=management().control_api, serve_management=True)
    return app


def load(app: Any, name: str = "m", url: str = "m-1.0.mar") -> Any:
    return app("POST", "/models", json.dumps({"model_name": name, "url": url}).encode(), JSON)


def test_a_model_is_loaded_listed_invoked_and_unloaded(endpoint: Any) -> None:
    assert endpoint("GET", "/ping").status == 200
    assert load(endpoint).status == 200
    assert load(endpoint).status == 409
    [model] = json.loads(endpoint("GET", "/models").body)["models"]
    assert (model["modelName"], model["modelUrl"]) == ("m", "m-1.0.mar")
    [described] = json.loads(endpoint("GET", "/models/m").body)
    assert (described["modelName"], described["modelUrl"]) == ("m", "m-1.0.mar")
    target = {"x-amzn-sagemaker-target-model": "m.tar.gz", "content-type": "application/octet-stream"}
    response = endpoint("POST", "/models/m/invoke", b"hello", target)
    assert (response.status, response.body) == (200, b"hello")
    assert endpoint("DELETE", "/models/m").status == 200
    assert endpoint("DELETE", "/models/m").status == endpoint("GET", "/models/m").status == 404
    assert endpoint("POST", "/models/none/invoke", b"x").status == 404


def test_a_model_without_room_in_memory_is_507(inference: Any, management: Any) -> None:
    control_api = management().control_api
    control_api.error = StartOutOfMemory("m", "1.0", "MemoryError")
    assert load(inference(control_api=control_api, serve_management=True)).status == 507


def table(*routes: VersionRoute, complete: bool = True) -> RoutingTable:
    models = {f"m{index}": ModelRoute("1.0", {"1.0": route}) for index, route in enumerate(routes)}
    return RoutingTable(1, models, complete)


READY = VersionRoute("1.0", "ready", 1, loaded_at_startup=True)
FAILED = VersionRoute("1.0", "failed", 0, loaded_at_startup=True)


@pytest.mark.parametrize(
    ("routes", "status"),
    [
        (table(READY), 200),
        (table(READY, READY), 200),
        (RoutingTable(), 503),  # this process has no table yet
        (table(complete=False), 503),  # the model is being fetched
        (table(VersionRoute("1.0", "loading", 0, loaded_at_startup=True), complete=False), 503),
        (table(), 503),  # the model was refused
        (table(FAILED), 503),
        (table(READY, FAILED), 503),
        (table(VersionRoute("1.0", "loading", 0, loaded_at_startup=True)), 503),  # its replica died
        (table(VersionRoute("1.0", "idle", 0, loaded_at_startup=True, wake_timeout=9.0)), 200),
        (table(READY, VersionRoute("1.0", "failed", 0)), 200),  # registered at run time
    ],
)
def test_ping_follows_the_models_of_the_start_up(inference: Any, routes: RoutingTable, status: int) -> None:
    response = inference(table=routes, ping="ready")("GET", "/ping")
    assert (response.status, response.body) == (status, b"")


def test_ping_needs_no_model_where_none_is_loaded_at_the_start(asgi_inference: Any) -> None:
    control = ControlSettings(load_models="none")
    for routes, status in ((table(), 200), (table(complete=False), 503), (table(FAILED), 503)):
        app = asgi_inference(table=routes, control=control, ping="ready")
        assert app("GET", "/ping").status == status


def test_a_custom_attribute_reaches_the_model_and_its_stream_is_sent_in_chunks(inference: Any) -> None:
    app = inference(chunks)
    attributes = {"x-amzn-sagemaker-custom-attributes": "trace=1", "content-type": "text/csv"}
    response = app("POST", "/invocations?model_name=m", b"a,b", attributes)
    assert (response.status, response.chunks) == (200, [b"a", b"b", b""]), "and the end of the body"
    assert app.backend.requests[0].headers["x-amzn-sagemaker-custom-attributes"] == "trace=1"


async def chunks(request: InferenceRequest) -> ResponseStream:
    async def split() -> AsyncIterator[bytes]:
        for word in request.inputs[-1].value.split(b","):
            yield word

    return ResponseStream(InferenceResponse(b"", "text/plain", version="1.0"), split())


def test_invocations_reach_the_only_model_and_a_form_may_name_another_one(inference: Any) -> None:
    app = inference(table=table(READY))
    for content_type in (None, "application/json", "text/csv"):
        headers = {} if content_type is None else {"content-type": content_type}
        response = app("POST", "/invocations", b"1", headers)
        assert (response.status, response.body) == (200, b"1")
        assert app.backend.requests[-1].model == "m0"
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert app("POST", "/invocations", b"model_name=none&data=1", form).status == 404
    assert app("POST", "/invocations?model_name=none", b"1").status == 404
    assert app("POST", "/invocations/m0", b"1").status == 404
    assert app("POST", "/invocationsx", b"1").status == 404


def test_the_version_is_that_of_mlflow(inference: Any) -> None:
    app = inference(table=table(READY))
    response = app("GET", "/version")
    assert (response.status, response["content-type"]) == (200, "text/plain")
    assert response.body.decode() == metadata.version("mlflow-skinny")
    assert app("POST", "/version").status == app("GET", "/version/x").status == 404

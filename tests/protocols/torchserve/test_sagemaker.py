"""Amazon SageMaker's contract of endpoints with many models, on the one port that it has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve_app.errors import StartOutOfMemory

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

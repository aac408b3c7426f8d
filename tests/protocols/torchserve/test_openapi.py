"""The documents are valid, describe what is served, and have TorchServe's operations in its order."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from openapi_spec_validator import OpenAPIV30SpecValidator, OpenAPIV31SpecValidator

import serve_app
from serve_app.domain import workflow_graph
from serve_app.domain.model import ModelSpec
from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute
from serve_app.domain.traffic_policy import TrafficPolicy
from serve_app.protocols.torchserve import openapi

# What a client generated from TorchServe 0.12.0's documents calls: id, method and path, parameters
# (* is required), statuses. Its 210 is 206 here, which is what both servers send.
INFERENCE = """
apiDescription      | options / | | 200 500
ping                | get /ping | | 200 500
predictions         | post /v1/models/{model_name}:predict | model_name* | 200 404 500 503
predictions         | post /v2/models/{model_name}/infer | model_name* | 200 404 500 503
predictions         | post /predictions/{model_name} | model_name* | 200 404 500 503
version_predictions | post /predictions/{model_name}/{model_version} | model_name* model_version* | 200 404 500 503
api-description     | get /api-description | | 200 500
metrics             | get /metrics | name[] | 200 500
"""  # noqa: E501
MANAGEMENT = """
apiDescription | options / | | 200 500
listModels | get /models | limit=100 next_page_token | 200 500
registerModel | post /models | url* model_name handler task runtime batch_size=1 max_batch_delay=100 response_timeout=120 startup_timeout=120 initial_workers=0 synchronous=True s3_sse_kms=False | 200 202 206 400 404 409 500
describeModel | get /models/{model_name} | model_name* | 200 404 500
setAutoScale | put /models/{model_name} | model_name* min_worker=1 max_worker=1 number_gpu=0 synchronous=False timeout=-1 | 200 202 206 400 404 500
unregisterModel | delete /models/{model_name} | model_name* synchronous=False timeout=-1 | 200 202 404 408 500
version_describeModel | get /models/{model_name}/{model_version} | model_name* model_version* | 200 404 500
version_setAutoScale | put /models/{model_name}/{model_version} | model_name* model_version* min_worker=1 max_worker=1 number_gpu=0 synchronous=False timeout=-1 | 200 202 206 400 404 500
version_unregisterModel | delete /models/{model_name}/{model_version} | model_name* model_version* synchronous=False timeout=-1 | 200 202 404 408 500
setDefault | put /models/{model_name}/{model_version}/set-default | model_name* model_version* | 200 404 500
api-description | get /api-description | | 200 500
metrics | get /metrics | name[] | 200 500
"""  # noqa: E501
METRICS = "metrics | get /metrics | name[] | 200 500"
MODEL = """
m | post /prediction/m | | 200 500
m | post /v1/models/{model_name}:predict | model_name* | 200 500
m | post /v2/models/{model_name}/infer | model_name* | 200 500
"""
BOTH = "\n".join(INFERENCE.strip().splitlines()[:-1] + MANAGEMENT.strip().splitlines()[1:-2]) + "\n" + METRICS
MODELS_MANAGEMENT = "\n".join(MANAGEMENT.strip().splitlines()[3:10])

DOCUMENTS = {
    "inference": (openapi.INFERENCE, INFERENCE, 2),
    "management": (openapi.MANAGEMENT, MANAGEMENT, 0),
    "metrics": (openapi.METRICS, METRICS, 0),
    "both": (openapi.BOTH, BOTH, 2),
    "model": (openapi.describe_model("m"), MODEL, 2),
    "management of a model": (openapi.describe_model_management("m"), MODELS_MANAGEMENT, 0),
}


def operations(document: dict[str, Any]) -> list[list[str]]:
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parameters = " ".join(map(parameter, operation["parameters"]))
            found.append(
                [operation["operationId"], f"{method} {path}", parameters, " ".join(operation["responses"])]
            )
    return found


def parameter(result: dict[str, Any]) -> str:
    default = result["schema"].get("default")
    return (
        result["name"] + ("*" if result["required"] else "") + (f"={default}" if default is not None else "")
    )


@pytest.mark.parametrize("which", DOCUMENTS)
def test_torchserves_operations_come_first_and_in_its_order(which: str) -> None:
    document, lines, _ = DOCUMENTS[which]
    theirs = [[word.strip() for word in line.split("|")] for line in lines.strip().splitlines()]
    for ours, wanted in zip(operations(document), theirs):
        assert ours[:2] + ours[3:] == wanted[:2] + wanted[3:]
        more = ours[2].removeprefix(wanted[2]).split()
        assert ours[2].startswith(wanted[2]) and not any(parameter.endswith("*") for parameter in more)
        assert not more or ours[0].endswith("setAutoScale"), "autoscaling's alone are ours"
    assert len(operations(document)) >= len(theirs)


@pytest.mark.parametrize("which", DOCUMENTS)
def test_the_documents_are_valid(which: str) -> None:
    """But for the ids that TorchServe gives to more than one operation, which its clients are generated
    with.
    """
    document, _, doubles = DOCUMENTS[which]
    found = [type(error).__name__ for error in OpenAPIV30SpecValidator(document).iter_errors()]
    assert found == ["DuplicateOperationIDError"] * doubles
    assert document["openapi"] == "3.0.1"
    assert document["info"]["version"] == serve_app.__version__


def test_a_body_is_any_bytes() -> None:
    operation = openapi.INFERENCE["paths"]["/predictions/{model_name}"]["post"]
    anything = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
    assert operation["requestBody"]["content"] == operation["responses"]["200"]["content"] == anything
    assert operation["requestBody"]["required"]


@pytest.mark.parametrize("path", ["/", "/api-description", "/api-description/"])
@pytest.mark.parametrize("app", ["inference", "management"])
def test_the_apis_describe_themselves(app: str, path: str, asgi_inference, management) -> None:
    build = {"inference": asgi_inference, "management": management}[app]
    answer = build()("OPTIONS" if path == "/" else "GET", path)
    assert (answer.status, answer["content-type"]) == (200, "application/json")
    assert json.loads(answer.body) == DOCUMENTS[app][0]
    assert answer.body.startswith(b'{\n  "openapi": "3.0.1",\n')


def test_a_port_with_both_apis_describes_both(inference) -> None:
    assert json.loads(inference(serve_management=True)("OPTIONS", "/").body) == openapi.BOTH


def test_every_inference_route_is_served(inference) -> None:
    rows = {version: VersionRoute(version, "ready", 1) for version in ("1.0", "2.0")}
    steps = workflow_graph.read({"steps": {"a": {"model": "m"}}})
    workflow = ModelRoute("1.0", {"1.0": VersionRoute("1.0", "ready", 0, graph=steps)})
    app = inference(
        table=RoutingTable(1, {"m": ModelRoute("1.0", rows), "w": workflow}, startup_complete=True)
    )
    for name, route, _, statuses in operations(openapi.INFERENCE):
        method, path = route.split()
        if path == "/metrics" or path.startswith("/async/"):
            continue  # on its own port, unless the ports are one; beside what it is about
        path = (
            path.replace("{model_name}", "m")
            .replace("{model_version}", "2.0")
            .replace("{workflow_name}", "w")
        )
        if name == "invocations":
            path += "?model_name=m"
        answer = app(method.upper(), path, b'{"inputs": []}' if path == "/v2/models/m/infer" else b"")
        assert answer.status == 200, route
        assert "200" in statuses


BODIES = {
    "setTraffic": {"versions": {"1.0": 10_000}},
    "beginRollout": {"to": "1.0"},
    "beginExperiment": {
        "name": "e",
        "arms": {"a": {"version": "1.0", "weight": 5000}, "b": {"version": "1.0", "weight": 5000}},
        "metrics": [{"name": "time"}],
        "baseline": "a",
    },
    "reward": {"value": 1, "request_id": "r"},
    "registerWorkflow": {"name": "w", "steps": {"a": {"model": "m"}}},
}


def test_every_management_route_is_served(management) -> None:
    app = management()
    for name, route, _, _ in operations(openapi.MANAGEMENT):
        method, path = route.split()
        if path in ("/metrics", "/token", "/models/{model_name}/events"):
            continue  # on its own port; only where keys are wanted; see test_model_events.py
        app.control_api.specs.clear()
        app.control_api.put(ModelSpec("m", "1.0", "m.mar", "sha256", "archive"))
        path = path.replace("{model_name}", "m").replace("{model_version}", "1.0")
        path = path.replace("{experiment_id}", "e1")
        path = path.replace("{workflow_name}", "w").replace("{workflow_version}", "1.0")
        if name == "registerModel":
            path += "?url=other.mar"
        body = json.dumps(BODIES[name]).encode() if name in BODIES else b""
        kind = {"content-type": "application/json"} if body else {}
        assert app(method.upper(), path, body, kind).status in (200, 202), route


def test_a_document_of_each_kind_is_what_the_schema_says() -> None:
    """Whatever a body of ours has is described, and what must be there is in it."""
    for methods in openapi.MANAGEMENT["paths"].values():
        for operation in methods.values():
            if operation["operationId"] in BODIES:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                body = BODIES[operation["operationId"]]
                assert set(schema.get("required", ())) <= body.keys() <= set(schema["properties"])
    policy = openapi.MANAGEMENT["paths"]["/models/{model_name}/traffic"]["put"]["requestBody"]["content"]
    fields = {field.name for field in dataclasses.fields(TrafficPolicy)} - {"allocation"}
    assert set(policy["application/json"]["schema"]["properties"]) == fields


ASK = [
    "/predictions/m",
    "/predictions/m/2.0/",
    "/explanations/m",
    "/v1/models/m:predict",
    "/invocations?model_name=m",
    "/models/m/invoke",
    "/endpoints/m/invocations",
    "/m/predict",
    "/m/2.0/predict",
]


@pytest.mark.parametrize("path", ASK)
def test_a_model_describes_itself_on_every_route_of_its_own(inference, path: str) -> None:
    app = inference()
    answer = app("OPTIONS", path)
    assert json.loads(answer.body) == openapi.describe_model("m")
    assert app.backend.requests == []


@pytest.mark.parametrize("path", [p.replace("m", "none") for p in ("/predictions/m", "/m/predict")])
def test_unknown_model_has_no_document(inference, path: str) -> None:
    answer = inference()("OPTIONS", path)
    assert (answer.status, json.loads(answer.body)["message"]) == (404, "Model not found: none")


def test_unknown_version_has_no_document(inference) -> None:
    answer = inference()("OPTIONS", "/predictions/m/9")
    assert json.loads(answer.body)["message"] == "Model version: 9 does not exist for model: m"


@pytest.mark.parametrize("path", ["/models/m", "/models/m/1.0", "/models/m/1.0/set-default"])
def test_a_model_describes_its_management(management, path: str) -> None:
    app = management()
    app.control_api.put(ModelSpec("m", "1.0", "m.mar", "sha256", "archive"))
    assert json.loads(app("OPTIONS", path).body) == openapi.describe_model_management("m")
    missing = re.sub(r"^/models/m", "/models/none", path)
    assert json.loads(app("OPTIONS", missing).body)["message"] == "Model not found: none"


def test_a_descriptions_fields_are_those_of_the_schema(management) -> None:
    app = management()
    folder = {"task": "text-generation"}
    app.control_api.put(ModelSpec("m", "1.0", "m.mar", "sha256", "archive", max_workers=2, config=folder))
    [result] = json.loads(app("GET", "/models/m").body)
    answer = openapi.MANAGEMENT["paths"]["/models/{model_name}"]["get"]["responses"]["200"]
    schema = answer["content"]["application/json"]["schema"]["items"]
    assert set(schema["required"]) <= set(result)
    assert {key for key in schema["properties"] if not key.startswith("lastError")} <= set(result)


SCHEMAS = {
    "input": {
        "mediaType": "application/json",
        "schema": {"$ref": "#/$defs/Point", "$defs": {"Point": {"type": "object"}}},
    },
    "output": {"mediaType": "", "schema": {"type": "number"}},
}


def test_the_document_of_a_model_class_has_its_schemas(inference) -> None:
    versions = {"1.0": VersionRoute("1.0", "ready", 1, schemas=SCHEMAS)}
    app = inference(table=RoutingTable(1, {"m": ModelRoute("1.0", versions)}, startup_complete=True))
    document = json.loads(app("OPTIONS", "/predictions/m").body)
    operation = document["paths"]["/predictions/m"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/input.Point"}
    assert document["components"]["schemas"] == {"input.Point": {"type": "object"}}
    assert operation["responses"]["200"]["content"] == {"*/*": {"schema": {"type": "number"}}}
    found = [type(error).__name__ for error in OpenAPIV31SpecValidator(document).iter_errors()]
    assert set(found) <= {"DuplicateOperationIDError"}


def test_documents_of_the_author_without_schemas_leave_the_document_unchanged(inference) -> None:
    versions = {"1.0": VersionRoute("1.0", "ready", 1, schemas={"documents": {"2.0": {"swagger": "2.0"}}})}
    app = inference(table=RoutingTable(1, {"m": ModelRoute("1.0", versions)}, startup_complete=True))
    assert json.loads(app("OPTIONS", "/predictions/m").body) == openapi.describe_model("m")

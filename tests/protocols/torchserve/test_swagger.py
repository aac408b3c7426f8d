"""``/swagger.json``: the document of Azure ML's inference server, from schemas of every origin."""

from __future__ import annotations

import json
from typing import Any

import openapi_spec_validator
import pytest

from serve_app.domain.routing_table import ModelRoute, RoutingTable, VersionRoute

DECORATED = {
    "input": {"mediaType": "application/json", "schema": {"type": "object", "example": {"data": [1]}}},
    "output": {"mediaType": "application/json", "schema": {"type": "array", "items": {"type": "number"}}},
    "versions": ["2.0", "3.0", "3.1"],
}
CLASS = {
    "input": {
        "mediaType": "application/json",
        "schema": {"$ref": "#/$defs/Row", "$defs": {"Row": {"type": "object"}}},
    },
    "output": {"mediaType": "application/json", "schema": {"type": ["string", "null"]}},
}
ALIASES = {"/score": "/invocations"}


def table(schemas: Any, count: int = 1) -> RoutingTable:
    route = VersionRoute("2.0", "ready", 1, loaded_at_startup=True, schemas=schemas)
    return RoutingTable(1, {f"m{i}": ModelRoute("2.0", {"2.0": route}) for i in range(count)}, True)


@pytest.mark.parametrize("schemas", [None, DECORATED, CLASS], ids=["none", "decorated", "class"])
@pytest.mark.parametrize("version", ["", "2", "2.0", "3", "3.0", "3.1"])
def test_documents_of_all_versions_are_valid(inference: Any, schemas: Any, version: str) -> None:
    app = inference(table=table(schemas), aliases=ALIASES)
    response = app("GET", f"/swagger.json{version and f'?version={version}'}")
    assert response.status == 200
    document = json.loads(response.body)
    openapi_spec_validator.validate(document)
    assert list(document["paths"]) == ["/", "/score", "/swagger.json"]
    assert document["paths"]["/score"]["post"]["operationId"] == "RunMLService"
    assert document["info"] == {"title": "m0", "version": "2.0"}


def test_the_schemas_are_those_of_the_handler(inference: Any) -> None:
    def read(schemas: Any, version: str) -> tuple[str, Any]:
        app = inference(table=table(schemas), aliases=ALIASES)
        document = json.loads(app("GET", f"/swagger.json?version={version}").body)
        definitions = document.get("definitions") or document["components"]["schemas"]
        return document.get("swagger") or document["openapi"], definitions

    for version, name in (("2", "2.0"), ("3", "3.0.3"), ("3.1", "3.1.0")):
        found, definitions = read(DECORATED, version)
        assert found == name
        assert definitions["ServiceInput"] == DECORATED["input"]["schema"]
        assert definitions["ServiceOutput"] == DECORATED["output"]["schema"]
    found, definitions = read(CLASS, "3")
    assert found == "3.1.0", "JSON Schema is that of OpenAPI 3.1"
    assert definitions["ServiceInput"] == {"$ref": "#/components/schemas/input.Row"}
    assert definitions["input.Row"] == {"type": "object"}
    assert read(CLASS, "2")[1]["ServiceInput"] == {"type": "object", "example": {}}


def test_a_version_that_the_decorators_cannot_have_is_404(inference: Any) -> None:
    app = inference(table=table({**DECORATED, "versions": ["3.0", "3.1"]}), aliases=ALIASES)
    assert app("GET", "/swagger.json?version=3").status == 200
    for version in ("2", "4", "x"):
        response = app("GET", f"/swagger.json?version={version}")
        assert (response.status, response["x-torchrelay-reason"]) == (404, "no_document_version")
        assert json.loads(response.body)["message"].endswith("there are 3.0, 3.1.")


def test_a_document_of_the_author_takes_precedence(inference: Any) -> None:
    documents = {"2.0": {"swagger": "2.0", "info": {"title": "own"}}}
    app = inference(table=table({**DECORATED, "documents": documents, "versions": ["3.0"]}))
    assert json.loads(app("GET", "/swagger.json").body) == documents["2.0"]
    assert json.loads(app("GET", "/swagger.json?version=3").body)["paths"]["/predictions/m0"]
    assert inference(table=table({"documents": documents}))("GET", "/swagger.json?version=3").status == 200


def test_a_name_selects_one_of_several_models(inference: Any) -> None:
    app = inference(table=table(None, count=2))
    assert app("GET", "/swagger.json").status == 400
    assert json.loads(app("GET", "/swagger.json?model_name=m1").body)["info"]["title"] == "m1"
    assert app("GET", "/swagger.json?model_name=none").status == 404
    assert app("POST", "/swagger.json").status == 405
    assert app("GET", "/swagger.json/x").status == 404

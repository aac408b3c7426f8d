"""Workflows over the control plane: TorchServe's routes, for its archives and for our own documents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from starlette.routing import Route
from typing_extensions import NotRequired, TypedDict

from serve_app.control.api import ControlPlane
from serve_app.domain import validation
from serve_app.domain.model import Registration
from serve_app.domain.urls import redact_url
from serve_app.errors import InvalidBody
from serve_app.protocols.http import auth, json_body
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.management.routing import route
from serve_app.protocols.torchserve import form_data
from serve_app.protocols.torchserve.descriptions import MAX_PAGE_SIZE
from serve_app.protocols.torchserve.parameters import (
    WorkflowParameters,
    parse_bool,
    parse_count,
    parse_integer,
    parse_query,
)

_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class WorkflowEntry(TypedDict):
    workflowName: str
    workflowUrl: str


class WorkflowPage(TypedDict):
    nextPageToken: NotRequired[str]
    workflows: list[WorkflowEntry]


def build_routes(control: ControlPlane, limit: int) -> list[Route]:
    """Return the routes of workflows; a body has at most ``limit`` bytes."""

    async def list_page(exchange: HttpExchange) -> Any:
        query = parse_query(exchange)
        size = parse_integer(query.get("limit"), MAX_PAGE_SIZE)
        size = size if 0 <= size <= MAX_PAGE_SIZE else MAX_PAGE_SIZE
        start = max(parse_integer(query.get("next_page_token"), 0), 0)
        page, next_start = await control.list_workflows(start, size, auth.get_allowed_models(exchange))
        workflows: list[WorkflowEntry] = [
            {"workflowName": name, "workflowUrl": redact_url(url)} for name, url in page
        ]
        document: WorkflowPage = {"workflows": workflows}
        if next_start is not None:
            document = {"nextPageToken": str(next_start), "workflows": workflows}
        return document

    async def register(exchange: HttpExchange) -> Any:
        """Register a workflow from the body's document, in YAML or JSON, or from an archive's URL.

        A body with ``steps`` is a document.
        """
        body = await exchange.read_body(limit)
        fields = {**parse_query(exchange), **(await asyncio.to_thread(_parse_body, exchange, body))}
        registration = replace(_parse_registration(fields), allowed_models=auth.get_allowed_models(exchange))
        ref = await control.register_workflow(registration, _workflow_document(fields))
        return {"status": f"Workflow {ref.name} has been registered and scaled successfully."}

    async def unregister(exchange: HttpExchange, name: str, version: str | None = None) -> Any:
        await control.unregister_workflow(name, version)
        return {"status": f'Workflow "{name}" unregistered'}

    async def describe(exchange: HttpExchange, name: str) -> Any:
        return await control.api.get_workflow(name)

    return [
        route("/workflows", GET=list_page, POST=register),
        route(
            "/workflows/{name}", GET=lambda exchange, name: control.api.get_workflow(name), DELETE=unregister
        ),
        route("/workflows/{name}/{version}", DELETE=unregister),
    ]


def _workflow_document(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the workflow that the request itself holds, without the registration's parameters."""
    if "steps" not in fields:
        return None
    return {key: value for key, value in fields.items() if key not in _PARAMETERS}


_PARAMETERS = tuple(WorkflowParameters.__annotations__)


def _parse_registration(fields: dict[str, Any]) -> Registration:
    parameters = {key: str(fields[key]) for key in _PARAMETERS if fields.get(key) is not None}
    return Registration(
        url=parameters.get("url", ""),
        model_name=parameters.get("workflow_name") or None,
        response_timeout=parse_count(parameters.get("response_timeout"), None),
        startup_timeout=parse_count(parameters.get("startup_timeout"), None),
        s3_sse_kms=parse_bool(parameters.get("s3_sse_kms")),
        sha256=parameters.get("sha256") or None,
    )


def _parse_body(exchange: HttpExchange, body: bytes) -> dict[str, Any]:
    """Return the fields of the body, none for an empty body. Raises InvalidBody."""
    content_type = exchange.headers.get("content-type", "")
    mime = content_type.partition(";")[0].strip().lower()
    if not body.strip():
        return {}
    if mime in _YAML:
        try:
            return validation.parse_yaml(body)
        except validation.DocumentError as error:
            raise InvalidBody(f"The body {error}") from None
    if mime in (form_data.MULTIPART, form_data.URLENCODED):
        return {
            field.name: field.value.decode("utf-8", "replace")
            for field in form_data.parse_body(content_type, body)
        }
    if mime != "application/json":
        return {}
    return json_body.parse_object(body)

"""Workflows over the control plane: TorchServe's routes, for its archives and for our own documents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from typing_extensions import NotRequired, TypedDict

from serve_app.domain import validation
from serve_app.domain.model import Registration
from serve_app.domain.urls import redact_url
from serve_app.domain.validation import documented
from serve_app.domain.workflow_graph import WorkflowDocument, WorkflowSource
from serve_app.errors import InvalidBody
from serve_app.protocols.http import form_data, json_body
from serve_app.protocols.http.endpoints import API, Content, delete, get, post
from serve_app.protocols.http.exchange import HttpExchange
from serve_app.protocols.http.json_errors import CHANGED, ERRORS
from serve_app.protocols.management.request import ManagementRequest
from serve_app.protocols.torchserve.descriptions import MAX_PAGE_SIZE
from serve_app.protocols.torchserve.parameters import (
    PageParameters,
    WorkflowParameters,
    parse_bool,
    parse_count,
    parse_integer,
)

_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


class WorkflowEntry(TypedDict):
    workflowName: str
    workflowUrl: str


class WorkflowPage(TypedDict):
    nextPageToken: NotRequired[str]
    workflows: list[WorkflowEntry]


async def list_page(request: ManagementRequest) -> WorkflowPage:
    size = parse_integer(request.query.get("limit"), MAX_PAGE_SIZE)
    size = size if 0 <= size <= MAX_PAGE_SIZE else MAX_PAGE_SIZE
    start = max(parse_integer(request.query.get("next_page_token"), 0), 0)
    page, next_start = await request.control.list_workflows(start, size, request.allowed_models)
    workflows: list[WorkflowEntry] = [
        {"workflowName": name, "workflowUrl": redact_url(url)} for name, url in page
    ]
    if next_start is None:
        return {"workflows": workflows}
    return {"nextPageToken": str(next_start), "workflows": workflows}


async def register(request: ManagementRequest) -> Any:
    """Register a workflow from the body's document, in YAML or JSON, or from an archive's URL.

    A body with ``steps`` is a document.
    """
    body = await request.exchange.read_body(request.max_body_size)
    fields = {**request.query, **(await asyncio.to_thread(_parse_body, request.exchange, body))}
    registration = replace(_parse_registration(fields), allowed_models=request.allowed_models)
    ref = await request.control.register_workflow(registration, _workflow_document(fields))
    return {"status": f"Workflow {ref.name} has been registered and scaled successfully."}


async def unregister(
    request: ManagementRequest, workflow_name: str, workflow_version: str | None = None
) -> Any:
    await request.control.unregister_workflow(workflow_name, workflow_version)
    return {"status": f'Workflow "{workflow_name}" unregistered'}


async def describe(request: ManagementRequest, workflow_name: str) -> list[WorkflowDocument]:
    return await request.control.api.get_workflow(workflow_name)


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


_WORKFLOW = Content(
    dict.fromkeys(("application/json", "application/yaml"), WorkflowParameters | WorkflowSource),
    "A workflow, or the parameters of the query, which they override.",
    required=False,
)
WORKFLOWS = API(
    "Workflows",
    "Registration and description. A workflow is called by name, like a model.",
    ERRORS,
    (
        get(
            "/workflows",
            "workflows",
            "List workflows by name.",
            WorkflowPage,
            query=PageParameters,
            call=list_page,
        ),
        post(
            "/workflows",
            "register_workflow",
            "Register a workflow, from a .war or from a document.",
            CHANGED,
            (404, 405, 409, 507),
            _WORKFLOW,
            query=WorkflowParameters,
            call=register,
        ),
        get(
            "/workflows/{workflow_name}",
            "workflow",
            "Describe every version of a workflow.",
            Annotated[list[WorkflowDocument], documented("The default version first.", minItems=1)],
            call=describe,
        ),
        delete(
            "/workflows/{workflow_name}",
            "unregister_workflow",
            "Unregister a workflow with its models.",
            CHANGED,
            (405, 409),
            call=unregister,
        ),
        delete(
            "/workflows/{workflow_name}/{workflow_version}",
            "unregister_workflow_version",
            "Unregister one version of a workflow.",
            CHANGED,
            (403, 405, 409),
            call=unregister,
        ),
    ),
)

"""The routes of workflows: the calls of the control plane, and the responses to clients."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest

from serve_app.domain.access import AccessTable, KeyGrant
from serve_app.domain.model import ModelRef, Registration
from serve_app.domain.workflow_graph import WorkflowGraph
from serve_app.errors import InProgress, WorkflowFailed, WorkflowNotFound

DOCUMENT = {"name": "reading", "steps": {"a": {"model": "m"}}}
YAML = "name: reading\nversion: '2.0'\nsteps:\n  a: {model: m}\n"


class Workflows:
    """A workflow service that records its calls."""

    def __init__(self, control_api: Any) -> None:
        self.requested: list[Any] = []
        for name in ("register_workflow", "list_workflows", "get_workflow", "unregister_workflow"):
            setattr(control_api, name, getattr(self, name))

    async def register_workflow(self, registration: Registration, graph: WorkflowGraph | None) -> ModelRef:
        self.requested.append((registration, graph))
        if registration.url == "broken.war":
            raise WorkflowFailed(
                "broken", "Workflow Node broken__m failed to register. Details: no", "Traceback"
            )
        return ModelRef(registration.model_name or (graph.name if graph else "wf"), "1.0")

    async def list_workflows(self) -> list[tuple[str, str]]:
        return [("one", "one.war"), ("team-two", ""), ("three", "")]

    async def get_workflow(self, name: str) -> list[dict[str, Any]]:
        if name != "one":
            raise WorkflowNotFound(name)
        return [{"workflowName": "one"}]

    async def unregister_workflow(self, name: str, version: str | None) -> None:
        self.requested.append((name, version))
        if name == "late":
            raise InProgress("Stored.")


@pytest.fixture
def route(management: Callable[..., Any]) -> Callable[..., Any]:
    def build(access: AccessTable | None = None) -> tuple[Any, Workflows]:
        app = management(access=access)
        return app, Workflows(app.control_api)

    return build


def result(response: Any) -> Any:
    return response.status, json.loads(response.body)


def test_a_war_is_registered_by_query_form_or_json(route: Callable[..., Any]) -> None:
    app, workflows = route()
    registered = (200, {"status": "Workflow named has been registered and scaled successfully."})
    query = "/workflows?url=a.war&workflow_name=named&response_timeout=7&startup_timeout=9&s3_sse_kms=true"
    query += "&sha256=ab"
    assert result(app("POST", query)) == registered
    body = {
        "url": "a.war",
        "workflow_name": "named",
        "response_timeout": 7,
        "startup_timeout": "9",
        "s3_sse_kms": True,
        "sha256": "ab",
    }
    assert (
        result(app("POST", "/workflows", json.dumps(body).encode(), {"content-type": "application/json"}))
        == registered
    )
    form = query.partition("?")[2].encode()
    assert (
        result(app("POST", "/workflows", form, {"content-type": "application/x-www-form-urlencoded"}))
        == registered
    )
    wanted = Registration(
        "a.war", model_name="named", response_timeout=7, startup_timeout=9, s3_sse_kms=True, sha256="ab"
    )
    assert workflows.requested == [(wanted, None)] * 3


@pytest.mark.parametrize("kind", ["application/yaml", "text/yaml; charset=utf-8", "application/x-yaml"])
def test_a_document_is_registered_in_yaml(route: Callable[..., Any], kind: str) -> None:
    app, workflows = route()
    assert app("POST", "/workflows?workflow_name=other", YAML.encode(), {"content-type": kind}).status == 200
    [(registration, graph)] = workflows.requested
    assert (registration.model_name, graph.name, graph.version) == ("other", "other", "2.0")


def test_a_document_is_registered_in_json(route: Callable[..., Any]) -> None:
    app, workflows = route()
    response = app("POST", "/workflows", json.dumps(DOCUMENT).encode(), {"content-type": "application/json"})
    assert result(response)[1] == {"status": "Workflow reading has been registered and scaled successfully."}
    assert workflows.requested[0][1].models == {"a": ("m", None)}


@pytest.mark.parametrize(
    ("target", "body", "kind", "status", "type_", "words"),
    [
        ("", b"", "", 400, "BadRequestException", "Parameter url is required."),
        ("", b"{}", "application/json", 400, "BadRequestException", "Parameter url is required."),
        ("", b"[1]", "application/json", 400, "BadRequestException", "must be a JSON object, and is a list"),
        ("", b"{", "application/json", 400, "BadRequestException", "The body is not JSON"),
        ("", b"steps: [", "text/yaml", 400, "BadRequestException", "The body line 1"),
        ("", b"&a [*a]", "text/yaml", 400, "BadRequestException", "The body holds more than"),
        (
            "",
            b"steps: {a: {modle: m}}",
            "text/yaml",
            400,
            "InvalidWorkflowException",
            "did you mean 'model'?",
        ),
        (
            "",
            b"steps: {a: {model: m, inputs: a}}",
            "text/yaml",
            400,
            "InvalidDAGException",
            "wait for each other: a → a",
        ),
        (
            "?url=broken.war",
            b"",
            "",
            500,
            "WorkflowException",
            "Workflow broken has failed to register. Failures: [",
        ),
    ],
)
def test_invalid_workflows_are_refused(
    route: Callable[..., Any], target: str, body: bytes, kind: str, status: int, type_: str, words: str
) -> None:
    app, _ = route()
    response = app("POST", f"/workflows{target}", body, {"content-type": kind} if kind else {})
    reported = json.loads(response.body)
    assert (response.status, reported["type"]) == (status, type_) and words in reported["message"]
    assert ("detail" in reported) == (status == 500)


def test_a_body_that_is_too_large(management: Callable[..., Any]) -> None:
    app = management(max_request_size=10)
    Workflows(app.control_api)
    assert app("POST", "/workflows", YAML.encode(), {"content-type": "text/yaml"}).status == 413


def test_workflows_are_listed_in_pages(route: Callable[..., Any]) -> None:
    app, _ = route()
    assert result(app("GET", "/workflows?limit=2")) == (
        200,
        {
            "nextPageToken": "2",
            "workflows": [
                {"workflowName": "one", "workflowUrl": "one.war"},
                {"workflowName": "team-two", "workflowUrl": ""},
            ],
        },
    )
    page = result(app("GET", "/workflows?limit=-2&next_page_token=2"))[1]
    assert page["workflows"] == [{"workflowName": "three", "workflowUrl": ""}]


def test_workflows_are_described_and_unregistered(route: Callable[..., Any]) -> None:
    app, workflows = route()
    assert result(app("GET", "/workflows/one")) == (200, [{"workflowName": "one"}])
    status, reported = result(app("GET", "/workflows/two"))
    assert (status, reported["type"], reported["message"]) == (
        404,
        "WorkflowNotFoundException",
        "Workflow not found: two",
    )
    assert result(app("DELETE", "/workflows/one")) == (200, {"status": 'Workflow "one" unregistered'})
    assert app("DELETE", "/workflows/one/2.0/").status == 200
    assert result(app("DELETE", "/workflows/late")) == (202, {"status": "Stored."})
    assert workflows.requested == [("one", None), ("one", "2.0"), ("late", None)]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("PUT", "/workflows", 405),
        ("DELETE", "/workflows", 405),
        ("PUT", "/workflows/one", 405),
        ("GET", "/workflows/one/1.0", 405),
        ("GET", "/workflows/one/1.0/x", 404),
    ],
)
def test_other_methods_and_paths(route: Callable[..., Any], method: str, path: str, status: int) -> None:
    assert route()[0](method, path).status == status


def test_keys_are_checked_for_workflows(route: Callable[..., Any]) -> None:
    grants = {
        sha256(b"all").digest(): KeyGrant(frozenset({"manage", "observe"})),
        sha256(b"team").digest(): KeyGrant(frozenset({"manage", "observe"}), ("team-*",)),
        sha256(b"caller").digest(): KeyGrant(frozenset({"infer"})),
    }
    app, workflows = route(AccessTable(grants))

    def by(key: str, method: str, path: str) -> int:
        return app(method, path, headers={"authorization": f"Bearer {key}"} if key else {}).status

    assert [by(key, "GET", "/workflows") for key in ("", "caller", "all")] == [400, 400, 200]
    assert [by(key, "POST", "/workflows?url=a.war") for key in ("", "caller", "all")] == [400, 400, 200]
    assert [by("team", "DELETE", f"/workflows/{name}") for name in ("one", "team-two")] == [400, 200]
    listed = app("GET", "/workflows", headers={"authorization": "Bearer team"})
    assert [row["workflowName"] for row in json.loads(listed.body)["workflows"]] == ["team-two"]
    assert by("team", "POST", "/workflows?url=a.war") == 200
    assert workflows.requested[-1][0].allowed_models == ("team-*",)

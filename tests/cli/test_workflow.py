"""`torchrelay workflow`, against a fake of the management API."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve_app.cli.app import app

DESCRIBED = [
    {
        "workflowName": "reading",
        "workflowVersion": "1.0",
        "workflowUrl": "reading.war",
        "defaultVersion": True,
        "functions": {"phase": "ready", "workers": 1},
        "steps": {
            "cut": {"function": "cut", "inputs": {"image": "request"}},
            "read": {"model": "reader:2.0", "each": "cut", "retries": 1, "timeout_s": 2.5},
        },
        "output": ["read"],
    }
]


@pytest.fixture
def server(serve_json: Any) -> tuple[str, list[Any]]:
    requests: list[Any] = []

    def respond(method: str, path: str, body: Any) -> tuple[int, Any]:
        requests.append((method, path, body))
        if path == "/workflows/reading" and method == "GET":
            return 200, DESCRIBED
        if method == "GET":
            return 200, {"workflows": [{"workflowName": "reading", "workflowUrl": "reading.war"}]}
        if method == "DELETE":
            return 200, {"status": 'Workflow "reading" unregistered'}
        return 200, {"status": "Workflow reading has been registered and scaled successfully."}

    return serve_json(respond), requests


def run(server: tuple[str, list[Any]], *arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(
        app, ["workflow", "--management", server[0], *arguments], env={"COLUMNS": "120"}
    )
    assert result.exit_code == code, result.output
    return result.output


def test_a_workflow_is_registered_by_name_and_by_document(
    server: tuple[str, list[Any]], tmp_path: Path
) -> None:
    assert "registered and scaled successfully." in run(server, "register", "reading.war", "--name", "other")
    document = tmp_path / "reading.yaml"
    document.write_text("name: reading\nsteps: {a: {model: m}}\n")
    run(server, "register", str(document))
    (tmp_path / "reading.json").write_text('{"steps": {}}')
    run(server, "register", str(tmp_path / "reading.json"))
    assert server[1] == [
        ("POST", "/workflows?url=reading.war&workflow_name=other", None),
        ("POST", "/workflows", {"name": "reading", "steps": {"a": {"model": "m"}}}),
        ("POST", "/workflows", {"steps": {}}),
    ]
    document.write_text("a: [")
    assert "reading.yaml" in run(server, "register", str(document), code=2).replace("\n", "")
    run(server, "register", "no.yaml", code=2)


def test_workflows_are_listed_described_and_removed(server: tuple[str, list[Any]]) -> None:
    assert "reading.war" in run(server, "list")
    output = run(server, "describe", "reading")
    for text in (
        "reading 1.0, the default; functions ready, 1 workers",
        "cut()",
        "image: request",
        "read →",
        "2.5 s",
    ):
        assert text in output
    assert json.loads(run(server, "describe", "reading", "--json")) == DESCRIBED
    run(server, "remove", "reading")
    run(server, "remove", "reading", "--version", "2.0")
    assert [path for method, path, _ in server[1] if method == "DELETE"] == [
        "/workflows/reading",
        "/workflows/reading/2.0",
    ]


def test_archive_is_written(server: tuple[str, list[Any]], tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("steps: {a: {function: f}}")
    (tmp_path / "f.py").write_text("def f(body):\n    return body\n")
    arguments = [
        "archive",
        "--workflow-name",
        "w",
        "--spec-file",
        str(tmp_path / "w.yaml"),
        "--export-path",
        str(tmp_path),
    ]
    assert "ERROR - " in run(server, *arguments, code=1)
    output = run(server, *arguments, "--handler", str(tmp_path / "f.py"))
    assert "w.war: workflow w, with w.yaml, f.py" in output.replace("\n", "")
    assert set(zipfile.ZipFile(tmp_path / "w.war").namelist()) == {"w.yaml", "f.py", "WAR-INF/MANIFEST.json"}
    run(server, *arguments, "--handler", str(tmp_path / "f.py"), code=1)
    assert "WARNING - Overwriting" in run(server, *arguments, "--handler", str(tmp_path / "f.py"), "-f")
    assert server[1] == []

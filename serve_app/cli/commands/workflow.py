"""`torchrelay workflow`: make workflow archives, and register, list, describe and remove workflows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import MANAGEMENT, CliClient, ManagementUrl, Token, console
from serve_app.cli.commands.archive import display_path, file_option
from serve_app.model_store.archiver import ArchiverError
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make

workflow_app = typer.Typer(
    help="Models and functions that are called together, by one name.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument()]
_DOCUMENTS = (".yaml", ".yml", ".json")


@workflow_app.callback()
def workflow(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Register, list, describe and remove workflows."""
    context.obj = management, token


@workflow_app.command()
def archive(
    workflow_name: Annotated[
        str, typer.Option(help="The workflow's name; the archive is WORKFLOW_NAME.war.")
    ],
    spec_file: Annotated[
        str, file_option("--spec-file", help="The YAML file: steps, or TorchServe's models and dag.")
    ],
    handler: Annotated[str | None, file_option("--handler", help="The Python file of the functions.")] = None,
    export_path: Annotated[
        str, typer.Option(metavar="DIR", help="The folder of the archive; by default the working directory.")
    ] = ".",
    extra_files: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A,B,…", help="Files that the functions need."),
    ] = None,
    force: Annotated[bool, typer.Option("-f", "--force", help="Overwrite an archive of that name.")] = False,
) -> None:
    """Make a workflow archive, with the options of torch-workflow-archiver."""
    try:
        archived = make(
            WorkflowArchiveRecipe(workflow_name, spec_file, handler, export_path, extra_files, force)
        )
    except ArchiverError as error:
        print(f"ERROR - {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in archived.warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    print(f"{display_path(archived.path)}: workflow {workflow_name}, {archived.files} files and the manifest")


@workflow_app.command()
def register(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A .war in the workflow store, a URL, or a local document: ocr.yaml.")
    ],
    name: Annotated[Optional[str], typer.Option(help="The name; by default that in the archive.")] = None,  # noqa: UP045
) -> None:
    """Register a workflow, and wait until all of its parts are ready."""
    with CliClient(*context.obj) as client, console.status(f"Registering {source} …"):
        document = _read_document(source) if source.endswith(_DOCUMENTS) and "://" not in source else None
        url = source if document is None else None
        console.print(client.register_workflow(url, document, workflow_name=name), highlight=False)


@workflow_app.command("list")
def list_(context: typer.Context) -> None:
    """List workflows."""
    with CliClient(*context.obj) as client:
        table = Table("workflow", "url")
        for workflow in client.workflows():
            table.add_row(Text(workflow["workflowName"]), Text(workflow["workflowUrl"]))
    console.print(table)


@workflow_app.command()
def describe(
    context: typer.Context,
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="The management API's JSON.")] = False,
) -> None:
    """Show the steps of a workflow, of each of its versions."""
    with CliClient(*context.obj) as client:
        versions = client.workflow(name)
    if as_json:
        console.print_json(data=versions)
    else:
        console.print(Group(*map(_render_version, versions)))


@workflow_app.command()
def remove(
    context: typer.Context,
    name: Name,
    version: Annotated[Optional[str], typer.Option(help="Only this version.")] = None,  # noqa: UP045
) -> None:
    """Unregister a workflow with the models that came with it; running requests are completed."""
    with CliClient(*context.obj) as client:
        console.print(client.unregister_workflow(name, version), highlight=False)


def _render_version(version: dict[str, Any]) -> RenderableType:
    """Return a version's steps, the models that they call, and the sources of their inputs."""
    mark = ", the default" if version["defaultVersion"] else ""
    head = Text(f"{version['workflowName']} {version['workflowVersion']}{mark}", style="bold")
    functions = version.get("functions")
    if functions:
        head.append(f"; functions {functions['phase']}, {functions['workers']} workers", style="dim")
    table = Table("step", "calls", "inputs", "for each", "retries", "timeout")
    for name, step in version["steps"].items():
        callee = step.get("model") or f"{step['function']}()"
        timeout = f"{step['timeout_s']:g} s" if "timeout_s" in step else "-"
        each = _format_sources(step.get("each"))
        inputs = _format_sources(step.get("inputs")) or ("" if each else "request")
        mark = " →" if name in version["output"] else ""
        table.add_row(
            Text(name + mark), Text(callee), Text(inputs), Text(each), str(step.get("retries", 0)), timeout
        )
    return Group(head, table)


def _format_sources(sources: str | dict[str, str] | None) -> str:
    if isinstance(sources, dict):
        return ", ".join(f"{name}: {source}" for name, source in sources.items())
    return sources or ""


def _read_document(source: str) -> Any:
    path = Path(source)
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise typer.BadParameter(f"{source}: {error}") from None

"""`torchrelay workflow`: make workflow archives, and register, list, describe and remove workflows."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from serve_app.cli.api_client import CliClient, use_server
from serve_app.cli.arguments import read_document
from serve_app.cli.commands.archive import archiver_errors, file_option, print_archive
from serve_app.cli.terminal import AsJson, console, show_document
from serve_app.model_store.workflow_archiver import WorkflowArchiveRecipe, make

workflow_app = typer.Typer(
    callback=use_server,
    help="Models and functions that are called together, by one name.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument()]
_DOCUMENTS = (".yaml", ".yml", ".json")


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
        str | None,
        typer.Option(metavar="A,B,…", help="Files that the functions need."),
    ] = None,
    force: Annotated[bool, typer.Option("-f", "--force", help="Overwrite an archive of that name.")] = False,
) -> None:
    """Make a workflow archive, with the options of torch-workflow-archiver."""
    recipe = WorkflowArchiveRecipe(workflow_name, spec_file, handler, export_path, extra_files, force)
    with archiver_errors():
        print_archive(make(recipe), f"workflow {workflow_name}")


@workflow_app.command()
def register(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(help="A .war in the workflow store, a URL, or a local document: ocr.yaml.")
    ],
    name: Annotated[str | None, typer.Option(help="The name; by default that in the archive.")] = None,
) -> None:
    """Register a workflow, and wait until all of its parts are ready."""
    with CliClient(*context.obj) as client, console.status(f"Registering {source} …"):
        document = read_document(source) if source.endswith(_DOCUMENTS) and "://" not in source else None
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
def describe(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show the steps of a workflow, of each of its versions."""
    with CliClient(*context.obj) as client:
        versions = client.workflow(name)
    show_document(versions, _render_versions, as_json)


@workflow_app.command()
def remove(
    context: typer.Context,
    name: Name,
    version: Annotated[str | None, typer.Option(help="Only this version.")] = None,
) -> None:
    """Unregister a workflow with the models that came with it; running requests are completed."""
    with CliClient(*context.obj) as client:
        console.print(client.unregister_workflow(name, version), highlight=False)


def _render_versions(versions: list[dict[str, Any]]) -> RenderableType:
    return Group(*map(_render_version, versions))


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

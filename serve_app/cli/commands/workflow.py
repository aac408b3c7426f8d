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

from serve_app.cli.archive import file_option, shown_path
from serve_app.cli.talk import MANAGEMENT, ManagementUrl, Talk, Token, console
from serve_app.store.archiver import ArchiverError
from serve_app.store.war_archiver import WarRecipe, make

workflow_app = typer.Typer(help="Models and functions that answer together, as one name.", no_args_is_help=True)

Name = Annotated[str, typer.Argument()]
_DOCUMENTS = (".yaml", ".yml", ".json")


@workflow_app.callback()
def workflow(context: typer.Context, management: ManagementUrl = MANAGEMENT, token: Token = "") -> None:
    """Models and functions that answer together, as one name."""
    context.obj = management, token


@workflow_app.command()
def archive(
    workflow_name: Annotated[str, typer.Option(help="The archive's name too: WORKFLOW_NAME.war.")],
    spec_file: Annotated[str, file_option("--spec-file", help="Its YAML: steps, or TorchServe's models and dag.")],
    handler: Annotated[Optional[str], file_option("--handler", help="The Python file of its functions.")] = None,  # noqa: UP045
    export_path: Annotated[str, typer.Option(metavar="DIR", help="Where it goes; here, without a word.")] = ".",
    extra_files: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A,B,…", help="Files that the functions need."),
    ] = None,
    force: Annotated[bool, typer.Option("-f", "--force", help="Write over an archive of that name.")] = False,
) -> None:
    """Make a workflow archive, with the options of torch-workflow-archiver."""
    try:
        made = make(WarRecipe(workflow_name, spec_file, handler, export_path, extra_files, force))
    except ArchiverError as error:
        print(f"ERROR - {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    for warning in made.warnings:
        print(f"WARNING - {warning}", file=sys.stderr)
    print(f"{shown_path(made.path)}: workflow {workflow_name}, {made.files} files and the manifest")


@workflow_app.command()
def register(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="A .war in the workflow store, a URL, or a document here: ocr.yaml.")],
    name: Annotated[Optional[str], typer.Option(help="Its name; else its own.")] = None,  # noqa: UP045
) -> None:
    """Register a workflow, and wait until all of it answers."""
    with Talk(*context.obj) as client, console.status(f"Registering {source} …"):
        document = _document(source) if source.endswith(_DOCUMENTS) and "://" not in source else None
        url = source if document is None else None
        console.print(client.register_workflow(url, document, workflow_name=name), highlight=False)


@workflow_app.command("list")
def list_(context: typer.Context) -> None:
    """List workflows."""
    with Talk(*context.obj) as client:
        table = Table("workflow", "url")
        for said in client.workflows():
            table.add_row(Text(said["workflowName"]), Text(said["workflowUrl"]))
    console.print(table)


@workflow_app.command()
def describe(
    context: typer.Context,
    name: Name,
    as_json: Annotated[bool, typer.Option("--json", help="As the management API has it.")] = False,
) -> None:
    """Show the steps of a workflow, of each of its versions."""
    with Talk(*context.obj) as client:
        said = client.workflow(name)
    if as_json:
        console.print_json(data=said)
    else:
        console.print(Group(*map(shown, said)))


@workflow_app.command()
def remove(
    context: typer.Context,
    name: Name,
    version: Annotated[Optional[str], typer.Option(help="That one of several.")] = None,  # noqa: UP045
) -> None:
    """Unregister a workflow with the models that came with it; calls that had begun end as they would."""
    with Talk(*context.obj) as client:
        console.print(client.unregister_workflow(name, version), highlight=False)


def shown(said: dict[str, Any]) -> RenderableType:
    """A version: its steps, what they ask, and where their input comes from."""
    mark = ", the default" if said["defaultVersion"] else ""
    head = Text(f"{said['workflowName']} {said['workflowVersion']}{mark}", style="bold")
    functions = said.get("functions")
    if functions:
        head.append(f"; functions {functions['phase']}, {functions['workers']} workers", style="dim")
    table = Table("step", "asks", "of", "for each", "retries", "timeout")
    for name, step in said["steps"].items():
        asks = step.get("model") or f"{step['function']}()"
        limit = f"{step['timeout_s']:g} s" if "timeout_s" in step else "-"
        dealt = _sources(step.get("each"))
        inputs = _sources(step.get("inputs")) or ("" if dealt else "request")
        mark = " →" if name in said["output"] else ""
        table.add_row(Text(name + mark), Text(asks), Text(inputs), Text(dealt), str(step.get("retries", 0)), limit)
    return Group(head, table)


def _sources(said: str | dict[str, str] | None) -> str:
    if isinstance(said, dict):
        return ", ".join(f"{name}: {source}" for name, source in said.items())
    return said or ""


def _document(source: str) -> Any:
    path = Path(source)
    try:
        text = path.read_text()
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise typer.BadParameter(f"{source}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise typer.BadParameter(f"{source}: {error}") from None
